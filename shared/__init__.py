"""Everything that is not the lesson: models, prompts, the command line, benchmark and report."""

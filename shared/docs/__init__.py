"""What the documentation is made from besides prose and benchmark results."""

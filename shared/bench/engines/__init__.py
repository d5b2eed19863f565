"""Other engines on the same prompts. Each file is run as a script by a Python of its own and imports nothing of ours.

A script reads one JSON document from standard input: `model` (folder), `prompts` (lists of token ids), `new_tokens`,
`threads`, `device`, `dtype`, `work` (a folder it may keep converted weights in). It generates greedily, stop tokens off:
once with few tokens to warm up, once timed. Its last line on standard output is a JSON document: `token_ids`, `seconds`,
`version`.
"""

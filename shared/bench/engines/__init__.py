"""Other engines on the same prompts. Each file is run as a script by a Python of its own and imports nothing of ours.

A script reads one JSON document from standard input: `model` (folder), `prompts` (lists of token ids), `new_tokens`,
`threads`, `device`, `dtype`, and `work`, a folder for converted weights. It generates greedily, stop tokens off: once
with few tokens to warm up, once timed. The last line of its standard output is a JSON document: `token_ids`, `seconds`,
`version`.
"""

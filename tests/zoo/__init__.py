"""The bug zoo: bugs people really write in a paged KV cache, planted one at a time; the tests must notice each of them.

`python -m tests.zoo` plants them all; mutants.py lists them.
"""

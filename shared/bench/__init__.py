"""The benchmark: every step and its baseline, each in a fresh process. `python -m shared.bench --help`."""

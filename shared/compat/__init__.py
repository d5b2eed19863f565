"""What each version of transformers does with each way of handing it a cache: measured, one environment per version.

`python -m shared.compat` builds the environments under `.compat/` and writes `results/compat/VERSION.json`.
"""

from shared.steps import ROOT

# The version the seed article used, those in which something changed for callers, and today's.
VERSIONS = ("4.43.4", "4.47.1", "4.51.3", "4.57.6", "5.0.0", "5.24.0")
RESULTS = ROOT / "results" / "compat"

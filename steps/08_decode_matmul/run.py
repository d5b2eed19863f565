"""Answer prompts with this step's model.py and time it: `python run.py --help`. The same file in every step."""

import sys
from pathlib import Path

STEP = Path(__file__).resolve().parent
sys.path.insert(0, str(STEP.parents[1]))

from shared.cli import main

if __name__ == "__main__":
    main(STEP)

"""Start the project's commands in the project's own Python, whichever Python the user typed.

Standard library only, and plain enough for any Python 3: it runs before set-up, too.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from shared.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
NEEDED = ("torch", "transformers", "safetensors")


def ensure_dependencies() -> None:
    """Return if this Python can import what the steps need; otherwise run the same command line in `.venv`.

    Raises:
        UserError: there is no `.venv`, or it is the Python running now and lacks a package.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if not missing:
        return
    python = VENV / "bin" / "python"
    if not python.exists():
        raise UserError(f"this Python has no {missing[0]} and {VENV} does not exist: run `make setup` first")
    if Path(sys.prefix).resolve() == VENV.resolve():
        raise UserError(f"{VENV} has no {missing[0]}, its set-up was not finished: run `make setup`")
    sys.stdout.flush()
    os.execv(python, [str(python), *_arguments()])


def _arguments() -> list[str]:
    """What followed the interpreter's own options: a script or `-m module`, and its arguments."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:
        return sys.argv
    return ["-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]

"""Make `.venv` and install the exact versions of requirements.lock into it: `make setup`. Standard library only.

Every other target of the Makefile runs it first, so it does nothing, and says nothing, when all is in place.
With --lock it writes requirements.lock anew from pyproject.toml instead.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
LOCK = ROOT / "requirements.lock"
STAMP = VENV / "setup.json"
OLDEST, NEWEST = (3, 11), (3, 13)

LOCK_HEADER = """\
# The exact versions that `make setup` installs. Written by `make lock` from pyproject.toml; not edited by hand.
# A torch built for CUDA brings further packages of its own (nvidia-*, triton) in the versions it asks for.
"""
# What a torch built for CUDA brings along. In the lock it would keep other machines from installing anything.
LINUX_ONLY = re.compile(r"^(nvidia|cuda|triton)\b")
CUDA_OR_CPU = """\
torch: about 200 MB if your package index has the CPU build; the usual one for Linux is the CUDA build, several GB
    with its libraries. For the CPU build stop now (Ctrl-C) and give the index that PyTorch's install page names for it:
    make setup TORCH_INDEX=ADDRESS"""
LOCKED_GROUPS = ("bench", "test", "lint", "docs")


class SetupError(Exception):
    """One plain line for the user."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="make setup", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--torch-index", default="", metavar="URL", help="take torch from this package index")
    parser.add_argument("--lock", action="store_true", help="write requirements.lock anew from pyproject.toml")
    parser.add_argument("--quiet", action="store_true", help="say nothing when there is nothing to do")
    options = parser.parse_args()
    try:
        check_python()
        if options.lock:
            write_lock(options.torch_index)
        else:
            set_up(options.torch_index, options.quiet)
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("\ninterrupted: `make setup` goes on from here", file=sys.stderr)
        raise SystemExit(130) from None


def check_python() -> None:
    """Raise SetupError unless the Python running now is one that all locked packages exist for."""
    if OLDEST <= sys.version_info[:2] <= NEWEST:
        return
    wanted = [f"python3.{minor}" for minor in range(NEWEST[1], OLDEST[1] - 1, -1)]
    found = next((name for name in wanted if shutil.which(name)), None)
    remedy = f"run `make setup PYTHON={found or wanted[1]}`" + ("" if found else " once such a Python is installed")
    raise SetupError(f"this is Python {platform.python_version()}; Python 3.11, 3.12 or 3.13 is needed: {remedy}")


def set_up(torch_index: str, quiet: bool) -> None:
    """Bring `.venv` to the state the stamp describes, starting from whatever an earlier run left behind.

    An index given once is remembered: without `torch_index` torch stays the build that it was.
    """
    done = read_stamp()
    wanted = {
        "lock": hashlib.sha256(LOCK.read_bytes()).hexdigest(),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch_index": torch_index or done.get("torch_index", ""),
    }
    if done == wanted and venv_works(wanted["python"]):
        if not quiet:
            print(f"set up already: {VENV} holds what requirements.lock names (`make distclean` removes it)")
        return

    announce(wanted)
    STAMP.unlink(missing_ok=True)
    if not venv_works(wanted["python"]):
        run(
            [base_python(), "-m", "venv", "--clear", VENV],
            "could not create .venv (on Debian: apt install python3-venv)",
        )
    STAMP.write_text(json.dumps({"torch_index": wanted["torch_index"]}))  # what an interrupted run must not forget
    if wanted["torch_index"]:
        torch = next(line for line in LOCK.read_text().splitlines() if line.startswith("torch=="))
        pip_install(VENV, "--index-url", wanted["torch_index"], "--no-deps", "--force-reinstall", torch)
    pip_install(VENV, "--requirement", LOCK)
    STAMP.write_text(json.dumps(wanted, indent=1) + "\n")
    torch_version = run([VENV / "bin/python", "-c", "import torch; print(torch.__version__)"], "torch does not start")
    say(f"set up: torch {torch_version.strip()} and the rest of requirements.lock are in .venv")


def announce(wanted: dict[str, str]) -> None:
    """Say what is about to be downloaded, and how large it is, before anything is."""
    if wanted["torch_index"]:
        torch = f"torch from {wanted['torch_index']}: about 200 MB for a CPU build, several GB for a CUDA build"
    elif platform.system() == "Linux":
        torch = CUDA_OR_CPU
    else:
        torch = "torch: about 100 MB"
    say(f"""\
setting up .venv: Python {wanted["python"]} and the packages of requirements.lock. Downloaded unless pip has them:
  {torch}
  everything else: about 200 MB""")


def read_stamp() -> dict[str, str]:
    """What the last complete set-up wrote; empty if there was none."""
    try:
        return json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}


def venv_works(python_version: str) -> bool:
    """Whether `.venv` has a Python of that version that starts, and pip."""
    code = "import sys, importlib.util as u; print('%d.%d' % sys.version_info[:2], u.find_spec('pip') is not None)"
    try:
        found = subprocess.run([VENV / "bin/python", "-c", code], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return found.stdout.strip() == f"{python_version} True"


def base_python() -> str:
    """The Python that `.venv` is made from, also when the one running now is `.venv`'s own."""
    return getattr(sys, "_base_executable", None) or sys.executable


def pip_install(venv: Path, *arguments: str | Path) -> None:
    """Run pip; its progress is for a terminal only, and never on standard output."""
    loudness = [] if sys.stderr.isatty() else ["--quiet"]
    command = [venv / "bin/python", "-m", "pip", "install", "--disable-pip-version-check", *loudness, *arguments]
    run(
        command, "pip failed, its message is above; nothing is lost, put it right and run `make setup` again", show=True
    )


def run(command: list[str | Path], failure: str, show: bool = False) -> str:
    """Run a command and return its standard output; with `show` that goes to our standard error instead."""
    result = subprocess.run(
        [str(part) for part in command], stdout=sys.stderr if show else subprocess.PIPE, text=True, check=False
    )
    if result.returncode:
        raise SetupError(failure)
    return result.stdout or ""


def write_lock(torch_index: str) -> None:
    """Install pyproject.toml's dependencies into a throw-away environment and write down what came."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    requirements = list(project["project"]["dependencies"])
    for group in LOCKED_GROUPS:
        requirements += project["dependency-groups"][group]
    with tempfile.TemporaryDirectory(prefix="lock-") as folder:
        venv = Path(folder) / "venv"
        run([base_python(), "-m", "venv", venv], "could not create a throw-away environment")
        if torch_index:
            torch = next(line for line in requirements if line.startswith("torch"))
            pip_install(venv, "--index-url", torch_index, "--no-deps", torch)
        pip_install(venv, *requirements)
        frozen = run([venv / "bin/python", "-m", "pip", "freeze"], "pip freeze failed")
    pins = [line.split("+")[0] for line in frozen.splitlines() if "==" in line and not LINUX_ONLY.match(line)]
    temporary = LOCK.with_suffix(".tmp")
    temporary.write_text(LOCK_HEADER + "\n".join(pins) + "\n")
    os.replace(temporary, LOCK)
    say(f"wrote {LOCK.name}: {len(pins)} packages; see `git diff {LOCK.name}`, then `make test`")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

"""One virtual environment per version of transformers under `.compat/`; all of them use the torch of this Python."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import venv
from importlib.metadata import distribution
from pathlib import Path

from filelock import FileLock
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from shared.errors import UserError
from shared.steps import ROOT

FOLDER = ROOT / ".compat"
TORCH = FOLDER / "torch"
PYTHONS = ("3.11", "3.12")


def check_python() -> None:
    """UserError unless all versions of transformers can be installed for the Python running now."""
    running = ".".join(platform.python_version_tuple()[:2])
    if running not in PYTHONS:
        raise UserError(
            f"this is Python {running}; the oldest transformers compared here needs {' or '.join(PYTHONS)}: "
            f"make distclean, then make setup PYTHON=python{PYTHONS[-1]}"
        )


def python_of(version: str) -> Path:
    """The Python in which `import transformers` gives this version; its environment is made first if need be.

    Raises:
        UserError: pip could not install it (its message is on standard error).
    """
    check_python()
    FOLDER.mkdir(exist_ok=True)
    with FileLock(FOLDER / ".lock"):
        link_torch()
        folder = FOLDER / version
        stamp, wanted = folder / "complete.json", describe(version)
        if not stamp.is_file() or json.loads(stamp.read_text()) != wanted:
            shutil.rmtree(folder, ignore_errors=True)
            install(version, folder)
            stamp.write_text(json.dumps(wanted))
    return folder / "bin" / "python"


def describe(version: str) -> dict[str, str]:
    """What an environment is good for: with another Python, or in another place, it is made anew."""
    return {"transformers": version, "python": platform.python_version(), "folder": str(FOLDER)}


def install(version: str, folder: Path) -> None:
    create(folder)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install"]
    options = ["--quiet", "--disable-pip-version-check", f"transformers=={version}"]
    done = subprocess.run([*pip, *options], stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stderr)
        raise UserError(f"pip could not install transformers {version}, its message is above: is there a network?")


def create(folder: Path) -> None:
    """An environment without packages, in which torch is the one of this Python (see link_torch)."""
    venv.create(folder, clear=True, with_pip=False)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    # Python puts a folder named in a .pth file behind the environment's own packages: what another package asks for in
    # an exact version (numpy, tokenizers, huggingface_hub) is its own, and only torch and its parts come from here.
    (site_packages / "torch.pth").write_text(f"{TORCH}\n")


def link_torch() -> None:
    """Fill TORCH with links to torch and what it needs, and to nothing else of this environment."""
    TORCH.mkdir(parents=True, exist_ok=True)
    wanted = torch_files()
    for link in TORCH.iterdir():
        if link.name not in wanted or not link.exists():
            link.unlink()
    for name, target in wanted.items():
        if not (TORCH / name).is_symlink():
            os.symlink(target, TORCH / name)


def torch_files() -> dict[str, Path]:
    """The files and folders in site-packages that torch and its requirements consist of, by name."""
    files: dict[str, Path] = {}
    seen, waiting = set(), ["torch"]
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in seen:
            continue
        seen.add(name)
        package = distribution(name)
        tops = {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}
        files |= {top: Path(package.locate_file(top)) for top in tops}
        requirements = map(Requirement, package.requires or ())
        waiting += [r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    return files


def run_in(version: str, module: str, *arguments: str, capture: bool = False) -> subprocess.CompletedProcess:
    """Run `python -m module` with this version of transformers, in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONWARNINGS", None)
    command = [python_of(version), "-m", module, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=capture, text=True, check=False)

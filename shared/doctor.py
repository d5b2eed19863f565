"""Say what will work on this machine and what will not, with the reason and the remedy: `make doctor`.

Starts with the standard library alone, before any set-up and under any Python 3. What is installed is looked at by
the project's own Python in a process of its own, so that a package which cannot be imported, or takes the process
down with it, is one line of the report. Exit code 0 when `make bench` and `make test` will work, 1 when not.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if not __package__:
    sys.path[0] = str(ROOT)

from shared import setup_env  # noqa: E402 (the root has to be on the path first)
from shared.errors import plain_errors  # noqa: E402
from shared.models import DEFAULT_MODEL, MODELS_DIR  # noqa: E402

GOOD, NOTE, BAD = "ok", "--", "!!"

# What the default run needs, in GB, as measured on Linux with the CPU build of torch: the size of .venv, the model and
# its download, the largest process (1.1 in a run; the model's preparation holds the weights twice).
VENV_DISK, MODEL_DISK, MEMORY = 1.8, 0.7, 2.0
# The block size that run.py takes when none is given.
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Finding:
    """One line of the report. BAD: a README command will not work. NOTE: something optional is missing."""

    level: str
    name: str
    text: str
    remedy: str = ""


@plain_errors()
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make doctor", description=__doc__.split(":")[0])
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.probe:
        print(json.dumps({name: _attempt(look) for name, look in PROBES.items()}))
        return 0
    findings = examine(look_around())
    for finding in findings:
        print(f"{finding.level}  {finding.name:<13} {finding.text}")
        if finding.remedy:
            print(f"    {'':<13} -> {finding.remedy}")
    bad = [finding.name for finding in findings if finding.level == BAD]
    print()
    if bad:
        print(f"`make bench` and `make test` will not work here yet: see {', '.join(bad)}")
        return 1
    complete = all(finding.level == GOOD for finding in findings if finding.name in ("set-up", "model"))
    first = "" if complete else " (the first time they download what is missing: that needs a network)"
    print(f"`make bench` and `make test` will work here{first}")
    return 0


# ---- looking: facts as plain values, None for what cannot be found out


def look_around() -> dict:
    """Everything `examine` judges by."""
    python = setup_env.VENV / "bin/python"
    installed = python.exists()
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "venv": installed,
        "set_up": _attempt(_set_up),
        "can_make_venv": _attempt(_can_make_venv),
        "locked": _attempt(_locked),
        "packages": probe(str(python)) if installed else None,
        "nvidia": _attempt(_nvidia),
        "cores": os.cpu_count(),
        "memory": _attempt(_memory),
        "disk": _attempt(lambda: shutil.disk_usage(ROOT).free / 1e9),
        "model": _attempt(_model),
        "browser": next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None),
    }


def probe(python: str) -> dict:
    """What the packages of that Python say of themselves: `PROBES`, run in a process of their own."""
    command = [python, str(Path(__file__).resolve()), "--probe"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        return json.loads(done.stdout.splitlines()[-1])
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        # One of them takes the whole process down. Ask for each alone.
        return {name: _probe_alone(command, name) for name in PROBES}


def _probe_alone(command: list[str], name: str) -> dict:
    code = f"import runpy; names = runpy.run_path({command[1]!r}); names['probe_one']({name!r})"
    try:
        done = subprocess.run([command[0], "-c", code], capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            return {"error": f"takes the process down (exit code {done.returncode})"}
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": "does not start within two minutes"}
    except (OSError, ValueError, IndexError) as error:
        return {"error": _one_line(error)}


def probe_one(name: str) -> None:
    print(json.dumps(_attempt(PROBES[name])))


def _attempt(look):
    """What `look` returns, or {"error": ...}: whatever is broken here is a finding, never an end."""
    try:
        return look()
    except (Exception, SystemExit) as error:
        return {"error": _one_line(error)}


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}"[:160] if lines else type(error).__name__


def _set_up() -> bool:
    import hashlib

    return setup_env.read_stamp().get("lock") == hashlib.sha256(setup_env.LOCK.read_bytes()).hexdigest()


def _can_make_venv() -> bool:
    import importlib.util

    return all(importlib.util.find_spec(name) for name in ("venv", "ensurepip"))


def _locked() -> dict:
    lines = setup_env.LOCK.read_text(encoding="utf-8").splitlines()
    return dict(line.strip().split("==") for line in lines if "==" in line and not line.startswith("#"))


def _nvidia() -> str | None:
    """The first GPU's name and compute capability, from its driver's own tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.strip().splitlines()[0]


def _memory() -> float:
    """GB that a new process may use: what is free, or what this container is allowed, whichever is less."""
    available = []
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
        available.append(int(fields["MemAvailable"].split()[0]) / 1e6)
    else:
        available.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9)
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and limit.read_text().strip() != "max":
        used = Path("/sys/fs/cgroup/memory.current")
        available.append((int(limit.read_text()) - int(used.read_text())) / 1e9)
    return min(available)


def _model() -> str:
    """ready, missing or damaged."""
    folder = MODELS_DIR / DEFAULT_MODEL
    if not folder.exists():
        return "missing"
    weights = list(folder.glob("*.safetensors"))
    needed = [folder / "config.json", folder / "tokenizer.json", *weights]
    return "ready" if weights and all(file.is_file() and file.stat().st_size for file in needed) else "damaged"


def _probe_torch() -> dict:
    import torch

    cuda = torch.cuda.is_available()
    return {
        "version": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "cuda_build": torch.version.cuda,
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "capability": list(torch.cuda.get_device_capability()) if cuda else None,
        "architectures": torch.cuda.get_arch_list() if cuda else [],
    }


def _probe_transformers() -> dict:
    import inspect

    import transformers
    from transformers import LlamaForCausalLM

    parameters = inspect.signature(LlamaForCausalLM.forward).parameters
    name = "cache" if "cache" in parameters else "past_key_values"
    return {"version": transformers.__version__, "cache_argument": name}


def _probe_numba() -> dict:
    import numba

    return {"version": numba.__version__, "threads": numba.get_num_threads()}


def _probe_triton() -> dict:
    import numpy
    import triton

    return {"version": triton.__version__, "numpy": numpy.__version__}


def _probe_flash_attn() -> dict:
    import flash_attn

    return {"version": flash_attn.__version__}


def _probe_playwright() -> dict:
    from importlib.metadata import version

    import playwright.sync_api  # noqa: F401 (only whether it can be imported)

    return {"version": version("playwright")}


PROBES = {
    "torch": _probe_torch,
    "transformers": _probe_transformers,
    "numba": _probe_numba,
    "triton": _probe_triton,
    "flash_attn": _probe_flash_attn,
    "playwright": _probe_playwright,
}


# ---- judging


def examine(facts: dict) -> list[Finding]:
    """The report. `facts` is what look_around returns; nothing else is looked at."""
    judges = (
        *(_python, _set_up_state, _torch, _transformers, _numba, _cuda, _flash_attn, _triton),
        *(_model_state, _disk, _memory_state, _browser),
    )
    return [judge(facts) for judge in judges]


def _python(facts: dict) -> Finding:
    version = facts["python"]
    where = f"{version} on {facts['system']}, {facts['cores']} cores"
    minor = tuple(int(part) for part in version.split(".")[:2])
    if setup_env.OLDEST <= minor <= setup_env.NEWEST:
        return Finding(GOOD, "Python", where)
    remedy = "install Python 3.11, 3.12 or 3.13, then: make setup PYTHON=python3.12"
    return Finding(BAD, "Python", f"{where}: the packages need 3.11 to 3.13", remedy)


def _set_up_state(facts: dict) -> Finding:
    if facts["venv"] and facts["set_up"] is True:
        return Finding(GOOD, "set-up", ".venv holds what requirements.lock names")
    if facts["venv"]:
        return Finding(NOTE, "set-up", ".venv is not finished, or older than requirements.lock", "make setup")
    if facts["can_make_venv"] is True:
        return Finding(NOTE, "set-up", "not done yet; every make target does it first", "make setup")
    remedy = "on Debian and Ubuntu: apt install python3-venv"
    return Finding(BAD, "set-up", "this Python cannot create environments (no venv or ensurepip)", remedy)


def _package(facts: dict, name: str) -> dict | None:
    """What the probe found of a package; None before set-up; {"error": ...} if it does not import."""
    return None if facts["packages"] is None else facts["packages"][name]


def _missing(found: dict) -> bool:
    return found.get("error", "").startswith("ModuleNotFoundError")


def _broken(name: str, found: dict) -> Finding:
    what = "not installed" if _missing(found) else f"does not import ({found['error']})"
    return Finding(BAD, name, what, "make distclean, then make setup" if not _missing(found) else "make setup")


def _unlike_lock(facts: dict, name: str, version: str) -> str:
    locked = facts["locked"].get(name)
    return "" if locked in (None, version.split("+")[0]) else f"; requirements.lock has {locked}"


def _torch(facts: dict) -> Finding:
    found = _package(facts, "torch")
    if found is None:
        return Finding(NOTE, "torch", f"comes with set-up: {facts['locked'].get('torch', '?')}")
    if "error" in found:
        return _broken("torch", found)
    build = f"CUDA {found['cuda_build']} build" if found["cuda_build"] else "CPU build"
    text = f"{found['version']} ({build}), CPU features {found['cpu']}, {found['threads']} threads"
    text += _unlike_lock(facts, "torch", found["version"])
    if found["cpu"] in ("DEFAULT", "NO AVX"):
        return Finding(NOTE, "torch", text, "it works, but the CPU's vector units are not used: expect slow steps")
    return Finding(GOOD, "torch", text)


def _transformers(facts: dict) -> Finding:
    found = _package(facts, "transformers")
    if found is None:
        return Finding(NOTE, "transformers", f"comes with set-up: {facts['locked'].get('transformers', '?')}")
    if "error" in found:
        return _broken("transformers", found)
    text = f"{found['version']}: a DynamicCache is handed over as `{found['cache_argument']}=`"
    differs = _unlike_lock(facts, "transformers", found["version"])
    if differs:
        return Finding(NOTE, "transformers", text + differs, "make setup, or see what differs: make compat")
    return Finding(GOOD, "transformers", f"{text}, and nothing warns")


def _numba(facts: dict) -> Finding:
    found = _package(facts, "numba")
    if found is None:
        return Finding(NOTE, "numba", f"comes with set-up: {facts['locked'].get('numba', '?')}")
    if "error" in found:
        return _broken("numba", found)
    return Finding(GOOD, "numba", f"{found['version']}, {found['threads']} threads of its own: CPU kernels work")


def _cuda(facts: dict) -> Finding:
    found, nvidia = _package(facts, "torch"), facts["nvidia"]
    seen = nvidia if isinstance(nvidia, str) else None
    if found is None or "error" in found:
        if seen:
            return Finding(NOTE, "CUDA", f"{seen}: set-up will bring torch's CUDA build, several GB")
        return Finding(NOTE, "CUDA", "no NVIDIA GPU found: everything runs on the CPU")
    if found["gpu"]:
        major, minor = found["capability"]
        text = f"{found['gpu']}, compute capability {major}.{minor}"
        if any(_runs_on(architecture, major, minor) for architecture in found["architectures"]):
            return Finding(GOOD, "CUDA", f"{text}: --device cuda works")
        return Finding(NOTE, "CUDA", f"{text}: this torch has no code for it", "install a torch that supports it")
    if seen:
        remedy = "make setup TORCH_INDEX=ADDRESS with the index of a CUDA build, or update the driver"
        return Finding(NOTE, "CUDA", f"{seen} is there, but this torch cannot use it", remedy)
    return Finding(NOTE, "CUDA", "no NVIDIA GPU found: everything runs on the CPU")


def _runs_on(architecture: str, major: int, minor: int) -> bool:
    """Code for sm_86 runs on 8.6 to 8.9; compute_86 is compiled for whatever is newer."""
    kind, _, digits = architecture.partition("_")
    built_major, built_minor = divmod(int("".join(filter(str.isdigit, digits))), 10)
    if kind == "compute":
        return (built_major, built_minor) <= (major, minor)
    return built_major == major and built_minor <= minor


def _flash_attn(facts: dict) -> Finding:
    found = _package(facts, "flash_attn")
    rule = f"it wants blocks of 256 tokens, not our {BLOCK_SIZE}: --block-size 256"
    if found is None or _missing(found):
        return Finding(NOTE, "flash-attn", f"not installed (optional, CUDA only); {rule}")
    if "error" in found:
        return Finding(
            NOTE, "flash-attn", f"does not import ({found['error']})", "build it for this torch, or remove it"
        )
    return Finding(GOOD, "flash-attn", f"{found['version']}; {rule}")


def _triton(facts: dict) -> Finding:
    found, torch = _package(facts, "triton"), _package(facts, "torch") or {}
    if found is None or _missing(found):
        return Finding(NOTE, "Triton", "not installed (optional): its kernels are left out of runs and tests")
    if "error" in found:
        return Finding(NOTE, "Triton", f"does not import ({found['error']})", "reinstall it, or remove it")
    text = f"{found['version']}, numpy {found['numpy']}"
    if torch.get("gpu"):
        return Finding(GOOD, "Triton", f"{text}: compiles for the GPU")
    version, numpy = (tuple(int(n) for n in found[key].split(".")[:2]) for key in ("version", "numpy"))
    if version < (3, 8) and numpy >= (2, 4):
        remedy = "triton 3.8 or later, or numpy below 2.4"
        return Finding(NOTE, "Triton", f"{text}: these two break loops in the interpreter", remedy)
    return Finding(GOOD, "Triton", f"{text}: no GPU, so only its interpreter (TRITON_INTERPRET=1)")


def _model_state(facts: dict) -> Finding:
    state = facts["model"]
    if state == "ready":
        return Finding(GOOD, "model", f"{DEFAULT_MODEL} is in {_short(MODELS_DIR)}")
    if state == "missing":
        return Finding(
            NOTE, "model", f"{DEFAULT_MODEL} is not there yet: 93 MB to download, then 540 MB on disk", "make model"
        )
    remedy = f"rm -r {_short(MODELS_DIR / DEFAULT_MODEL)}, then make model"
    return Finding(BAD, "model", f"{_short(MODELS_DIR / DEFAULT_MODEL)} is damaged or not complete", remedy)


def _short(path: Path) -> str:
    return str(path.relative_to(ROOT)) if ROOT in path.parents else str(path)


def _disk(facts: dict) -> Finding:
    free = facts["disk"]
    needed = (0 if facts["venv"] else VENV_DISK) + (0 if facts["model"] == "ready" else MODEL_DISK)
    return _against("disk", free, needed, "free some, or clone to another disk")


def _memory_state(facts: dict) -> Finding:
    return _against("memory", facts["memory"], MEMORY, "close other programs, or use MODEL=tiny")


def _against(name: str, have: float | dict, needed: float, remedy: str) -> Finding:
    if isinstance(have, dict):
        return Finding(NOTE, name, f"could not be found out ({have['error']}); {needed:.1f} GB are needed")
    text = f"{have:.1f} GB free, {needed:.1f} GB needed"
    return Finding(GOOD, name, text) if have >= needed else Finding(BAD, name, text, remedy)


def _browser(facts: dict) -> Finding:
    found = _package(facts, "playwright")
    installed = found is not None and "error" not in found
    if facts["browser"] and installed:
        return Finding(GOOD, "browser", f"{facts['browser']}: the docs' browser tests run")
    lacking = " and ".join([*([] if facts["browser"] else ["Chromium"]), *([] if installed else ["playwright"])])
    return Finding(NOTE, "browser", f"no {lacking}: the docs' browser tests are skipped (nothing else needs one)")


if __name__ == "__main__":
    sys.exit(main())

"""The results file: environment and rows, written after every row, so that an interruption loses nothing."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import tempfile
from pathlib import Path

import psutil
import torch

from shared.errors import UserError
from shared.steps import ROOT

RESULTS = ROOT / "results"
LOCAL = RESULTS / "local"
FORMAT = 1  # raise it when rows of an older version of the benchmark must not be mixed with new ones

# What may differ between two parts of one run. Everything else in `environment` must be the same to continue it.
NOT_IDENTITY = {"commit", "dirty", "load_before", "load_after", "started", "finished", "measured_s", "complete"}
KEY = ("suite", "variant", "workload", "batch")


def environment(kind: str, model: str, device: str, dtype: str, threads: int) -> dict:
    """Hardware, versions and settings, as recorded in every results file."""
    return {
        "format": FORMAT,
        "kind": kind,
        "model": Path(model).name,
        "random_weights": model.startswith("shape:") or model == "tiny",
        "device": device,
        "dtype": dtype,
        "threads": threads,
        "cpu": _cpu_name(),
        "cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "logical_cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "vector_units": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if device.startswith("cuda") else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {
            name: _version(name) for name in ("torch", "transformers", "numba", "numpy", "triton", "flash_attn")
        },
        "commit": _git("rev-parse", "--short=12", "HEAD"),
        "dirty": bool(_git("status", "--porcelain")),
    }


def path_for(env: dict, folder: Path = LOCAL) -> Path:
    """A quick run has a file of its own: it never overwrites a full one."""
    suffix = "" if env.get("engine", "own") == "own" else f"-{env['engine']}"
    suffix += "" if env["kind"] == "full" else f"-{env['kind']}"
    model = env["model"].replace(":", "-")
    return folder / f"{env['device'].split(':')[0]}-{model}-{env['dtype']}{suffix}.json"


class Record:
    """A results file being written. `rows` by (suite, variant, workload, batch)."""

    def __init__(self, path: Path, env: dict, hashes: dict[str, str], resume: bool = True):
        """Continue the file at `path` if it is of the same environment, else begin it anew (the old one is kept as
        *.previous.json). Rows measured on code other than `hashes` (by variant) are dropped."""
        self.path, self.environment, self.rows = path, env, {}
        old = load(path) if path.exists() else None
        if old is None:
            return
        if resume and _identity(old["environment"]) == _identity(env):
            self.environment = old["environment"] | {name: env[name] for name in ("commit", "dirty")}
            for row in old["rows"]:
                if row.get("code_hash") == hashes.get(row["variant"].split("/")[0], row.get("code_hash")):
                    self.rows[key(row)] = row
        else:
            os.replace(path, path.with_suffix(".previous.json"))

    def save(self) -> None:
        write_json(self.path, {"environment": self.environment, "rows": list(self.rows.values())})


def load(path: Path) -> dict:
    """A results file. UserError for anything else: it is not read as empty, since the next row would overwrite it."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        whole = isinstance(results["environment"], dict) and all(row.keys() >= set(KEY) for row in results["rows"])
    except (ValueError, TypeError, KeyError, AttributeError):
        whole = False
    if not whole:
        raise UserError(f"{path} is damaged, or no results file: remove it, or give --output another name")
    return results


def write_json(path: Path, results: dict) -> None:
    """One line a row, through a temporary name."""
    rows = ",\n".join("  " + json.dumps(_rounded(row), ensure_ascii=False) for row in results["rows"])
    head = json.dumps(results["environment"], indent=2, ensure_ascii=False).replace("\n", "\n ")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(f'{{\n "environment": {head},\n "rows": [\n{rows}\n ]\n}}\n')
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _rounded(value: object) -> object:
    """Five significant digits: no clock here is better than that."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return value


def _identity(env: dict) -> dict:
    return {key: value for key, value in env.items() if key not in NOT_IDENTITY}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    """The processor's marketing name where the system tells it."""
    if platform.system() == "Linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    if platform.system() == "Darwin":
        return subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True
        ).stdout.strip()
    return platform.processor() or platform.machine()


def _git(*command: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *command], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def key(row: dict) -> tuple:
    """(suite, variant, workload, batch)."""
    return tuple(row[name] for name in KEY)


def digest(value: object) -> str:
    """12 hex digits of anything JSON can hold."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]

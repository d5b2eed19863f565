"""`make doctor`: what it says with parts missing, broken or odd, and that it says it without a traceback."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys

import pytest

from shared import doctor
from shared.steps import ROOT

FACTS = {
    "python": "3.12.4",
    "system": "Linux x86_64",
    "venv": True,
    "set_up": True,
    "can_make_venv": True,
    "locked": {"torch": "2.13.0", "transformers": "5.24.0", "numba": "0.68.0"},
    "packages": {
        "torch": {
            "version": "2.13.0+cpu",
            "cpu": "AVX2",
            "threads": 4,
            "cuda_build": None,
            "gpu": None,
            "capability": None,
            "architectures": [],
        },
        "transformers": {"version": "5.24.0", "cache_argument": "cache"},
        "numba": {"version": "0.68.0", "threads": 4},
        "triton": {"version": "3.8.0", "numpy": "2.4.6"},
        "flash_attn": {"error": "ModuleNotFoundError: No module named 'flash_attn'"},
        "playwright": {"version": "1.60.0"},
    },
    "nvidia": None,
    "cores": 4,
    "memory": 8.0,
    "disk": 50.0,
    "model": "ready",
    "browser": "/usr/bin/chromium",
}
NOT_THERE = {"error": "ModuleNotFoundError: No module named 'it'"}
BROKEN = {"error": "OSError: libc10.so: cannot open shared object file"}
GPU = {
    "version": "2.13.0",
    "cuda_build": "12.9",
    "gpu": "NVIDIA H200",
    "capability": [9, 0],
    "architectures": ["sm_80", "sm_90"],
}


def changed(**changes):
    """FACTS with some of them replaced; `packages__torch=...` reaches into the packages, and a dict is merged there."""
    facts = copy.deepcopy(FACTS)
    for key, value in changes.items():
        if key.startswith("packages__"):
            name = key.removeprefix("packages__")
            merge = "version" in facts["packages"][name] and "error" not in value
            facts["packages"][name] = facts["packages"][name] | value if merge else value
        else:
            facts[key] = value
    return facts


def verdict(facts, name):
    (found,) = [finding for finding in doctor.examine(facts) if finding.name == name]
    return found


def test_all_is_well():
    findings = doctor.examine(FACTS)
    assert 10 <= len(findings) <= 14
    assert {finding.name for finding in findings if finding.level != doctor.GOOD} == {"CUDA", "flash-attn"}
    assert all(not finding.remedy for finding in findings if finding.level == doctor.GOOD)


# What is changed, the line it shows in, how serious it is, and words that must be there.
CASES = {
    "old Python": ({"python": "3.10.14"}, "Python", doctor.BAD, "3.11 to 3.13"),
    "new Python": ({"python": "3.14.0"}, "Python", doctor.BAD, "make setup PYTHON="),
    "before set-up": ({"venv": False, "packages": None}, "set-up", doctor.NOTE, "make setup"),
    "torch before set-up": ({"venv": False, "packages": None}, "torch", doctor.NOTE, "comes with set-up: 2.13.0"),
    "no venv module": ({"venv": False, "packages": None, "can_make_venv": False}, "set-up", doctor.BAD, "python3-venv"),
    "half a set-up": ({"set_up": False}, "set-up", doctor.NOTE, "make setup"),
    "unreadable lock": ({"set_up": {"error": "OSError"}, "locked": {}}, "set-up", doctor.NOTE, "make setup"),
    "no torch": ({"packages__torch": NOT_THERE}, "torch", doctor.BAD, "not installed"),
    "broken torch": ({"packages__torch": BROKEN}, "torch", doctor.BAD, "libc10.so"),
    "another torch": ({"packages__torch": {"version": "2.11.0"}}, "torch", doctor.GOOD, "requirements.lock has 2.13.0"),
    "a CPU without vectors": ({"packages__torch": {"cpu": "DEFAULT"}}, "torch", doctor.NOTE, "slow"),
    "no transformers": ({"packages__transformers": NOT_THERE}, "transformers", doctor.BAD, "make setup"),
    "older transformers": (
        {"packages__transformers": {"version": "5.17.0", "cache_argument": "past_key_values"}},
        "transformers",
        doctor.NOTE,
        "past_key_values=",
    ),
    "no numba": ({"packages__numba": NOT_THERE}, "numba", doctor.BAD, "make setup"),
    "CUDA": ({"packages__torch": GPU}, "CUDA", doctor.GOOD, "--device cuda works"),
    "GPU too new": ({"packages__torch": {**GPU, "capability": [12, 0]}}, "CUDA", doctor.NOTE, "no code for it"),
    "GPU compiled for": (
        {"packages__torch": {**GPU, "capability": [12, 0], "architectures": ["compute_90"]}},
        "CUDA",
        doctor.GOOD,
        "12.0",
    ),
    "GPU, CPU build": ({"nvidia": "NVIDIA L4, 8.9"}, "CUDA", doctor.NOTE, "TORCH_INDEX"),
    "GPU before set-up": ({"nvidia": "NVIDIA L4, 8.9", "packages": None}, "CUDA", doctor.NOTE, "several GB"),
    "driver tool fails": ({"nvidia": {"error": "CalledProcessError"}}, "CUDA", doctor.NOTE, "no NVIDIA GPU"),
    "flash-attn": ({"packages__flash_attn": {"version": "2.8.3"}}, "flash-attn", doctor.GOOD, "--block-size 256"),
    "broken flash-attn": ({"packages__flash_attn": BROKEN}, "flash-attn", doctor.NOTE, "does not import"),
    "no Triton": ({"packages__triton": NOT_THERE}, "Triton", doctor.NOTE, "optional"),
    "Triton on a GPU": ({"packages__torch": GPU}, "Triton", doctor.GOOD, "compiles for the GPU"),
    "Triton and numpy": ({"packages__triton": {"version": "3.6.0"}}, "Triton", doctor.NOTE, "numpy below 2.4"),
    "model missing": ({"model": "missing"}, "model", doctor.NOTE, "make model"),
    "model damaged": ({"model": "damaged"}, "model", doctor.BAD, "make model"),
    "disk full": ({"model": "missing", "disk": 0.2}, "disk", doctor.BAD, "0.7 GB needed"),
    "disk full, but all is there": ({"disk": 0.2}, "disk", doctor.GOOD, "0.0 GB needed"),
    "little memory": ({"memory": 0.5}, "memory", doctor.BAD, "MODEL=tiny"),
    "memory unknown": ({"memory": {"error": "OSError"}}, "memory", doctor.NOTE, "could not be found out"),
    "no browser": ({"browser": None}, "browser", doctor.NOTE, "no Chromium:"),
    "no playwright": ({"packages__playwright": NOT_THERE}, "browser", doctor.NOTE, "no playwright:"),
}


@pytest.mark.parametrize("case", CASES)
def test_one_thing_is_different(case):
    """It is named in its own line, with a remedy if a command will fail; no other line becomes serious for it."""
    changes, name, level, words = CASES[case]
    facts = changed(**changes)
    found = verdict(facts, name)
    assert found.level == level
    assert words in f"{found.text} {found.remedy}"
    assert bool(found.remedy) or level != doctor.BAD
    serious = {finding.name for finding in doctor.examine(facts) if finding.level == doctor.BAD}
    assert serious == ({name} if level == doctor.BAD else set())


# --- as a command, in a copy of the repository with parts missing ---


@pytest.fixture
def clone(tmp_path):
    """What the doctor looks at in a fresh clone: no .venv, no models."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "shared", tmp_path / "shared", ignore=ignore)
    shutil.copy(ROOT / "requirements.lock", tmp_path)
    return tmp_path


def run(clone, *options, python=sys.executable, **environment):
    """Exit code and output of the doctor under a bare Python (no site-packages). A traceback anywhere is a failure."""
    env = {k: v for k, v in os.environ.items() if k not in ("MODELS_DIR", "PYTHONPATH", "STEPS_DIR")} | environment
    command = [python, "-S", str(clone / "shared" / "doctor.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, check=False)
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stderr == ""
    return done.returncode, done.stdout


def make_venv(clone, line):
    """A .venv whose Python is this shell script."""
    python = clone / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{line}\n")
    python.chmod(0o755)


def test_fresh_clone(clone):
    status, out = run(clone)
    assert status == 0
    assert "not done yet" in out
    assert "that needs a network" in out
    assert "93 MB to download" in out


def test_environment_without_packages(clone):
    make_venv(clone, f'exec "{sys.executable}" -S "$@"')
    status, out = run(clone)
    assert status == 1
    for name in ("torch", "transformers", "numba"):
        assert f"!!  {name}" in out
    assert "will not work here yet: see torch, transformers, numba" in out


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; os.abort()", "takes the process down"),
        ("import sys; sys.exit('no')", "SystemExit: no"),
        ("raise RuntimeError('first line\\nsecond line')", "RuntimeError: first line)"),
        ("def f(:", "SyntaxError"),
        ("x = 1", "AttributeError"),
    ],
)
def test_package_that_breaks(clone, code, words):
    """A torch that fails in any way when it is imported is one line, and the others are still looked at."""
    (clone / "stubs").mkdir()
    (clone / "stubs" / "torch.py").write_text(code)
    (clone / "stubs" / "numba.py").write_text("__version__ = '1.2.3'\ndef get_num_threads(): return 5")
    make_venv(clone, f'exec "{sys.executable}" -S "$@"')
    status, out = run(clone, PYTHONPATH=str(clone / "stubs"))
    assert status == 1
    (line,) = [line for line in out.splitlines() if line.startswith("!!  torch")]
    assert words in line
    assert "ok  numba         1.2.3, 5 threads" in out


@pytest.mark.parametrize("line", ["exit 3", "echo nonsense", "kill -9 $$"])
def test_python_of_the_environment_is_broken(clone, line):
    make_venv(clone, line)
    status, out = run(clone)
    assert status == 1
    assert "!!  torch" in out


def test_damaged_model(clone):
    folder = clone / "models" / "smollm2-135m-instruct"
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    status, out = run(clone)
    assert status == 1
    assert "rm -r models/smollm2-135m-instruct, then make model" in out


def test_missing_lock(clone):
    (clone / "requirements.lock").unlink()
    status, out = run(clone)
    assert status == 0
    assert "not done yet" in out


def test_here():
    """On this machine, with the packages the tests run with: the real probes agree with what is imported here."""
    import torch
    import transformers

    imported = ("torch", "transformers", "numba")
    packages = {name: doctor._attempt(doctor.PROBES[name]) if name in imported else NOT_THERE for name in doctor.PROBES}
    assert packages["torch"]["version"] == torch.__version__
    assert packages["transformers"]["version"] == transformers.__version__
    assert packages["transformers"]["cache_argument"] in ("cache", "past_key_values")
    assert packages["numba"]["threads"] >= 1
    findings = doctor.examine(changed(packages=packages))
    assert {finding.name for finding in findings if finding.level == doctor.BAD} == set()

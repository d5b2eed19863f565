"""Each model.py is a whole program: copied alone into an empty folder it checks itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from shared.steps import list_steps


def run_alone(model_py, folder) -> subprocess.CompletedProcess:
    """`python model.py` in a folder that holds nothing else: no network, nothing of this repository to import."""
    shutil.copy(model_py, folder / "model.py")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "STEPS_DIR")}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "model.py"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("rung", list_steps(), ids=lambda step: step.slug)
def test_model_py_runs_alone(rung, tmp_path):
    """Exit code 0, one line that says so, nothing else printed, nothing left behind."""
    done = run_alone(rung.model_py, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ok")
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == ""
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["model.py"]


def test_self_check_can_fail(step, monkeypatch, capsys):
    """A write that stores nothing must not pass it."""
    name = "write_kv_to_pool" if hasattr(step, "write_kv_to_pool") else "write_slots"
    monkeypatch.setattr(step, name, lambda *args: None)
    with pytest.raises(AssertionError):
        step.self_check()
    assert capsys.readouterr().out == ""

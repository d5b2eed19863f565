"""Ctrl-C and SIGTERM at the worst moment, sent to real processes: they end at once, by convention, and lose nothing."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shared import models
from shared.steps import ROOT, list_steps

PATIENCE = 120  # until a command is where it is to be interrupted: a limit for broken ones, not a measurement
SIGNALS = pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)


@pytest.fixture(scope="module")
def models_dir(tmp_path_factory):
    """A folder of models that has `tiny`."""
    folder = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "MODELS_DIR", folder)
        models.resolve_model("tiny")
    return folder


def start(command, models_dir, **options):
    """A command in a session of its own: what it starts can be found, and no signal meant for it reaches the tests."""
    environment = {**os.environ, "MODELS_DIR": str(models_dir), "OMP_NUM_THREADS": "1"}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        start_new_session=True,
        text=True,
        # Where the tests were started in the background, SIGINT is ignored, and children would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options,
    )


def until(condition, process):
    """Wait for it, as long as the process lives."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, f"ended too early: {process.communicate()}"
        assert time.monotonic() < deadline, "never got there"
        time.sleep(0.02)


def interrupt(process, signum):
    """Ctrl-C reaches all processes of a terminal, SIGTERM the one it is sent to."""
    if signum == signal.SIGINT:
        os.killpg(process.pid, signum)
    else:
        process.send_signal(signum)


def nothing_left_of(process):
    """No process that it started is alive."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


# A preparation that has written half of a model and says so.
HALF = """
import time
from shared import models

def half(work, new):
    new.mkdir()
    (new / "config.json").write_text("{}")
    (new / "model.safetensors").write_bytes(bytes(1000))
    print("half", flush=True)
    time.sleep(600)

models.PREPARED["half"] = half
models.main(["half"])
"""


@SIGNALS
def test_preparing_a_model(tmp_path, signum, code):
    """Nothing half-made is left, under no name."""
    process = start(["-c", HALF], tmp_path)
    assert process.stdout.readline() == "half\n"
    interrupt(process, signum)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == code
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == []


@SIGNALS
def test_a_run(models_dir, signum, code):
    """What was produced is still printed, as text and as JSON. Progress is for a terminal, which this gives it."""
    step = list_steps()[0]
    command = [str(step.path / "run.py"), "--model", "tiny", "--max-new-tokens", "1900", "--ignore-eos", "--json"]
    terminal, theirs = pty.openpty()
    process = start([*command, "--prompt", "hello", "--prompt", "you there"], models_dir, stderr=theirs)
    os.close(theirs)
    shown = b""

    def has_begun():
        nonlocal shown
        if select.select([terminal], [], [], 0)[0]:
            shown += os.read(terminal, 4096)
        return b" of at most 3800 tokens" in shown

    until(has_begun, process)
    interrupt(process, signum)
    out, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == code
    assert "Traceback" not in out
    document = json.loads(out.splitlines()[-1])
    assert 0 < sum(map(len, document["token_ids"])) < 3800
    assert document["new_tokens"] == sum(map(len, document["token_ids"]))
    os.close(terminal)


@pytest.mark.slow
@SIGNALS
def test_a_benchmark(models_dir, tmp_path, signum, code):
    """The rows that were finished are in the file, the file is whole, and no process goes on measuring."""
    path = tmp_path / "results.json"
    command = ["-m", "shared.bench", "quick", "--model", "tiny", "--threads", "1", "--new-tokens", "4"]
    command += ["--suites", "counts", "write", "gather", "--output", str(path)]
    process = start(command, models_dir)
    until(lambda: path.exists() and rows(path), process)
    before = rows(path)
    interrupt(process, signum)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == code
    assert "Traceback" not in err
    assert nothing_left_of(process)
    assert rows(path)[: len(before)] == before
    assert json.loads(path.read_text())["environment"]["complete"] is False
    assert list(tmp_path.iterdir()) == [path]


def rows(path: Path) -> list[dict]:
    return json.loads(path.read_text())["rows"]

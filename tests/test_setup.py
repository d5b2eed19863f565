"""Set-up: it says what it will do, does it once, and is not put off by what an interrupted run left behind."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from shared import setup_env
from shared.setup_env import SetupError

ROOT = Path(__file__).resolve().parent.parent
LOCK = (ROOT / "requirements.lock").read_text()
PINS = dict(line.split("==") for line in LOCK.splitlines() if not line.startswith("#"))
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.M))


# --- the lock ---


def locked_requirements() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = project["dependency-groups"]
    return project["project"]["dependencies"] + [line for name in setup_env.LOCKED_GROUPS for line in groups[name]]


@pytest.mark.parametrize("requirement", [Requirement(line) for line in locked_requirements()], ids=lambda r: r.name)
def test_lock_meets_pyproject(requirement):
    assert PINS[requirement.name] in requirement.specifier


def test_lock_is_exact_and_for_all_systems():
    names = [line for line in LOCK.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in names), (
        "only exact versions: no index, no local build"
    )
    assert not [line for line in names if setup_env.LINUX_ONLY.match(line)]


def test_make_lock(tmp_path, monkeypatch):
    """What pip froze, without the build of torch and what that brought along; the rest of the file is the header."""
    frozen = "nvidia-cublas==13.1\npsutil==7.2\ntorch==2.13.0+cu130\ntriton==3.7\n-e git+x\n"
    installed = []
    monkeypatch.setattr(setup_env, "LOCK", tmp_path / "requirements.lock")
    monkeypatch.setattr(setup_env, "run", lambda command, failure, **_: frozen)
    monkeypatch.setattr(setup_env, "pip_install", lambda venv, *arguments: installed.append(arguments))
    setup_env.write_lock("")
    assert installed == [tuple(locked_requirements())]
    assert (tmp_path / "requirements.lock").read_text() == setup_env.LOCK_HEADER + "psutil==7.2\ntorch==2.13.0\n"
    assert LOCK.startswith(setup_env.LOCK_HEADER)


# --- .venv ---


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a lock of its own. pip takes seconds to install, so `.venv` gets a stand-in and what it is asked to
    install is recorded; a torch that can be imported appears."""
    monkeypatch.setattr(setup_env, "ROOT", tmp_path)
    monkeypatch.setattr(setup_env, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(setup_env, "STAMP", tmp_path / ".venv" / "setup.json")
    monkeypatch.setattr(setup_env, "LOCK", tmp_path / "requirements.lock")
    (tmp_path / "requirements.lock").write_text("torch==1.2.3\n")
    installed, real_run = [], setup_env.run

    def run(command, *arguments):
        if "venv" not in command:
            return real_run(command, *arguments)
        real_run([*command, "--without-pip"], *arguments)
        (next(setup_env.VENV.glob("lib/python3*/site-packages")) / "pip.py").touch()

    def pip_install(venv, *arguments):
        installed.append([str(argument) for argument in arguments])
        (next(venv.glob("lib/python3*/site-packages")) / "torch.py").write_text("__version__ = '1.2.3+fake'")

    monkeypatch.setattr(setup_env, "run", run)
    monkeypatch.setattr(setup_env, "pip_install", pip_install)
    return SimpleNamespace(folder=tmp_path, installed=installed)


def test_set_up(project, monkeypatch, capsys):
    """Fresh, again, a changed lock, an index, a broken .venv, interrupted: each starts from the last."""
    lock, python, installed = setup_env.LOCK, setup_env.VENV / "bin/python", project.installed
    install_lock = ["--requirement", str(lock)]
    install_torch = ["--index-url", "file:///some/index", "--no-deps", "--force-reinstall", "torch==1.2.3"]

    setup_env.set_up("", quiet=True)
    assert installed == [install_lock]
    assert "torch 1.2.3+fake" in capsys.readouterr().err

    setup_env.set_up("", quiet=True)
    assert installed == [install_lock], "repeating does nothing"
    assert capsys.readouterr() == ("", ""), "and says nothing"

    lock.write_text("torch==1.2.3\nother==1\n")
    setup_env.set_up("", quiet=True)
    assert installed == [install_lock] * 2, "a changed lock is installed"

    installed.clear()
    setup_env.set_up("file:///some/index", quiet=True)
    setup_env.set_up("", quiet=True)
    assert installed == [install_torch, install_lock], "the index is remembered, and torch with it"

    installed.clear()
    python.unlink()
    python.symlink_to("/nonexistent/python")
    working = setup_env.pip_install
    monkeypatch.setattr(setup_env, "pip_install", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        setup_env.set_up("", quiet=True)
    monkeypatch.setattr(setup_env, "pip_install", working)
    setup_env.set_up("", quiet=True)
    assert installed == [install_torch, install_lock], "a broken .venv is made anew, an interrupted set-up finished"


@pytest.mark.parametrize("index, expected", [("", "200 MB"), ("file:///cpu", "file:///cpu")])
def test_says_what_it_downloads_before_it_does(project, monkeypatch, capsys, index, expected):
    monkeypatch.setattr(setup_env, "run", lambda *_: (_ for _ in ()).throw(SetupError("stop here")))
    monkeypatch.setattr(setup_env.platform, "system", lambda: "Linux")
    with pytest.raises(SetupError, match="stop here"):
        setup_env.set_up(index, quiet=True)
    assert expected in capsys.readouterr().err
    assert project.installed == []


def test_pip_fails(capfd):
    """The user sees pip's own words, then one line."""
    with pytest.raises(SetupError, match="pip failed"):
        setup_env.run([sys.executable, "-c", "print('pip says why'); raise SystemExit(1)"], "pip failed", show=True)
    captured = capfd.readouterr()
    assert captured.out == "" and "pip says why" in captured.err


@pytest.mark.parametrize("version", [(3, 10, 1), (3, 14, 0), (4, 0, 0)])
def test_wrong_python(monkeypatch, version):
    monkeypatch.setattr(sys, "version_info", version)
    monkeypatch.setattr(setup_env.shutil, "which", lambda name: name if name == "python3.12" else None)
    with pytest.raises(SetupError, match=r"3\.11, 3\.12 or 3\.13 is needed: run `make setup PYTHON=python3\.12`"):
        setup_env.check_python()


@pytest.mark.parametrize("minor", [11, 12, 13])
def test_right_python(monkeypatch, minor):
    monkeypatch.setattr(sys, "version_info", (3, minor, 0))
    setup_env.check_python()


def test_command_line():
    """Errors end in one line and exit code 2."""
    run = subprocess.run([sys.executable, setup_env.__file__, "--help"], capture_output=True, text=True, check=True)
    assert "--torch-index" in run.stdout
    code = "import sys; sys.version_info = (3, 9, 0)\nfrom shared import setup_env; sys.argv = ['x']; setup_env.main()"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert run.returncode == 2
    assert run.stderr.startswith("error: ") and run.stderr.count("\n") == 1


# --- make ---


def make(*arguments: str) -> str:
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_help_is_the_default_and_complete():
    listed = re.findall(r"^  make ([a-z-]+) +\S", make(), re.M)
    assert set(listed) == TARGETS - {"env"}
    assert len(listed) == len(set(listed))


def test_every_target_sets_up_first():
    recipes = re.findall(r"^([a-z-]+):([a-z ]*)(?:##.*)?\n((?:\t.*\n)+)", MAKEFILE, re.M)
    assert {name for name, _, _ in recipes} == TARGETS
    for name, needs, recipe in recipes:
        assert ("$(PY)" in recipe) == ("env" in needs.split()), f"{name} uses .venv, or needs it for nothing"


@pytest.mark.parametrize("name", ["01", "1", "01_naive_write"])
def test_run_passes_on_what_was_given(name):
    printed = make("-n", "run", f"STEP={name}", "MODEL=tiny", "THREADS=2", "ARGS=--json")
    command = next(line for line in printed.splitlines() if "run.py" in line and "error" not in line)
    assert command.split(" ", 2)[:2] == [".venv/bin/python", "steps/01_naive_write/run.py"]
    assert command.split()[2:] == ["--model", "tiny", "--threads", "2", "--json"]


@pytest.mark.parametrize("target", ["test", "bench"])
def test_the_two_commands_prepare_everything(target):
    lines = make("-n", target).splitlines()
    position = {word: i for i, line in enumerate(lines) for word in ("setup_env", "shared.models") if word in line}
    assert position["setup_env"] < position["shared.models"] < len(lines) - 1


@pytest.mark.parametrize(
    "path",
    [
        "README.md",
        "CONTRIBUTING.md",
        ".ci/run",
        *(str(path.relative_to(ROOT)) for path in sorted((ROOT / ".github/workflows").glob("*.yml"))),
    ],
)
def test_only_targets_that_exist_are_named(path):
    text = (ROOT / path).read_text()
    commands = re.findall(r"(?:^|`|\$ |run: |&& )make ([a-z-]+)", text, re.M)
    assert commands
    assert set(commands) <= TARGETS


def test_ci_ends_with_the_readmes_test_command():
    lines = (ROOT / ".ci/run").read_text().rstrip().splitlines()
    assert lines[-1] == "make test"
    assert "make test" in (ROOT / "README.md").read_text()
    subprocess.run(["bash", "-n", ROOT / ".ci/run"], check=True)

"""The site, built strictly once for all tests that look at it."""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from shared.steps import ROOT


def built_site() -> Path:
    """The folder of a fresh `mkdocs build --strict`, removed when Python ends. The test fails if the build does."""
    folder, error = _build()
    if error:
        pytest.fail(f"mkdocs build --strict failed: {error}", pytrace=False)
    return folder


@functools.cache
def _build() -> tuple[Path, str]:
    """The folder, and what went wrong: a build that failed once is not tried again."""
    folder = tempfile.TemporaryDirectory(prefix="site-")
    atexit.register(folder.cleanup)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder.name]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    return Path(folder.name), done.stderr if done.returncode else ""

"""The site, built strictly once for all tests that look at it."""

from __future__ import annotations

import atexit
import functools
import subprocess
import sys
import tempfile
from pathlib import Path

from shared.steps import ROOT


@functools.cache
def built_site() -> Path:
    """The folder of a fresh `mkdocs build --strict`, removed when Python ends. AssertionError if the build fails."""
    folder = tempfile.TemporaryDirectory(prefix="site-")
    atexit.register(folder.cleanup)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder.name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"mkdocs build --strict failed:\n{done.stdout}{done.stderr}"
    return Path(folder.name)

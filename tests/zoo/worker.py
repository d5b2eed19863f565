"""One process of the zoo: runs the tests marked `zoo` on a folder of planted steps, in a single pytest session.

Every planted step is a step of its own there (`03_naive_gather+mask-forgotten`), so the tests need to know nothing of
the zoo. For each it writes one line of JSON as soon as a test has failed, or all have passed:

    {"slug": ..., "test": ... or null, "phase": "call", "message": ..., "symptom": ..., "seconds": ...}

`python -m tests.zoo.worker PLANTED_DIR RESULT_FILE [KNOWN]`: KNOWN is an earlier results/zoo.json. The test that
noticed a bug then comes first this time, which saves more than half of the run.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

SECONDS_PER_TEST = 30
MARK = "+"
FIRST = "test_slots"


class Stuck(BaseException):
    """A test took so long that it would hardly ever end. No Exception, so that no code under test catches it."""


@contextmanager
def time_limit(seconds: float = SECONDS_PER_TEST):
    """Raise Stuck in the main thread after `seconds`."""

    def give_up(signum, frame):
        raise Stuck(f"no end after {seconds:g} s")

    previous = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


class FirstFailure:
    """Pytest plugin: for every step the tests run until the first one fails; the rest of that step's are skipped."""

    def __init__(self, result_file: Path, known: dict[str, str]):
        self.result_file, self.known = result_file, known
        self.remaining: dict[str, int] = {}
        self.seconds: dict[str, float] = {}
        self.done: set[str] = set()
        self.failure = None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        """Leave out what does not depend on a step; of each step the likely test first, and functions before models."""

        def order(item):
            return slug_of(item), test_of(item) != self.known.get(slug_of(item)), item.path.stem != FIRST

        items[:] = sorted((item for item in items if slug_of(item)), key=order)
        for item in items:
            self.remaining[slug_of(item)] = self.remaining.get(slug_of(item), 0) + 1

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        if slug_of(item) in self.done:
            pytest.skip("a test has failed already")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        with time_limit():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        slug = slug_of(item)
        if slug in self.done:
            return report
        self.seconds[slug] = self.seconds.get(slug, 0) + report.duration
        if report.failed:
            self.finish(slug, report, call.excinfo)
        elif report.when == "teardown":
            self.remaining[slug] -= 1
            if not self.remaining[slug]:
                self.finish(slug)
        return report

    def finish(self, slug, report=None, excinfo=None):
        self.done.add(slug)
        result = {"slug": slug, "test": None, "phase": None, "message": None, "seconds": round(self.seconds[slug], 2)}
        if report is not None:
            result |= {"test": test_of(report), "phase": report.when, "message": one_line(excinfo.value)}
        if excinfo is not None and excinfo.errisinstance(Stuck):
            result["symptom"] = "never ends"
        elif MARK in slug:
            from tests.zoo.symptoms import observe

            result["symptom"] = observe(slug)
        with self.result_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")


def slug_of(item) -> str | None:
    step = getattr(item, "callspec", None) and item.callspec.params.get("step")
    return getattr(step, "slug", None)  # a test that fits none of the steps has no step


def test_of(item) -> str:
    """Name of an item's or report's test, without its parameters."""
    return item.nodeid.split("[")[0].split("/")[-1]


def one_line(error: BaseException) -> str:
    """Type and message, without the advice that follows a semicolon."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0].split('; ')[0]}" if text and text[0] else type(error).__name__


def share_compiled_kernels() -> None:
    """Make numba compile each kernel once, however many planted steps hold the same text.

    A kernel is the same if its source is, what it is compiled for, and the kernels and constants it uses. The steps as
    they are come first: theirs are on disk already.
    """
    import numba

    from shared.steps import ROOT, list_steps, load_step

    compile_it, known, identity = numba.njit, {}, {}

    def njit(*arguments, **options):
        def decorate(function):
            used = [function.__globals__.get(name) for name in sorted(function.__code__.co_names)]
            used = [identity.get(id(x), x if isinstance(x, int | float) else None) for x in used]
            text = repr((inspect.getsource(function), arguments, sorted(options.items(), key=str), used))
            key = hashlib.sha256(text.encode()).hexdigest()
            if key not in known:
                known[key] = compile_it(*arguments, **options)(function)
                identity[id(known[key])] = key
            return known[key]

        return decorate

    numba.njit = njit
    for step in list_steps(ROOT / "steps"):
        load_step(step)


def main(planted: str, result_file: str, known: str | None = None) -> int:
    # Two for the kernels, so that a test can see what happens where their threads meet.
    os.environ["OMP_NUM_THREADS"], os.environ["NUMBA_NUM_THREADS"] = "1", "2"
    share_compiled_kernels()
    rows = json.loads(Path(known).read_text(encoding="utf-8"))["rows"] if known else []
    plugin = FirstFailure(Path(result_file), {row["step"] + MARK + row["mutant"]: row["caught_by"] for row in rows})
    options = ["-q", "-p", "no:cacheprovider", "--no-header", "-m", "zoo", f"--steps-dir={planted}", "tests"]
    status = pytest.main(options, plugins=[plugin])
    # Failed tests are what this is for. Anything else (nothing collected, a broken test file) is an error.
    return 0 if status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

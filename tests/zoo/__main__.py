"""Plant every bug of the zoo in every step it fits, and show which test notices: `python -m tests.zoo`.

Exit code 0 when all are noticed, 1 when one is not or no longer fits the code.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from shared.errors import UserError, plain_errors
from shared.steps import ROOT, Step, code_hash, list_steps
from tests.zoo.mutants import MUTANTS, DoesNotApply, Mutant, plant
from tests.zoo.worker import MARK

RESULTS = ROOT / "results" / "zoo.json"
# A worker that says nothing for so long hangs where Python cannot interrupt it.
SILENCE = 180


@dataclass(frozen=True)
class Result:
    """What became of one mutant in one step. `test` is None if no test failed."""

    mutant: Mutant
    step: Step
    test: str | None = None
    message: str | None = None
    symptom: str = ""
    seconds: float = 0.0
    problem: str = ""

    @property
    def caught(self) -> bool:
        return self.test is not None and not self.problem


@plain_errors()
def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    pairs = [
        (mutant, step)
        for mutant in MUTANTS
        for step in list_steps()
        if step.number in mutant.steps
        and (not options.names or any(name in mutant.name for name in options.names))
        and (not options.step or step.number in options.step)
    ]
    if not pairs:
        raise UserError("no mutant has such a name: `python -m tests.zoo --list` shows them all")
    if options.list:
        for mutant in dict.fromkeys(mutant for mutant, _ in pairs):
            print(f"{mutant.name:<40} {' '.join(mutant.steps):<24} {mutant.bug}")
        return

    start = time.monotonic()
    known = RESULTS if RESULTS.exists() and not options.write else None
    results = run(pairs, options.jobs, known)
    print_table(results)
    bad = [result for result in results if not result.caught]
    print(f"{len(results) - len(bad)} of {len(results)} noticed, {len(MUTANTS)} bugs, {time.monotonic() - start:.0f} s")
    if bad:
        sys.exit(1)
    if options.write:
        write(results)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__.split(":")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="only mutants with this in their name")
    parser.add_argument("--step", action="append", metavar="NN", help="only in this step (may be repeated)")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="worker processes (default: 2)")
    parser.add_argument("--list", action="store_true", help="list the mutants and stop")
    parser.add_argument("--write", action="store_true", help="write results/zoo.json, which a page is made from")
    options = parser.parse_args(argv)
    if options.jobs < 1:
        raise UserError(f"--jobs must be at least 1, not {options.jobs}")
    if options.write and (options.names or options.step):
        raise UserError("--write needs the whole zoo: leave out names and --step")
    return options


def run(pairs: list[tuple[Mutant, Step]], jobs: int, known: Path | None = None) -> list[Result]:
    """Results in the order of `pairs`. What does not fit the code is a result, too, and costs no run.

    `known`: an earlier zoo.json; where its test still notices the bug, no other is run.
    """
    results: dict[tuple[str, str], Result] = {}
    with tempfile.TemporaryDirectory(prefix="zoo-") as temporary:
        waiting: dict[str, tuple[Mutant, Step]] = {}
        shares = [Path(temporary) / f"share-{number}" for number in range(min(jobs, len(pairs)))]
        for mutant, step in pairs:
            slug = f"{step.slug}{MARK}{mutant.name}"
            try:
                planted = plant(mutant, step.number, step.model_py.read_text(encoding="utf-8"))
            except (DoesNotApply, SyntaxError) as error:
                results[mutant.name, step.slug] = Result(mutant, step, problem=f"no longer applies: {error}")
                continue
            folder = shares[len(waiting) % len(shares)] / slug
            shutil.copytree(step.path, folder, ignore=shutil.ignore_patterns("__pycache__"))
            (folder / "model.py").write_text(planted, encoding="utf-8")
            waiting[slug] = mutant, step
        for found in follow(shares, len(waiting), known):
            mutant, step = waiting.pop(found["slug"])
            results[mutant.name, step.slug] = judge(mutant, step, found)
        for mutant, step in waiting.values():
            results[mutant.name, step.slug] = Result(mutant, step, problem="was not run")
    return [results[mutant.name, step.slug] for mutant, step in pairs]


def judge(mutant: Mutant, step: Step, found: dict) -> Result:
    problem = ""
    if found["test"] is None:
        problem = "SURVIVED: no test noticed it"
    elif found["phase"] == "setup":
        problem = f"did not even start: {found['message']}"
    return Result(mutant, step, found["test"], found["message"], found.get("symptom", ""), found["seconds"], problem)


def follow(shares: list[Path], total: int, known: Path | None) -> Iterator[dict]:
    """Run a worker for each share and yield what they find, as they find it; a worker that dies is started again."""
    workers = [Worker(share, known) for share in shares if share.is_dir()]
    columns = TextColumn("bugs planted"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("", total=total)
        try:
            while workers:
                time.sleep(0.2)
                for worker in list(workers):
                    ended = worker.process.poll() is not None
                    for found in worker.new_lines():
                        progress.advance(task)
                        yield found
                    if ended or worker.silent_for() > SILENCE:
                        workers.remove(worker)
                        if found := worker.casualty():
                            progress.advance(task)
                            yield found
                            workers.append(Worker(worker.share, known))
        finally:
            for worker in workers:
                worker.stop()


class Worker:
    """A process that runs the steps in one folder, one after the other, and removes nothing."""

    def __init__(self, share: Path, known: Path | None):
        self.share = share
        self.result_file = share / "results.jsonl"
        self.log = share / "log.txt"
        self.result_file.touch()
        self.read = self.result_file.stat().st_size
        self.last_word = time.monotonic()
        command = [sys.executable, "-m", "tests.zoo.worker", str(share), str(self.result_file)]
        command += [str(known)] if known else []
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def new_lines(self) -> list[dict]:
        """What came since the last call. A step that is done leaves the folder: no later worker runs it again."""
        with self.result_file.open(encoding="utf-8") as file:
            file.seek(self.read)
            text = file.read()
        complete = text[: text.rfind("\n") + 1]
        self.read += len(complete.encode())
        lines = [json.loads(line) for line in complete.splitlines()]
        for line in lines:
            self.last_word = time.monotonic()
            shutil.rmtree(self.share / line["slug"])
        return lines

    def silent_for(self) -> float:
        return time.monotonic() - self.last_word

    def casualty(self) -> dict | None:
        """The step that a worker which has ended, or hangs, was running; None if its share was done."""
        left = sorted(path.name for path in self.share.iterdir() if path.is_dir())
        if not left:
            return None
        hangs = self.process.poll() is None
        self.stop()
        status = self.process.returncode
        if not hangs and status >= 0:
            raise RuntimeError(f"the tests could not be run:\n{self.log.read_text()[-3000:]}")
        what = "never ends" if hangs else f"kills the process (signal {-status})"
        shutil.rmtree(self.share / left[0])
        return {"slug": left[0], "test": "(any)", "phase": "call", "message": what, "symptom": what, "seconds": 0.0}

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def print_table(results: list[Result]) -> None:
    table = Table(title="Bugs planted, and the test that noticed", title_justify="left")
    table.add_column("bug", overflow="fold")
    table.add_column("step", no_wrap=True)
    table.add_column("caught by", overflow="fold")
    table.add_column("what a user would see", overflow="fold")
    table.add_column("s", justify="right")
    last = None
    for result in results:
        name = result.mutant.name if result.mutant.name != last else ""
        if name and last:
            table.add_section()
        last = result.mutant.name
        test = result.test if result.caught else f"[bold red]{result.problem}[/]"
        table.add_row(name, result.step.number, test, result.symptom, f"{result.seconds:.1f}")
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def write(results: list[Result]) -> None:
    """results/zoo.json: the mutants, and a row for each mutant and step with the hash of the step's code."""
    rows = [
        {
            "mutant": result.mutant.name,
            "step": result.step.slug,
            "code": code_hash(result.step),
            "caught_by": result.test,
            "symptom": result.symptom,
        }
        for result in results
    ]
    mutants = {}
    for result in results:
        mutant = result.mutant
        if mutant.name not in mutants:
            mutants[mutant.name] = {"bug": mutant.bug, "seen": mutant.seen, "diff": changed_lines(mutant, result.step)}
    document = {"mutants": mutants, "rows": rows}
    temporary = RESULTS.with_suffix(".tmp")
    RESULTS.parent.mkdir(exist_ok=True)
    try:
        temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, RESULTS)
    except OSError as error:
        raise UserError(
            f"could not write {RESULTS} ({error.strerror}): make room, or make the folder writable"
        ) from None
    print(f"wrote {RESULTS.relative_to(ROOT)}; `make report` makes the page's table of it")


def changed_lines(mutant: Mutant, step: Step) -> list[str]:
    """The mutant as a diff of the step's model.py, without context: lines that begin with - or +."""
    old = step.model_py.read_text(encoding="utf-8")
    diff = difflib.unified_diff(old.splitlines(), plant(mutant, step.number, old).splitlines(), lineterm="", n=0)
    return [line for line in diff if not line.startswith(("---", "+++", "@@"))]


if __name__ == "__main__":
    main()

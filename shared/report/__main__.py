"""Write docs/generated/ and README's table: `python -m shared.report`. Reads results/*.json; measures nothing."""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import sys
from pathlib import Path

from shared.errors import UserError, plain_errors
from shared.launch import ensure_dependencies
from shared.steps import ROOT, list_steps

GENERATED = ROOT / "docs" / "generated"
README = ROOT / "README.md"
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"


def build(results_dir: Path) -> dict[str, bytes]:
    """All generated files by their name below docs/generated/."""
    import shared.docs
    from shared.report import data, pages, tables

    steps = list_steps()
    report = data.load(results_dir, steps)
    fragments = {
        "environment": tables.environment,
        "end-to-end": tables.end_to_end,
        "mixed": tables.mixed,
        "history": tables.history,
        "memory": tables.memory,
        "ladder": tables.ladder,
        "where-time-goes": tables.where_time_goes,
        "write-sweep": tables.sweep("write", "tokens", "µs"),
        "gather-sweep": tables.sweep("gather", "history"),
        "attention-sweep": tables.sweep("attention", "history"),
        "matmul-sweep": tables.matmul,
        "counts": tables.counts,
        "laws": tables.laws,
        "cost-model": tables.cost_model,
        "peers": tables.peers,
        "seed-claim": tables.seed_claim,
        "readme": tables.readme,
    }
    files = {f"{name}.md": make(report).encode() for name, make in fragments.items()}
    files |= draw_all(report)
    for before, step in zip([None, *steps], steps):
        files[f"steps/{step.slug}.bench.md"] = pages.bench(report, step, before).encode()
        files[f"steps/{step.slug}.counts.md"] = pages.counts(report, step, before).encode()
        files[f"steps/{step.slug}.diff.md"] = pages.diff(step, before).encode()
    for module in pkgutil.iter_modules(shared.docs.__path__):
        render = getattr(importlib.import_module(f"shared.docs.{module.name}"), "render", None)
        for name, text in render().items() if render else ():
            files[name] = text.encode()
    return files


def draw_all(report) -> dict[str, bytes]:
    """The plots, each in a light and a dark version."""
    from shared.report import plots

    files = {}
    tall = 0.8 + 0.42 * len(report.variants)
    pictures = {
        "ladder": (plots.ladder(report.variants), tall),
        "where-time-goes": (plots.where_time_goes(report.variants, "history-512", 8), tall + 0.3),
        "write-sweep": (plots.sweep("write", 1, "tokens written", "µs a write, one layer", 1e3), 4.0),
        "gather-sweep": (plots.sweep("gather", 8, "tokens of history, batch 8", "ms to gather all layers"), 4.0),
        "attention-sweep": (
            plots.sweep("attention", 8, "tokens of history, batch 8", "ms of attention, all layers"),
            4.0,
        ),
        "matmul-sweep": (plots.matmul, 3.6),
        "cost-model": (plots.cost_model, 4.0),
    }
    for name, (paint, height) in pictures.items():
        for theme, svg in plots.draw(paint, report, height).items():
            files[f"{name}.{theme}.svg"] = svg
    return files


def with_table(readme: str, table: str) -> str:
    """README's text with what lies between the two markers replaced; unchanged if it has no markers."""
    if BEGIN not in readme and END not in readme:
        return readme
    if readme.count(BEGIN) != 1 or readme.count(END) != 1 or readme.index(BEGIN) > readme.index(END):
        raise UserError(f"README.md needs {BEGIN} once and {END} once after it")
    head, rest = readme.split(BEGIN)
    return f"{head}{BEGIN}\n{table}{END}{rest.split(END)[1]}"


def wanted(results_dir: Path, generated: Path, readme: Path) -> dict[Path, bytes]:
    """Every file this command is responsible for, with the content it must have."""
    files = build(results_dir)
    table = files.pop("readme.md").decode()
    content = {generated / name: text for name, text in files.items()}
    if readme.exists():
        content[readme] = with_table(readme.read_text(encoding="utf-8"), table).encode()
    return content


def orphans(content: dict[Path, bytes], generated: Path) -> list[Path]:
    """What earlier reports wrote and this one does not, such as the fragments of a step that is no more."""
    return sorted(path for path in generated.rglob("*") if path.is_file() and path not in content)


@plain_errors()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m shared.report",
        description="Write docs/generated/ (tables, plots, diffs) and README's table from results/*.json.",
        epilog="Look at a run of your own with: python -m shared.report --results results/local --out /tmp/report",
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 and name the files that are stale")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="folder of results files (results/)")
    parser.add_argument("--out", type=Path, help="write here instead, and leave README.md alone")
    options = parser.parse_args(argv)
    ensure_dependencies()
    if not options.results.is_dir() and options.results != ROOT / "results":
        raise UserError(f"no folder {options.results}: give one that holds results files")
    generated = options.out or GENERATED
    content = wanted(options.results, generated, README if options.out is None else generated / "README.md")
    old = [path for path, text in content.items() if not path.exists() or path.read_bytes() != text]
    gone = orphans(content, generated) if options.out is None else []  # a folder of the user's is not ours to tidy
    if options.check:
        for path in [*old, *gone]:
            print(f"stale: {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}", file=sys.stderr)
        if old or gone:
            print("run `make report` and commit what it writes", file=sys.stderr)
            raise SystemExit(1)
        return
    for path in old:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.new")
        temporary.write_bytes(content[path])
        os.replace(temporary, path)
    for path in gone:
        path.unlink()
    print(f"{len(content)} files, {len(old)} of them changed" + (f", {len(gone)} removed" if gone else ""))


if __name__ == "__main__":
    main()

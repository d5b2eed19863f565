"""Fragments for the page of each step: its numbers, its operator counts, its diff."""

from __future__ import annotations

from shared.diff import changed_definitions, unified_diff
from shared.report import tables
from shared.report.data import BASELINE, Report, Results
from shared.steps import Step

HEADLINES = (("chat", 1), ("chat", 4), ("chat", 8), ("history-512", 8), ("history-2048", 8))


def bench(report: Report, step: Step, before: Step | None) -> str:
    """The step's rows beside transformers' and those of the step before."""
    variants = [BASELINE, *([before.slug] if before else []), step.slug]

    def body(results: Results) -> str:
        parts = []
        for workload, batch in HEADLINES:
            if results.row("end_to_end", step.slug, workload, batch):
                columns = tables.END_TO_END if workload == "chat" else [tables.END_TO_END[0], *tables.END_TO_END[5:7]]
                rows = tables.by_variant(results, variants, columns, "end_to_end", workload, batch)
                parts.append(f"{workload}, batch {batch}\n\n{rows}")
        return "\n".join(parts)

    return tables.sections(report, body)


def counts(report: Report, step: Step, before: Step | None) -> str:
    """Operator counts of the step and the one before, with the formulas they follow. The same on every machine."""
    lines = []
    results = next((r for r in report.results if r.row("counts", step.slug, "decode_step", 8)), None)
    if results is None:
        return f"{tables.NOT_MEASURED.capitalize()}: there are no published results for this yet.\n"
    stale = False
    for kind in ("write", "gather", "decode_step"):
        for variant in [*([before.slug] if before else []), step.slug]:
            if row := results.row("counts", variant, kind, 8):
                stale |= results.is_stale(row)
                counted = f"{row['ops_all']} ({row['ops_non_view']})"
                lines.append([kind.replace("_", " "), f"`{variant}`", f"`{row['law_all']}`", counted])
    layers = results.environment["model"]
    head = ["of", "step", "operators", f"for {layers}, batch 8, 512 tokens each (no views)"]
    note = f"\n{tables.OLDER.capitalize()}.\n" if stale else ""
    return tables.table(head, lines, left=3) + note


def diff(step: Step, before: Step | None) -> str:
    """What changed against the step before: hunks only, each headed by the definition it is in."""
    if before is None:
        return f"`{step.slug}` is the first step: there is nothing to compare it with.\n"
    lines = unified_diff(before, step)
    added = sum(line.startswith("+") for line in lines[2:])
    removed = sum(line.startswith("-") for line in lines[2:])
    changes = ", ".join(f"`{change}`" for change in changed_definitions(before, step))
    head = f"{added} lines added, {removed} removed, in {changes}.\n\n"
    return f"{head}```diff\n" + "\n".join(lines[2:]) + "\n```\n"

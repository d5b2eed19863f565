"""The page of bugs: what `python -m tests.zoo --write` found, as a table and as diffs. Nothing is run here."""

from __future__ import annotations

import json
import re
from pathlib import Path

from shared.errors import UserError
from shared.steps import ROOT, code_hash, list_steps

RESULTS = ROOT / "results" / "zoo.json"


def render(path: Path = RESULTS) -> dict[str, str]:
    """The fragments by name below docs/generated: `bugs.md`, a table, and `bugs-code.md`, each bug's changed lines."""
    if not path.exists():
        return {"bugs.md": "The bugs have not been planted yet: `python -m tests.zoo --write`.\n", "bugs-code.md": "\n"}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        rows: dict[str, list[dict]] = {name: [] for name in document["mutants"]}
        for row in document["rows"]:
            rows[row["mutant"]].append(row)
        return {"bugs.md": _table(document["mutants"], rows), "bugs-code.md": _code(document["mutants"], rows)}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no result of the bug zoo ({error!r}): `python -m tests.zoo --write`") from None


def _table(mutants: dict[str, dict], rows: dict[str, list[dict]]) -> str:
    now = {step.slug: code_hash(step) for step in list_steps(ROOT / "steps")}
    lines = ["| The bug | How it shows | Steps | What notices |", "|---|---|---|---|"]
    for name, mutant in mutants.items():
        seen = f" ([seen]({mutant['seen']}))" if mutant["seen"] else ""
        bug = f"{mutant['bug'][0].upper()}{mutant['bug'][1:]}{seen}"
        notices = ", ".join(dict.fromkeys(f"`{row['caught_by'].split('::')[-1]}`" for row in rows[name]))
        lines.append(f"| {bug} | {_symptoms(rows[name])} | {_numbers(rows[name])} | {notices} |")
    steps = sum(map(len, rows.values()))
    older = sorted({row["step"] for part in rows.values() for row in part if now.get(row["step"]) != row["code"]})
    note = f"{len(mutants)} bugs, {steps} plantings, every one noticed."
    if older:
        note += f" The code of {', '.join(older)} has changed since."
    return "\n".join(lines) + f"\n\n{note}\n"


def _symptoms(rows: list[dict]) -> str:
    """What each step shows; said once where several show the same."""
    same: dict[str, list[dict]] = {}
    for row in rows:
        # Of an exception the type will do: its words differ from step to step where the mistake is the same.
        symptom = re.sub(r"(crashes at [^:]+: \w+).*", r"\1", row["symptom"])
        same.setdefault(symptom, []).append(row)
    if len(same) == 1:
        return _cell(next(iter(same)))
    return "<br>".join(f"{_numbers(part)}: {_cell(symptom)}" for symptom, part in same.items())


def _cell(text: str) -> str:
    """Text that neither ends its cell nor is taken for markup."""
    for character in "\\|*_<[`":
        text = text.replace(character, f"\\{character}")
    return text[0].upper() + text[1:]


def _numbers(rows: list[dict]) -> str:
    """Numbers of the steps, consecutive ones as a range: 01, 03 to 05."""
    runs: list[list[str]] = []
    for number in sorted(row["step"].split("_")[0] for row in rows):
        if runs and int(number) == int(runs[-1][-1]) + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(run) for run in runs)


def _code(mutants: dict[str, dict], rows: dict[str, list[dict]]) -> str:
    parts = []
    for name, mutant in mutants.items():
        diff = "\n".join(f"    {line}" for line in ["```diff", *mutant["diff"], "```"])
        parts.append(f'??? note "{name} (step {rows[name][0]["step"].split("_")[0]})"\n\n{diff}\n')
    return "\n".join(parts)

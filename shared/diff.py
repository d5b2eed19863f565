"""What changed from one step to another: the difference of their two model.py, as `git diff` would show it."""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import re
import sys
from collections import defaultdict

from shared.errors import UserError, plain_errors
from shared.steps import Step, find_step, list_steps

BOLD, RED, GREEN, CYAN = "1", "31", "32", "36"


def unified_diff(a: Step, b: Step, context: int = 3) -> list[str]:
    """Lines of the unified diff from a's model.py to b's. Each hunk's header names the definition it changes first."""
    old, new = _lines(a), _lines(b)
    old_owners, new_owners = _owners(a), _owners(b)
    files = f"steps/{a.slug}/model.py", f"steps/{b.slug}/model.py"
    diff = list(difflib.unified_diff(old, new, *files, lineterm="", n=context))
    for i, line in enumerate(diff):
        if start := re.match(r"@@ -(\d+)(?:,\d+)? \+(\d+)", line):
            unchanged = next(n for n, below in enumerate(diff[i + 1 :]) if not below.startswith(" "))
            owners, first = (old_owners, start[1]) if diff[i + 1 + unchanged][0] == "-" else (new_owners, start[2])
            diff[i] = f"{line} {owners[int(first) - 1 + unchanged]}".rstrip()
    return diff


def changed_definitions(a: Step, b: Step) -> list[str]:
    """`+ name`, `- name` or `~ name` for each definition of model.py that was added, removed or changed, in file order.

    Names are qualified (`ModelRunner.prefill`); a class stands for its own lines, without its methods.
    """
    old, new = _definitions(a), _definitions(b)
    changes = []
    for name in [*old, *(name for name in new if name not in old)]:
        if old.get(name) != new.get(name):
            changes.append(f"{'+' if name not in old else '-' if name not in new else '~'} {name}")
    return changes


def _definitions(step: Step) -> dict[str, list[str]]:
    """The lines of each definition, blank ones left out."""
    found = defaultdict(list)
    for line, owner in zip(_lines(step), _owners(step)):
        if line.strip():
            found[owner or "top level"].append(line)
    return dict(found)


def _owners(step: Step) -> list[str]:
    """For each line of model.py the qualified name of the innermost top-level definition around it, or ""."""
    owners = [""] * len(_lines(step))

    def claim(statements: list[ast.stmt], prefix: str = "") -> None:
        for node in statements:
            if not prefix and isinstance(node, ast.Import | ast.ImportFrom):
                name = "imports"
            elif not prefix and isinstance(node, ast.Expr):
                name = "docstring"
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                name = prefix + node.name
            else:
                continue
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            owners[first - 1 : node.end_lineno] = [name] * (node.end_lineno - first + 1)
            if isinstance(node, ast.ClassDef):
                claim(node.body, f"{name}.")

    claim(ast.parse(step.model_py.read_text(encoding="utf-8")).body)
    return owners


def _lines(step: Step) -> list[str]:
    return step.model_py.read_text(encoding="utf-8").splitlines()


def _stat(a: Step, b: Step, diff: list[str]) -> list[str]:
    added = sum(line.startswith("+") and not line.startswith("+++") for line in diff)
    removed = sum(line.startswith("-") and not line.startswith("---") for line in diff)
    return [f"{a.slug} -> {b.slug}: {added} lines added, {removed} removed", *changed_definitions(a, b)]


def _coloured(line: str) -> str:
    for start, colour in [("+++", BOLD), ("---", BOLD), ("@@", CYAN), ("+", GREEN), ("~", CYAN), ("-", RED)]:
        if line.startswith(start):
            return f"\033[{colour}m{line}\033[0m"
    return line


@plain_errors()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m shared.diff", description=__doc__)
    parser.add_argument("steps", nargs="*", metavar="STEP", help="two steps, by number or name: 01 02")
    parser.add_argument("--stat", action="store_true", help="only name what changed: + added, - removed, ~ changed")
    parser.add_argument("--context", type=int, default=3, metavar="N", help="unchanged lines around a change (3)")
    options = parser.parse_args(argv)
    if len(options.steps) != 2:
        names = ", ".join(step.slug for step in list_steps())
        raise UserError(f"which two steps? For example `make diff A=01 B=02`; there are: {names}")
    a, b = (find_step(name) for name in options.steps)
    lines = unified_diff(a, b, max(options.context, 0))
    if options.stat:
        lines = _stat(a, b, lines)
    in_colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for line in lines:
        print(_coloured(line) if in_colour else line)


if __name__ == "__main__":
    main()

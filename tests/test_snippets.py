"""Every named section of docs/snippets/*.py runs, asserts something and is shown on a page."""

import ast
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"
START = re.compile(r"^# --8<-- \[start:(?P<name>\w+)\]\n(?P<code>.*?)^# --8<-- \[end:(?P=name)\]\n", re.M | re.S)


def read_sections(path: Path) -> tuple[str, dict[str, str]]:
    """What stands before the first section of a snippet file, and its sections' code by name."""
    text = path.read_text(encoding="utf-8")
    sections = {match["name"]: match["code"] for match in START.finditer(text)}
    assert len(sections) == text.count("[start:") == text.count("[end:"), f"{path.name}: unpaired or repeated section"
    return text.split("# --8<-- [start:", 1)[0], sections


SECTIONS = [
    pytest.param(path, name, id=f"{path.stem}:{name}")
    for path in sorted((DOCS / "snippets").glob("*.py"))
    for name in read_sections(path)[1]
]


@pytest.mark.parametrize(("path", "name"), SECTIONS)
def test_section_runs_on_its_own(path, name):
    preamble, sections = read_sections(path)
    code = sections[name]
    checks = [n for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Assert) or getattr(n, "id", "") == "raises"]
    assert checks, "a section without an assertion claims nothing"
    exec(compile(preamble + code, f"{path.name}:{name}", "exec"), {"__name__": f"snippet_{name}"})


def test_every_section_is_shown():
    shown = set()
    for page in DOCS.rglob("*.md"):
        shown |= set(re.findall(r'--8<-- "docs/snippets/(\w+)\.py:(\w+)"', page.read_text(encoding="utf-8")))
    assert {(case.values[0].stem, case.values[1]) for case in SECTIONS} == shown

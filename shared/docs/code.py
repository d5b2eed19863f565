"""Cuts functions out of the steps' model.py by name, for the pages that explain them.

A page asks by including `docs/generated/code/<slug>/<qualified name>.md`; `render` reads those requests off the pages.
"""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

from shared.errors import UserError
from shared.steps import ROOT, Step, list_steps

INCLUDE = re.compile(r'--8<-- "docs/generated/code/(?P<slug>[^"/]+)/(?P<file>\w+)/(?P<name>[\w.]+)\.md"')


def cut(path: Path, name: str) -> str:
    """Source of the function, method or class `name` ("gather_batch_kv", "PagedKVCache.write"), without indentation.

    Raises UserError when the file defines no such name.
    """
    text = path.read_text(encoding="utf-8")
    body = ast.parse(text).body
    for part in name.split("."):
        node = next((n for n in body if getattr(n, "name", None) == part), None)
        if node is None:
            raise UserError(f"a page shows {name}, which {path} does not define: change the page or the code")
        body = node.body
    first = min([node.lineno] + [decorator.lineno for decorator in node.decorator_list])
    return textwrap.dedent("\n".join(text.splitlines()[first - 1 : node.end_lineno]))


def requests(docs: Path) -> set[tuple[str, str, str]]:
    """The (slug, file stem, qualified name) of every function that a page includes."""
    found = set()
    for page in sorted(docs.rglob("*.md")):
        if "generated" not in page.parts:
            found |= set(INCLUDE.findall(page.read_text(encoding="utf-8")))
    return found


def render(docs: Path = ROOT / "docs", steps: list[Step] | None = None) -> dict[str, str]:
    """The fragments, by path under docs/generated."""
    folders = {step.slug: step.path for step in steps or list_steps()}
    fragments = {}
    for slug, file, name in sorted(requests(docs)):
        if slug not in folders:
            raise UserError(f"a page shows code of {slug}, which is no step: change the page")
        source = cut(folders[slug] / f"{file}.py", name)
        title = f"steps/{slug}/{file}.py"
        fragments[f"code/{slug}/{file}/{name}.md"] = f'```python title="{title}"\n{source}\n```\n'
    return fragments

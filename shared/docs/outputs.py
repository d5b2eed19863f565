"""Command output shown on pages: found, run again, compared.

A page shows it as a fenced block right behind a comment that names the command:

    <!-- output: python steps/01_naive_write/model.py -->
    ```text
    ...
    ```

`python -m shared.docs.outputs` runs every command and writes what it printed into the pages. A test does the same and
compares, with everything masked that depends on the machine's speed.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

from shared.errors import UserError, plain_errors
from shared.steps import ROOT

BLOCK = re.compile(
    r"(?P<head>^(?P<indent>[ ]*)<!-- output: (?P<command>[^\n]+?) -->\n(?P=indent)```text\n)"
    r"(?P<output>.*?)(?P<tail>^(?P=indent)```$)",
    re.MULTILINE | re.DOTALL,
)
MEASURED = re.compile(r"\d+(?:[.,]\d+)*(?=\s*(?:ms|µs|us|s|min|seconds?|tokens/s|GB/s|MB|MiB|GiB)\b)")


def pages() -> list[Path]:
    """All Markdown that readers see, written by hand."""
    written = (path for path in (ROOT / "docs").rglob("*.md") if "generated" not in path.parts)
    return sorted([*written, *(path for name in ("README.md", "CONTRIBUTING.md") if (path := ROOT / name).is_file())])


def shown(text: str) -> list[tuple[str, str]]:
    """(command, output as shown) for each such block in a page's text; an indented block is dedented."""
    found = []
    for match in BLOCK.finditer(text):
        lines = match["output"].splitlines()
        found.append((match["command"], "\n".join(line.removeprefix(match["indent"]) for line in lines)))
    return found


def mask(output: str) -> str:
    """The output with every quantity replaced that another machine, or another run, would print differently."""
    return "\n".join(line.rstrip() for line in MEASURED.sub("#", output).strip().splitlines())


def run(command: str) -> str:
    """What the command prints to standard output, run at the root with this Python. UserError if it fails."""
    words = shlex.split(command)
    if words[0] == "python":
        words[0] = sys.executable
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"`{command}` failed with exit code {done.returncode}: {done.stderr.strip()[-400:]}")
    return done.stdout.strip()


def update(text: str) -> str:
    """The page's text with each block's output replaced by what its command prints now."""

    def replace(match: re.Match) -> str:
        lines = run(match["command"]).splitlines()
        body = "".join(f"{match['indent']}{line}".rstrip() + "\n" for line in lines)
        return match["head"] + body + match["tail"]

    return BLOCK.sub(replace, text)


@plain_errors()
def main():
    for page in pages():
        old = page.read_text(encoding="utf-8")
        new = update(old)
        if new != old:
            page.write_text(new, encoding="utf-8")
            print(f"updated {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

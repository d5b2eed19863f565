"""Measure the matrix: `python -m shared.compat`, or some versions of it: `python -m shared.compat 4.43.4 5.24.0`.

Environments are made once and kept under `.compat/`; every version's result is written as soon as it is there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from shared.compat import RESULTS, VERSIONS
from shared.errors import UserError, plain_errors
from shared.launch import ensure_dependencies


@plain_errors()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m shared.compat", description=__doc__)
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=f"of transformers: {', '.join(VERSIONS)} (all)")
    versions = parser.parse_args(argv).versions or list(VERSIONS)
    if unknown := [version for version in versions if version not in VERSIONS]:
        raise UserError(f"transformers {unknown[0]} is not one of those compared: {', '.join(VERSIONS)}")
    ensure_dependencies()
    from shared.compat.environments import check_python

    check_python()
    failed = []
    for number, version in enumerate(versions, start=1):
        progress(
            f"[{number}/{len(versions)}] transformers {version}: about 20 s to install it the first time, 10 s to probe"
        )
        try:
            print(summary(measure(version)), flush=True)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            failed.append(version)
    if failed:
        raise UserError(f"no result for {', '.join(failed)}; the others are in {RESULTS}, and are kept")


def measure(version: str) -> dict:
    """Run the probe with this version and write what it found. UserError if it cannot be installed, or fails."""
    from shared.compat.environments import run_in

    done = run_in(version, "shared.compat.probe", capture=True)
    if done.returncode:
        sys.stderr.write(done.stderr)
        raise UserError(f"the probe failed with transformers {version}, its message is above")
    RESULTS.mkdir(parents=True, exist_ok=True)
    temporary = RESULTS / f".{version}.tmp"
    temporary.write_text(done.stdout + "\n", encoding="utf-8")
    os.replace(temporary, RESULTS / f"{version}.json")
    return json.loads(done.stdout)


def summary(result: dict) -> str:
    """One line: which steps give the right tokens, and how many messages they draw."""
    steps = []
    for slug, found in result["families"]["llama"]["steps"].items():
        outcome = found["error"]["type"] if "error" in found else "right" if found["tokens_equal"] else "WRONG"
        steps.append(f"{slug} {outcome}, {len(found['messages'])} message{'s' * (len(found['messages']) != 1)}")
    return f"transformers {result['transformers']:<7} " + "; ".join(steps)


def progress(line: str) -> None:
    if sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

"""Published results, as the report reads them. Nothing here measures, and nothing here needs torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from shared.errors import UserError
from shared.models import DEFAULT_MODEL
from shared.steps import Step, code_hash

BASELINE = "transformers"


@dataclass(frozen=True)
class Results:
    """One results file."""

    environment: dict
    rows: dict[tuple, dict]
    hashes: dict[str, str]

    def row(self, suite: str, variant: str, workload: str, batch: int) -> dict | None:
        return self.rows.get((suite, variant, workload, batch))

    def select(self, suite: str, **equal: object) -> list[dict]:
        """Rows of a suite whose fields have these values, in the order of the file."""
        rows = (row for row in self.rows.values() if row["suite"] == suite)
        return [row for row in rows if all(row.get(name) == value for name, value in equal.items())]

    def is_stale(self, row: dict) -> bool:
        """Was it measured on other code than the step has now?"""
        slug = row["variant"].split("/")[0]
        return slug in self.hashes and row["code_hash"] != self.hashes[slug]

    @cached_property
    def title(self) -> str:
        """The hardware and versions of a table in one line."""
        env = self.environment
        hardware = env["gpu"] or f"{env['cpu']}, {env['threads']} threads"
        weights = ", random weights" if env["random_weights"] else ""
        versions = f"torch {env['versions']['torch']}, transformers {env['versions']['transformers']}"
        return f"{hardware}; {env['model']} {env['dtype']}{weights}; {versions}"


@dataclass(frozen=True)
class Report:
    """All results and all steps: what every part of the report is made from."""

    results: list[Results]
    steps: list[Step]

    @property
    def primary(self) -> Results | None:
        """The results the pictures and the README show: the default model on a CPU in float32."""
        for results in self.results:
            env = results.environment
            if (env["kind"], env["device"], env["model"], env["dtype"]) == ("full", "cpu", DEFAULT_MODEL, "float32"):
                return results
        return None

    @property
    def variants(self) -> list[str]:
        """transformers, with each attention that was measured anywhere, then the steps."""
        measured = {row["variant"] for results in self.results for row in results.select("end_to_end")}
        others = sorted(name for name in measured if name.startswith(f"{BASELINE}/"))
        return [BASELINE, *others, *(step.slug for step in self.steps)]


def load(folder: Path, steps: list[Step]) -> Report:
    """Read every results file in `folder` (not in folders below it). CPU before GPU, the default model first."""
    hashes = {step.slug: code_hash(step) for step in steps}
    return Report(sorted(_read_all(folder, hashes), key=_order), steps)


def _read_all(folder: Path, hashes: dict[str, str]) -> Iterator[Results]:
    for path in sorted([*folder.glob("cpu-*.json"), *folder.glob("cuda-*.json")]):
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            rows = {(r["suite"], r["variant"], r["workload"], r["batch"]): r for r in document["rows"]}
            yield Results(document["environment"], rows, hashes)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path} is no results file ({type(error).__name__}: {error}): restore or remove it"
            ) from None


def _order(results: Results) -> tuple:
    env = results.environment
    return env["device"] != "cpu", env["model"] != DEFAULT_MODEL, env["model"], env["dtype"], env["kind"]

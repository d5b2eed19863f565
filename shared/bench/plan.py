"""What is measured in which order, and what is left to do when some of it has been measured already.

A plan is a list of rounds; each names the tasks of every variant. What a task still lacks is read from the record, so
that continuing an interrupted run and running at all are the same thing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache

from shared.bench.workloads import Workload, chat, mixed, with_history
from shared.steps import Step

BASELINE, MACHINE = "transformers", "machine"
# The baseline again with another attention, end to end only: `transformers/` and the name transformers gives it.
FLASH_BASELINE = f"{BASELINE}/flash_attention_2"
SUITES = ("end_to_end", "decode_step", "counts", "write", "gather", "attention", "matmul")

# A workload whose sample took longer than this is not repeated, save the one the README's table shows.
SLOW_SECONDS = 30.0
HEADLINE = ("chat", 8)

CALIBRATION = ("calibration", MACHINE, "machine", 1)
WRITERS = ("write_kv_to_pool", "write_slots")
READERS = ("read_kv_from_pool", "gather_batch_kv", "read_slots")
DENSE_READERS = ("gather_batch_kv",)


@dataclass(frozen=True)
class Plan:
    """The sizes of a run. `repeats`: at most how often a workload is repeated, each time in a fresh process."""

    kind: str
    workloads: tuple[Workload, ...]
    breakdowns: tuple[Workload, ...]
    repeats: dict[str, int]
    write_points: tuple[tuple[int, int], ...]
    gather_points: tuple[tuple[int, int], ...]
    attention_points: tuple[tuple[int, int], ...]
    matmul_rows: tuple[int, ...]
    left_out: str
    decode_steps: int = 16
    check_tokens: int = 8
    suites: tuple[str, ...] = SUITES
    steps: tuple[Step, ...] = ()
    baselines: tuple[str, ...] = (BASELINE,)

    @property
    def variants(self) -> list[str]:
        """Whatever is compared end to end, the baseline first."""
        return [*self.baselines, *(step.slug for step in self.steps)]

    @property
    def taken_apart(self) -> list[str]:
        """The variants whose decode step is broken into parts, and counted."""
        return [BASELINE, *(step.slug for step in self.steps)]


def quick(new_tokens: int = 32) -> Plan:
    return Plan(
        kind="quick",
        workloads=(chat(8, new_tokens),),
        breakdowns=(chat(8, new_tokens),),
        repeats={"chat": 1},
        write_points=((1, 1), (1, 16), (1, 256), (8, 1)),
        gather_points=((8, 128), (8, 512)),
        attention_points=((8, 512),),
        matmul_rows=(1, 8),
        decode_steps=8,
        check_tokens=4,
        left_out=(
            f"chat at batch 8 with {new_tokens} new tokens, once each; no batch 1 and 4, no mixed prompts, no long "
            "histories, few sizes in the sweeps: `make bench-full` has all of it"
        ),
    )


def full() -> Plan:
    histories = tuple(with_history(n, batch) for n in (512, 2048) for batch in (1, 8))
    return Plan(
        kind="full",
        workloads=(chat(8), chat(1), chat(4), *histories, mixed()),
        breakdowns=(chat(8), chat(1), with_history(512, 8), with_history(2048, 8)),
        repeats={"chat": 2, "mixed": 1, "history-512": 1, "history-2048": 1},
        write_points=(*((1, n) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)), (8, 1)),
        gather_points=tuple((batch, n) for batch in (1, 8) for n in (32, 128, 512, 2048)),
        attention_points=((8, 128), (8, 512), (8, 2048), (1, 2048)),
        matmul_rows=(1, 2, 4, 8, 16),
        left_out="",
    )


def next_job(plan: Plan, rows: dict[tuple, dict]) -> tuple[str, list[dict]] | None:
    """The variant to run next and its tasks, given the rows so far; None when all is done."""
    for variant, tasks in _rounds(plan, rows):
        if tasks:
            return variant, tasks
    return None


def expected_keys(plan: Plan) -> list[tuple]:
    """Keys of the rows that a complete run has, without those that only some kernels or machines can give."""
    keys = [CALIBRATION] if needs_calibration(plan) else []
    for variant in plan.variants:
        keys += [("end_to_end", variant, w.name, w.batch) for w in plan.workloads if "end_to_end" in plan.suites]
    for variant in plan.taken_apart:
        keys += [("decode_step", variant, w.name, w.batch) for w in plan.breakdowns if "decode_step" in plan.suites]
        keys += [("counts", variant, "decode_step", 8)] if "counts" in plan.suites else []
    for suite, points, functions in (("write", plan.write_points, WRITERS), ("gather", plan.gather_points, READERS)):
        if suite in plan.suites:
            keys += [
                (suite, s, name, batch)
                for s in introducing(plan.steps, functions)
                for name, batch in _names(suite, points)
            ]
    return keys


def needs_calibration(plan: Plan) -> bool:
    """Is anything measured that the cost model predicts?"""
    return bool({"decode_step", "write", "gather"} & set(plan.suites))


@cache
def introducing(steps: tuple[Step, ...], functions: tuple[str, ...]) -> list[str]:
    """Slugs of the steps in which one of these functions appears or changes; elsewhere it would be measured again."""
    found, before = [], {}
    for step in steps:
        now = {name: code for name, code in _functions(step).items() if name in functions}
        if any(before.get(name) != code for name, code in now.items()):
            found.append(step.slug)
        before = now
    return found


@cache
def _functions(step: Step) -> dict[str, str]:
    tree = ast.parse(step.model_py.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:]
    return {node.name: ast.dump(node) for node in tree.body if isinstance(node, ast.FunctionDef)}


def _rounds(plan: Plan, rows: dict[tuple, dict]) -> Iterator[tuple[str, list[dict]]]:
    """(variant, tasks still to do) in the order of the run: every round goes over all variants."""
    calibration = [{"suite": "calibration"}] if needs_calibration(plan) and CALIBRATION not in rows else []
    yield MACHINE, calibration + _micro(plan, MACHINE, rows)
    for repeat in range(1, max(plan.repeats.values()) + 1):
        # Back and forth, so that no variant always runs at the same age of the machine; the first time the baseline
        # leads, since the others' tokens are compared with its.
        for variant in plan.variants if repeat % 2 else reversed(plan.variants):
            tasks = _end_to_end(plan, variant, repeat, rows)
            if repeat == 1 and variant in plan.taken_apart:  # in the same process, behind what is timed end to end
                tasks += _breakdowns(plan, variant, rows) + _micro(plan, variant, rows)
            yield variant, tasks


def _end_to_end(plan: Plan, variant: str, repeat: int, rows: dict[tuple, dict]) -> list[dict]:
    if "end_to_end" not in plan.suites:
        return []
    tasks = []
    for workload in plan.workloads:
        row = rows.get(("end_to_end", variant, workload.name, workload.batch), {"samples": []})
        if repeat > repeats_wanted(plan, workload, row) or len(row["samples"]) >= repeat:
            continue
        baseline = rows.get(("end_to_end", BASELINE, workload.name, workload.batch), {})
        tasks.append(
            {
                "suite": "end_to_end",
                "workload": asdict(workload),
                "repeat": repeat,
                "expected": None if variant == BASELINE else baseline.get("token_ids"),
                "check_tokens": plan.check_tokens,
                "steps": plan.decode_steps,
            }
        )
    return tasks


def repeats_wanted(plan: Plan, workload: Workload, row: dict) -> int:
    """How often this workload is to be measured, judging by what its first sample cost."""
    most = plan.repeats[workload.name]
    if not row["samples"]:
        return most
    first = row["samples"][0]
    if row.get("wrong"):
        return 1
    if first["wall_s"] <= SLOW_SECONDS:
        return most
    return min(most, 2) if (workload.name, workload.batch) == HEADLINE else 1


def _breakdowns(plan: Plan, variant: str, rows: dict[tuple, dict]) -> list[dict]:
    if "decode_step" not in plan.suites:
        return []
    missing = [w for w in plan.breakdowns if ("decode_step", variant, w.name, w.batch) not in rows]
    return [{"suite": "decode_step", "workload": asdict(w), "steps": plan.decode_steps} for w in missing]


def _micro(plan: Plan, variant: str, rows: dict[tuple, dict]) -> list[dict]:
    """Counts and sweeps of a variant, or (MACHINE) what they are measured against."""
    tasks = []
    if variant != MACHINE and "counts" in plan.suites and ("counts", variant, "decode_step", 8) not in rows:
        tasks.append({"suite": "counts"})

    def add(suite: str, points: tuple[tuple[int, int], ...], row_variant: str) -> None:
        have = [p for p, key in zip(points, _names(suite, points)) if (suite, row_variant, *key) in rows]
        left = [p for p in points if p not in have]
        if suite in plan.suites and left:
            tasks.append({"suite": suite, "points": left})

    if variant == MACHINE:
        add("gather", plan.gather_points, "memcpy")
        add("attention", plan.attention_points, "sdpa")
    if variant in introducing(plan.steps, WRITERS):
        add("write", plan.write_points, variant)
    if variant in introducing(plan.steps, READERS):
        add("gather", plan.gather_points, variant)
    if variant in [*introducing(plan.steps, DENSE_READERS)[-1:], *introducing(plan.steps, ("paged_attention",))]:
        add("attention", plan.attention_points, variant)
    if variant in [MACHINE, *introducing(plan.steps, ("thin_matmul",))]:
        rows_left = [
            n
            for n in plan.matmul_rows
            if ("matmul", "F.linear" if variant == MACHINE else variant, "weights", n) not in rows
        ]
        if "matmul" in plan.suites and rows_left:
            tasks.append({"suite": "matmul", "rows": rows_left})
    return tasks


def _names(suite: str, points: tuple[tuple[int, int], ...]) -> list[tuple[str, int]]:
    """(workload, batch) of a sweep's rows."""
    return [(f"{'tokens' if suite == 'write' else 'history'}-{size}", batch) for batch, size in points]

"""The parent's side: starts a fresh process for each job of a plan and folds what it reports into the record."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

from shared.bench.measure import load_average, spread
from shared.bench.plan import BASELINE, CALIBRATION, MACHINE, Plan, next_job
from shared.bench.record import Record
from shared.errors import UserError
from shared.steps import ROOT

# Medians over the repeats, with quartiles; the rest of a row is the same in all its samples.
MEASURED = ("tokens_per_s", "ttft_ms", "tpot_ms", "decode_step_ms", "peak_kv_bytes", "peak_memory_bytes")
VERDICT = ("tokens_equal", "first_difference", "margin", "margin_allowed", "accepted")


def conduct(plan: Plan, record: Record, prompts: dict, say: Callable[[str], None]) -> None:
    """Run jobs until the plan has nothing left to do. Every finished row is on disk before the next one starts."""
    env, hashes = record.environment, code_hashes(plan)
    env.setdefault("started", time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    env.setdefault("load_before", load_average())
    while job := next_job(plan, record.rows):
        variant, tasks = job
        say(f"{variant}: {', '.join(dict.fromkeys(map(_label, tasks)))}")
        spec = {
            "variant": variant,
            "model": env["model_argument"],
            "device": env["device"],
            "dtype": env["dtype"],
            "engine": env.get("engine", "own"),
            "threads": env["threads"],
            "prompts": prompts,
            "tasks": tasks,
        }
        rows = 0
        started = time.monotonic()
        for line in run_child(spec):
            task, row = tasks[line["task"]], line["row"]
            row["code_hash"] = hash_of(row["variant"], hashes)
            if row["suite"] == "end_to_end":
                row = merged(record.rows.get(_key(row)), row, task["repeat"])
            record.rows[_key(row)] = row
            derive(record.rows, env["kind"])
            env["measured_s"] = env.get("measured_s", 0) + time.monotonic() - started
            started = time.monotonic()
            env["load_after"] = load_average()
            record.save()
            rows += 1
        if rows == 0:
            raise UserError(f"{variant} reported nothing for {', '.join(map(_label, tasks))}: run `make test` first")
    env["finished"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    record.save()


def code_hashes(plan: Plan) -> dict[str, str]:
    """By variant: a step's code hash, or the version of the library that is measured."""
    import torch
    import transformers

    from shared.steps import code_hash

    library = {BASELINE: f"transformers {transformers.__version__}", MACHINE: f"torch {torch.__version__}"}
    return library | {step.slug: code_hash(step) for step in plan.steps}


def hash_of(variant: str, hashes: dict[str, str]) -> str:
    """The code a row was measured on: `slug/kernel` is the step's, anything that is no step the library's."""
    return hashes.get(variant.split("/")[0], hashes[MACHINE])


def run_child(spec: dict) -> Iterator[dict]:
    """Lines that `python -m shared.bench child` reports for this specification, as they come.

    The child is ended when the caller stops listening, whatever the reason. Raises UserError if it fails.
    """
    threads = str(spec["threads"])
    env = os.environ | {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "NUMBA_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    with tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, "-m", "shared.bench", "child"]
        child = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            with child.stdin:
                json.dump(spec, child.stdin)
            for line in child.stdout:
                yield json.loads(line)
            if child.wait():
                errors.seek(0)
                reason = reason_in(errors.read()) or f"exit code {child.returncode}"
                raise UserError(f"measuring {spec['variant']} failed: {reason} (what was finished is kept)")
        finally:
            child.kill()
            child.wait()


def reason_in(stderr: str) -> str | None:
    """The line of a traceback that names the exception, or else the last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"(error|ERROR|[\w.]+(Error|Exception|Interrupt|Exit)): ", line)]
    return (named or lines or [None])[-1]


def merged(row: dict | None, sample: dict, repeat: int) -> dict:
    """The row of a workload with one more sample; its figures are medians over all its samples.

    A sample whose tokens are wrong takes all times out of the row: nothing wrong is ever fast.
    """
    identity = ("suite", "variant", "workload", "batch", "new_tokens", "code_hash")
    samples = [
        *(row["samples"] if row else []),
        {"repeat": repeat} | {k: v for k, v in sample.items() if k not in (*identity, "token_ids")},
    ]
    new = {key: sample[key] for key in identity}
    worst = min(samples, key=lambda s: (s["tokens_equal"], s.get("accepted", True)))
    new |= {key: worst[key] for key in VERDICT if key in worst}
    new["wrong"] = not worst.get("accepted", worst["tokens_equal"])
    for name in MEASURED if not new["wrong"] else ():
        values = [s[name] for s in samples if name in s]
        if values:
            new[name], new[f"{name}_q1"], new[f"{name}_q3"] = spread(values)
    if not new["wrong"] and all("decode_steps_ms" in s for s in samples):
        steps = [ms for s in samples for ms in s["decode_steps_ms"]]
        new["decode_step_ms"], new["decode_step_ms_q1"], new["decode_step_ms_q3"] = spread(steps)
    if "token_ids" in sample or (row and "token_ids" in row):
        new["token_ids"] = sample.get("token_ids") or row["token_ids"]
    new["repeats"] = len(samples)
    new["samples"] = samples
    return new


def derive(rows: dict[tuple, dict], kind: str) -> None:
    """What follows from other rows of the same run: ratios to the baseline, and the cost model's predictions."""
    calibration = rows.get(CALIBRATION)
    for (suite, _, workload, batch), row in rows.items():
        if suite == "end_to_end":
            base = rows.get((suite, BASELINE, workload, batch), {})
            row["x_transformers"] = _ratio(row.get("tokens_per_s"), base.get("tokens_per_s"))
            row["x_transformers_decode"] = _ratio(base.get("decode_step_ms"), row.get("decode_step_ms"))
            row["note"] = "" if row["repeats"] > 1 or kind != "full" else "measured once"
        elif calibration and "cache_ops" in row:
            row["predicted_ms"] = (
                row["floor_ms"] + row["attention_ms"] + _cost(calibration, row["cache_ops"], row["cache_bytes"])
            )
            row["misfit"] = row["predicted_ms"] / row["total_ms"]
            row["limit_ms"] = row["bytes_once"] / calibration["read_gb_per_s"] / 1e6
        elif calibration and "bytes_moved" in row:
            row["predicted_ms"] = _cost(calibration, row["ops"], row["bytes_moved"])
            row["misfit"] = row["predicted_ms"] / row["ms"]


def _cost(calibration: dict, ops: int, nbytes: int) -> float:
    """The cost model, in ms: operators x t0 + bytes / bandwidth."""
    return ops * calibration["t0_us"] / 1e3 + nbytes / calibration["copy_gb_per_s"] / 1e6


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def _key(row: dict) -> tuple:
    return row["suite"], row["variant"], row["workload"], row["batch"]


def _label(task: dict) -> str:
    workload = task.get("workload")
    return f"{task['suite']} {workload['name']} x{workload['batch']}" if workload else task["suite"]

"""One variant in a fresh process: a JSON specification on standard input, one JSON line out for each finished row.

The parent pins the threads through the environment, too, since OpenMP and numba read it when they start.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator

import torch
from transformers import AutoConfig
from transformers.utils import logging

from shared.bench import breakdown, counts, end_to_end, sweeps
from shared.bench.measure import calibrate, load_average, pin_threads
from shared.bench.plan import MACHINE
from shared.bench.subjects import BASELINE, make_subject
from shared.bench.workloads import SHAPE, Workload
from shared.models import resolve_model, shape_config
from shared.steps import find_step, load_step


def run(spec: dict) -> Iterator[dict]:
    """Carry out the specification's tasks one after another.

    spec: `variant`, `model`, `device`, `dtype`, `engine`, `threads`, `prompts` (token ids by workload) and `tasks`,
    each with its `suite` and what that suite needs (see plan.py). Yields `{"row": ..., "task": number}`.
    """
    pin_threads(spec["threads"])
    torch.set_grad_enabled(False)
    device, dtype, name, subject = spec["device"], getattr(torch, spec["dtype"]), spec["variant"], None
    for number, task in enumerate(spec["tasks"]):
        suite = task["suite"]
        if suite in ("end_to_end", "decode_step") and subject is None:
            subject = make_subject(name, spec["model"], device, dtype, spec.get("engine", "own"))
        before, start = load_average(), time.perf_counter()
        for variant, row in _rows(suite, task, spec, subject, device, dtype):
            key = {"suite": suite, "variant": variant}
            load = {"load_before": before, "load_after": load_average(), "wall_s": time.perf_counter() - start}
            yield {"task": number, "row": key | row | load}
            start = time.perf_counter()


def _rows(suite: str, task: dict, spec: dict, subject, device: str, dtype: torch.dtype) -> Iterator[tuple[str, dict]]:
    """(variant, row) of one task."""
    name = spec["variant"]
    if suite in ("end_to_end", "decode_step"):
        workload = Workload(**task["workload"])
        key = {"workload": workload.name, "batch": workload.batch}
        if suite == "end_to_end":
            measured = end_to_end.measure(
                subject, spec["model"], workload, spec["prompts"], task["expected"], task["check_tokens"], task["steps"]
            )
            yield name, key | {"new_tokens": workload.new_tokens} | measured
        else:
            lengths = workload.lengths(spec["prompts"])
            measured = breakdown.measure(subject, lengths, task["steps"]) | breakdown.count(subject, lengths)
            measured["bytes_once"] = breakdown.bytes_once(subject, lengths)
            yield name, key | {"mean_history": sum(lengths) / len(lengths)} | measured
    elif suite == "calibration":
        yield name, {"workload": "machine", "batch": 1} | calibrate(device)
    elif suite == "counts":
        laws = counts.all_laws(None if name == BASELINE else find_step(name))
        for kind, law in laws.items():
            yield name, {"workload": kind, "batch": 8} | _evaluated(law, _config(spec["model"]).num_hidden_layers)
    else:
        yield from _sweep(suite, task, name, _config(spec["model"]), device, dtype, subject, spec)


def _sweep(suite, task, name, config, device, dtype, subject, spec) -> Iterator[tuple[str, dict]]:
    points = task.get("points")
    if suite == "attention" and name == MACHINE:
        yield from sweeps.attention_dense(config, points, device, dtype)
    elif suite == "matmul":
        yield from sweeps.matmul(name, spec["model"], task["rows"], device, dtype)
    elif name == MACHINE:
        for row in sweeps.memcpy(config, points, device, dtype):
            yield sweeps.MEMCPY, row
    elif suite == "attention":
        yield from sweeps.attention_of(load_step(find_step(name)), name, config, points, device, dtype)
    else:
        for row in getattr(sweeps, suite)(load_step(find_step(name)), config, points, device, dtype):
            yield name, row


def _evaluated(laws: counts.Laws, layers: int) -> dict:
    """The laws as text, and what they give for this model at batch 8 with 512 tokens of history each, T = 1."""
    sizes = counts.sizes_of(layers, [512] * 8) | {"T": 1, "[T=1]": 1}
    return {
        "law_all": str(laws.all),
        "law_non_view": str(laws.non_view),
        "ops_all": laws.all(**sizes),
        "ops_non_view": laws.non_view(**sizes),
        "layers": layers,
        "history": 512,
    }


def _config(model: str) -> object:
    if model.startswith(SHAPE):
        return shape_config(model.removeprefix(SHAPE))
    return AutoConfig.from_pretrained(resolve_model(model), trust_remote_code=False)


def main() -> None:
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    for line in run(json.load(sys.stdin)):
        print(json.dumps(line), flush=True)

"""Where a decode step's time goes: the step's own functions are timed where they are called.

Parts in milliseconds: `floor` (the same forward with no cache and no history, less its attention), `attention`,
`gather`, `write`, `cache` (copies the cache object itself makes: appending by torch.cat, filling a DynamicCache) and
`rest`, what is left.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np
import torch

from shared.bench.measure import timed
from shared.bench.subjects import BLOCK_SIZE, Subject
from shared.opcount import OpCounter

PARTS = ("floor", "attention", "gather", "write", "cache")


def measure(subject: Subject, lengths: list[int], steps: int, slow: float = 1.0) -> dict:
    """Medians over `steps` decode steps, or two where one takes over `slow` seconds.

    `total_ms` is the whole step, measured in the same run.
    """
    floor = subject.floor(len(lengths))
    floors, totals, parts = [], [], {part: [] for part in PARTS[1:]}
    with torch.inference_mode():
        subject.start(lengths, 1)  # a runner may prepare the model, whose floor is then another one
        floor()
        for _ in range(max(3, min(steps, 8))):
            with subject.sections() as sections:
                seconds, _ = timed(floor, subject.device)
            floors.append(1e3 * seconds - sections.spent.get("attention", 0.0))
        subject.start(lengths, steps + 1)
        subject.fill_history()
        tokens = subject.decode([1] * len(lengths))
        while len(totals) < (steps if not totals or totals[0] < 1e3 * slow else 2):
            with subject.sections() as sections:
                seconds, tokens = timed(lambda: subject.decode(tokens), subject.device)  # noqa: B023 (called at once)
            totals.append(1e3 * seconds)
            for part, values in parts.items():
                values.append(sections.spent.get(part, 0.0))
    medians = {f"{part}_ms": statistics.median(values) for part, values in parts.items()}
    medians["floor_ms"] = statistics.median(floors)
    total = statistics.median(totals)
    return medians | {
        "total_ms": total,
        "rest_ms": total - sum(medians.values()),
        "steps": [{"total_ms": t, **{f"{p}_ms": v[i] for p, v in parts.items()}} for i, t in enumerate(totals)],
        "floors_ms": floors,
    }


def bytes_once(subject: Subject, lengths: list[int]) -> int:
    """What any decode step has to read at least once: the weights of its products, and the histories' K and V."""
    model, config = subject.model, subject.model.config
    embedding = model.get_parameter("model.embed_tokens.weight")
    tensors = {p.data_ptr(): p.nbytes for p in model.parameters()}  # tied weights are one tensor with two names
    weights = sum(tensors.values()) - (0 if config.tie_word_embeddings else embedding.nbytes)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    row = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * embedding.element_size()
    return weights + row * sum(lengths)


def count(subject: Subject, lengths: list[int]) -> dict:
    """Operators of a decode step at these lengths, and the operators and bytes beyond its floor and its attention.

    Counts are linear in the history, so they are taken on two short ones and continued: counting itself would take
    minutes where a step copies token by token.
    """
    floor, short, long = (
        _counts(subject, subject.floor(len(lengths))),
        *(_step_counts(subject, len(lengths), n) for n in (2, 4)),
    )
    reach = (sum(lengths) / len(lengths) / BLOCK_SIZE - 2) / (4 - 2)
    step = {name: short[name] + reach * (long[name] - short[name]) for name in short}
    return {
        "ops": round(step["all"]),
        "ops_non_view": round(step["non_view"]),
        "cache_ops": round(step["all"] - step["attention_all"] - floor["all"] + floor["attention_all"]),
        "cache_bytes": round(step["bytes"] - step["attention_bytes"] - floor["bytes"] + floor["attention_bytes"]),
    }


def _step_counts(subject: Subject, batch: int, blocks: int) -> dict[str, int]:
    with torch.inference_mode():
        subject.start([blocks * BLOCK_SIZE] * batch, 1)
        subject.fill_history()
    return _counts(subject, lambda: subject.decode([1] * batch))


def _counts(subject: Subject, run: Callable[[], object]) -> dict[str, int]:
    counter = OpCounter()
    meter = subject.sections(lambda: np.array([counter.all, counter.bytes_moved]))
    with torch.inference_mode(), counter, meter as sections:
        run()
    attention = sections.spent.get("attention", (0, 0))
    return {
        "all": counter.all,
        "non_view": counter.non_view,
        "bytes": counter.bytes_moved,
        "attention_all": int(attention[0]),
        "attention_bytes": int(attention[1]),
    }

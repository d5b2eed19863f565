"""Operator counts of a step's write, gather and decode step, and the formula each follows.

Sizes: L layers, B requests in the batch, T new tokens of a write, S tokens of history in all requests together,
N blocks that hold them. A law is found on a grid of small sizes and must give every count on it exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from shared.bench.cache_ops import gatherer, writer
from shared.bench.subjects import BLOCK_SIZE, BaselineSubject, StepSubject, Subject
from shared.opcount import Law, OpCounter, count_ops, find_law
from shared.steps import Step, load_step

# A term in brackets is 1 where it holds and else 0. [T=1], [B=1]: torch takes other paths for dimensions of size 1 (it
# strips them off what it stores, which is one more view; it need not expand a mask, which is one less). [pad]: the
# histories differ in length; transformers makes no mask where there is no padding.
WRITE_TERMS = ("1", "T", "[T=1]")
GATHER_TERMS = ("1", "L", "B", "L·B", "L·S", "L·N", "[B=1]", "L·[B=1]", "[pad]", "L·[pad]")
KINDS = ("write", "gather", "decode_step")

# Lengths of the requests' histories: full blocks, partly filled ones, one token; lengths and block counts independent.
HISTORIES = ([5], [16], [40, 40], [17, 3], [1, 16, 33], [64, 2, 30], [8, 8, 8])
LAYERS = (1, 2, 3)


@dataclass(frozen=True)
class Laws:
    """The formulas of one kind of work: all operators, and those that are more than a new view of memory."""

    all: Law
    non_view: Law


def tiny_config(layers: int, kv_heads: int = 3, head_dim: int = 8) -> LlamaConfig:
    """A model whose cache has the given row shape and which is otherwise as small as can be."""
    return LlamaConfig(
        vocab_size=64,
        hidden_size=2 * kv_heads * head_dim,
        intermediate_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2 * kv_heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=4096,
    )


def sizes_of(layers: int, histories: list[int]) -> dict[str, int]:
    blocks = sum(math.ceil(length / BLOCK_SIZE) for length in histories)
    conditions = {"[B=1]": int(len(histories) == 1), "[pad]": int(len(set(histories)) > 1)}
    return {"L": layers, "B": len(histories), "S": sum(histories), "N": blocks} | conditions


def count_write(module: ModuleType, config: LlamaConfig, tokens: int, dtype: torch.dtype = torch.float32) -> np.ndarray:
    """(all, non-view, bytes) of one request's write of `tokens` tokens in one layer."""
    counter = count_ops(writer(module, config, 1, tokens, "cpu", dtype))
    return np.array([counter.all, counter.non_view, counter.bytes_moved]) // config.num_hidden_layers


def count_gather(
    module: ModuleType, config: LlamaConfig, lengths: list[int], dtype: torch.dtype = torch.float32
) -> np.ndarray:
    """(all, non-view, bytes) of reading the histories of all requests in all layers."""
    counter = OpCounter()
    with torch.inference_mode():
        gather = gatherer(module, config, lengths, "cpu", dtype, lambda: _snapshot(counter))
        with counter:
            return gather()


def count_decode(subject: Subject, lengths: list[int]) -> np.ndarray:
    """(all, non-view, bytes) of one decode step, model included."""
    with torch.inference_mode():
        subject.start(lengths, 1)
        subject.fill_history()
        with OpCounter() as counter:
            subject.decode([1] * len(lengths))
    return _snapshot(counter)


def write_laws(step: Step) -> Laws:
    module = load_step(step)
    return _laws(
        [({"T": n, "[T=1]": int(n == 1)}, count_write(module, tiny_config(1), n)) for n in (1, 2, 5, 16, 17)],
        WRITE_TERMS,
    )


def gather_laws(step: Step) -> Laws:
    module = load_step(step)
    return _over_grid(lambda layers, histories: count_gather(module, tiny_config(layers), histories))


def decode_laws(step: Step | None) -> Laws:
    """Of a step, or (None) of the baseline with its own cache."""
    subjects = {}
    for layers in LAYERS:
        if step is None:
            subjects[layers] = BaselineSubject(LlamaForCausalLM(tiny_config(layers)).eval())
        else:
            subjects[layers] = StepSubject(step, load_step(step).build_model(tiny_config(layers)))
    return _over_grid(lambda n, h: count_decode(subjects[n], h))


def all_laws(step: Step | None) -> dict[str, Laws]:
    """By kind of work; a step that never gathers has no law for it."""
    laws = {"decode_step": decode_laws(step)}
    if step is not None:
        laws["write"] = write_laws(step)
        if gathers(load_step(step)):
            laws["gather"] = gather_laws(step)
    return laws


def gathers(module: ModuleType) -> bool:
    """Does this step copy histories out of the pool in a decode step?"""
    return not hasattr(module, "paged_attention")


def _over_grid(count: Callable[[int, list[int]], np.ndarray]) -> Laws:
    return _laws([(sizes_of(n, h), count(n, h)) for n in LAYERS for h in HISTORIES], GATHER_TERMS)


def _laws(observed: list[tuple[dict[str, int], np.ndarray]], terms: tuple[str, ...]) -> Laws:
    return Laws(*(find_law([(sizes, int(counts[i])) for sizes, counts in observed], terms) for i in range(2)))


def _snapshot(counter: OpCounter) -> np.ndarray:
    return np.array([counter.all, counter.non_view, counter.bytes_moved])

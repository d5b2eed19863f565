"""Drive a step from outside, through the interface that all steps share, and look at what its model computes."""

from __future__ import annotations

import random
from collections.abc import Iterable
from contextlib import contextmanager
from math import ceil

import torch

NAN = float("nan")


def poison(cache, value: float = NAN, blocks: Iterable[int] | None = None) -> None:
    """Overwrite these blocks (all when None) in every layer's pools."""
    where = slice(None) if blocks is None else list(blocks)
    for k_pool, v_pool in zip(cache.k_pools, cache.v_pools):
        k_pool[where] = value
        v_pool[where] = value


def hostile_runner(step, model, num_blocks: int, block_size: int, seed: int = 0):
    """A runner that shows what a neat one hides: every slot holds NaN and blocks are handed out in a random order."""
    runner = step.ModelRunner(model, num_blocks=num_blocks, block_size=block_size)
    poison(runner.cache)
    random.Random(seed).shuffle(runner.cache.free_blocks)
    return runner


def decode(runner, request_ids: list, tokens: list[int]) -> list[int]:
    """One more token for each request: in one batch where the step can, else one after the other."""
    if hasattr(runner, "decode_batch"):
        return runner.decode_batch(request_ids, tokens)
    return [runner.decode(request_id, token) for request_id, token in zip(request_ids, tokens)]


@contextmanager
def recorded_logits(model):
    """A list that collects the last position's logits [batch, vocab_size] of every call of the model."""
    calls: list[torch.Tensor] = []
    hook = model.register_forward_hook(lambda module, args, out: calls.append(out.logits[:, -1].detach().clone()))
    try:
        yield calls
    finally:
        hook.remove()


@torch.inference_mode()
def prefill_logits(runner, request_id, prompt: list[int]) -> torch.Tensor:
    """Logits [vocab_size] from which the request's first token is chosen; checks that it is the greedy one."""
    with recorded_logits(runner.model) as calls:
        token = runner.prefill(request_id, prompt)
    logits = calls[-1][-1]
    assert token == int(logits.argmax())
    return logits


@torch.inference_mode()
def decode_logits(runner, request_ids: list, tokens: list[int]) -> torch.Tensor:
    """Logits [batch, vocab_size] from which the next tokens are chosen; checks that those are the greedy ones."""
    with recorded_logits(runner.model) as calls:
        chosen = decode(runner, request_ids, tokens)
    logits = torch.cat(calls)
    assert chosen == logits.argmax(dim=-1).tolist()
    return logits


def forced_logits(runner, prompts: list[list[int]], continuations: list[list[int]]) -> list[torch.Tensor]:
    """Logits [len(continuation), vocab_size] for each prompt when it is continued by these tokens, whatever it prefers.

    All prompts run together; one whose continuation is used up leaves, and the blocks it gives back are poisoned.
    """
    cache = runner.cache
    logits = [[prefill_logits(runner, index, prompt)] for index, prompt in enumerate(prompts)]
    for count in range(1, max(map(len, continuations)) + 1):
        for index, continuation in enumerate(continuations):
            if len(continuation) == count:
                cache.free(index)
                poison(cache, blocks=cache.free_blocks)
        running = [index for index, continuation in enumerate(continuations) if len(continuation) > count]
        if running:
            tokens = [continuations[index][count - 1] for index in running]
            for index, row in zip(running, decode_logits(runner, running, tokens)):
                logits[index].append(row)
    return [torch.stack(rows) for rows in logits]


def blocks_needed(step, prompts: list[list[int]], limits: list[int], block_size: int) -> int:
    """The most blocks in use at once when every request has exactly the blocks that its stored tokens fill.

    The last new token is returned and never stored. Without batched decode requests run one after the other; with
    it, all prompts are run first, and a request that is finished by then has given its blocks back.
    """
    if not hasattr(step.ModelRunner, "decode_batch"):
        return max(ceil((len(prompt) + limit - 1) / block_size) for prompt, limit in zip(prompts, limits))
    peak, held = 0, 0
    for prompt, limit in zip(prompts, limits):
        blocks = ceil(len(prompt) / block_size)
        peak = max(peak, held + blocks)
        held += blocks if limit > 1 else 0
    for count in range(1, max(limits)):
        running = [(prompt, limit) for prompt, limit in zip(prompts, limits) if limit > count]
        peak = max(peak, sum(ceil((len(prompt) + count) / block_size) for prompt, _ in running))
    return peak


def assert_idle(cache) -> None:
    """Every block is on the free list exactly once, and no request is left."""
    assert sorted(cache.free_blocks) == list(range(cache.num_blocks))
    assert not cache.block_tables
    assert not cache.seq_lens

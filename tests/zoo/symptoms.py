"""What a user would see of a bug: the same runs for every planted step, from the most ordinary to the most unkind.

The first run that shows something gives the sentence. Answers are compared with transformers', which caches nothing.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from shared.steps import find_step, load_step
from tests import drive, reference
from tests.zoo.worker import Stuck, one_line, time_limit

BLOCK_SIZE = 16
NEW_TOKENS = 12
# A prompt that crosses into its second block while it is answered, one that fills its block, one that has just begun
# the next, and a longer one.
LENGTHS = (6, 16, 17, 40)
# As close as two float32 implementations of one model come; tolerance.md has more.
CLOSE = 1e-4


_models = tempfile.TemporaryDirectory(prefix="zoo-models-")  # removed when the process ends


@cache
def _folder(kind: str) -> Path:
    return reference.save_model(kind, Path(_models.name) / kind)


def observe(slug: str) -> str:
    """One line about the step that lies at STEPS_DIR/slug."""
    step = load_step(find_step(slug))
    try:
        with time_limit():
            for run in (fresh_pool, used_pool, scattered_blocks, dirty_pool, stop_tokens, small_pool, other_models):
                if symptom := run(step):
                    return symptom
    except Stuck:
        return "never ends"
    except Exception as error:
        return f"crashes: {one_line(error)}"
    return "nothing, in any of these runs"


def fresh_pool(step) -> str | None:
    model = step.load_model(_folder("llama"))
    prompts = [reference.prompt(n) for n in LENGTHS]
    return compare(
        "llama", prompts, lambda on_token: _generate(step, model, prompts, on_token=on_token)
    ) or silent_error(step, model, "llama", prompts)


def used_pool(step) -> str | None:
    """The same runner again, for other prompts."""
    model = step.load_model(_folder("llama"))
    runner = step.ModelRunner(model, num_blocks=20, block_size=BLOCK_SIZE)
    for seed in (0, 1):
        prompts = [reference.prompt(n, seed) for n in LENGTHS]
        free = len(runner.cache.free_blocks)
        if seen := compare_runner(step, runner, prompts):
            return f"right at first; when blocks are used again, {seen}"
        lost = free - len(runner.cache.free_blocks)
        if lost > 0:
            return f"right answers, but {lost} of {free} blocks are lost after {len(prompts)} requests"
        if lost < 0:
            return f"right answers, but {-lost} blocks are on the free list twice after {len(prompts)} requests"
        if runner.cache.seq_lens or runner.cache.block_tables:
            return "right answers, but finished requests stay in the books"
    return None


def scattered_blocks(step) -> str | None:
    """Blocks in no order, as in an engine that has run for a while."""
    model = step.load_model(_folder("llama"))
    runner = step.ModelRunner(model, num_blocks=24, block_size=BLOCK_SIZE)
    free = runner.cache.free_blocks
    free[:] = free[::2] + free[1::2][::-1]
    prompts = [reference.prompt(n) for n in LENGTHS]
    seen = compare_runner(step, runner, prompts)
    return seen and f"right as long as blocks are handed out in order; else {seen}"


def dirty_pool(step) -> str | None:
    """Memory as an allocator hands it out: anything, NaN included."""
    model = step.load_model(_folder("llama"))
    runner = drive.hostile_runner(step, model, num_blocks=24, block_size=BLOCK_SIZE)
    prompts = [reference.prompt(n) for n in LENGTHS]
    seen = compare_runner(step, runner, prompts)
    if seen:
        return f"right in a pool of zeros; where unused slots hold NaN, {seen}"
    if not hasattr(step, "gather_batch_kv"):
        return None
    k_pools, v_pools = [torch.full((4, BLOCK_SIZE, 3, 8), math.nan)], [torch.full((4, BLOCK_SIZE, 3, 8), math.nan)]
    dense = step.gather_batch_kv(k_pools, v_pools, [[1], [2, 3]], [3, 17])
    padding = torch.stack([part[0, :, :14] for layer in dense for part in layer])
    if padding.isnan().any():
        return "right in these runs; NaN in a request's first slot gets into its padding, and 0 x NaN is NaN"
    if (padding != 0).any():
        return "right in these runs; padding is not zero, and only the mask hides it"
    return None


def stop_tokens(step) -> str | None:
    model = step.load_model(_folder("llama"))
    prompts = [reference.prompt(n) for n in LENGTHS]
    answers = [reference.greedy("llama", prompt, NEW_TOKENS) for prompt in prompts]
    stop = {answers[1][5], answers[3][8]}
    got = _generate(step, model, prompts, eos_token_id=sorted(stop))
    wrong = [(g, reference.until(a, stop)) for g, a in zip(got, answers) if g != reference.until(a, stop)]
    if wrong:
        return f"right without an end token; with one, {len(wrong)} of {len(prompts)} answers end at another place"
    return None


def small_pool(step) -> str | None:
    """Pools that run out, in a prompt and in the middle of answers; then one that is exactly large enough."""
    model = step.load_model(_folder("llama"))
    prompts = [reference.prompt(n) for n in LENGTHS]
    limits = [NEW_TOKENS, NEW_TOKENS, 1, 9]
    needed = drive.blocks_needed(step, prompts, limits, BLOCK_SIZE)
    for num_blocks in range(1, needed):
        runner = step.ModelRunner(model, num_blocks=num_blocks, block_size=BLOCK_SIZE)
        emitted: list[list[int]] = [[] for _ in prompts]

        def on_token(index, token, emitted=emitted):
            emitted[index].append(token)

        try:
            step.generate(model, prompts, limits, block_size=BLOCK_SIZE, runner=runner, on_token=on_token)
            return "runs in fewer blocks than the tokens fill: some are used by two requests"
        except step.OutOfBlocks as error:
            if error.outputs != emitted:
                return "right answers; when the pool is full, those already produced are lost"
        except Exception as error:
            return f"right answers; when the pool is full, {one_line(error)}"
        cache = runner.cache
        if len(cache.free_blocks) != num_blocks or cache.block_tables or cache.seq_lens:
            return (
                f"right answers; after the pool was full {len(cache.free_blocks)} of its {num_blocks} blocks are free"
            )
    try:
        step.generate(model, prompts, limits, block_size=BLOCK_SIZE, num_blocks=needed)
    except step.OutOfBlocks:
        return "right answers; a pool of exactly the size that the tokens fill is not enough"
    runner = step.ModelRunner(model, num_blocks=20, block_size=BLOCK_SIZE)
    for length in (100, 3):
        step.generate(model, [reference.prompt(length)], 2, block_size=BLOCK_SIZE, runner=runner)
    if runner.cache.peak_blocks != 7:
        return f"right answers; peak_blocks says {runner.cache.peak_blocks} where 7 were in use"
    return None


def other_models(step) -> str | None:
    for kind in ("qwen2", "qwen3", "llama3"):
        model = step.load_model(_folder(kind))
        prompts = [reference.prompt(n) for n in LENGTHS]
        seen = compare(
            kind,
            prompts,
            lambda on_token: _generate(step, model, prompts, on_token=on_token),  # noqa: B023 (called at once)
        ) or silent_error(step, model, kind, prompts)
        if seen:
            name = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama3": "Llama 3.x"}[kind]
            return f"with {name}: {seen}"
    return None


def _generate(step, model, prompts, **options):
    return step.generate(model, prompts, NEW_TOKENS, block_size=BLOCK_SIZE, **options)


def compare(kind: str, prompts: list[list[int]], generate: Callable) -> str | None:
    """Run it, and say how its answers differ from transformers', if they do."""
    emitted: list[list[int]] = [[] for _ in prompts]
    try:
        generate(lambda index, token: emitted[index].append(token))
    except Exception as error:
        done = sum(len(answer) == NEW_TOKENS for answer in emitted)
        where = f"token {max(map(len, emitted)) + 1}" if done == 0 else f"request {done + 1}"
        return f"crashes at {where}: {one_line(error)}"
    wrong = {}
    for index, (prompt, answer) in enumerate(zip(prompts, emitted)):
        expected = reference.greedy(kind, prompt, NEW_TOKENS)
        if answer != expected:
            differ = [i for i, (a, e) in enumerate(zip(answer, expected)) if a != e]
            wrong[index] = differ[0] if differ else min(len(answer), len(expected))
    if not wrong:
        return None
    lengths = {len(answer) for answer in emitted}
    if lengths != {NEW_TOKENS}:
        return f"answers of {max(lengths)} tokens where {NEW_TOKENS} were asked for"
    first = min(wrong.values()) + 1
    who = "every answer" if len(wrong) == len(prompts) else f"{len(wrong)} of {len(prompts)} answers"
    return f"{who} wrong from token {first} on"


def compare_runner(step, runner, prompts: list[list[int]]) -> str | None:
    """The same with a runner that is there already."""
    return compare(
        "llama", prompts, lambda on_token: _generate(step, runner.model, prompts, runner=runner, on_token=on_token)
    )


def silent_error(step, model, kind: str, prompts: list[list[int]]) -> str | None:
    """Right tokens may hide wrong logits: how far off they are when both are made to say the same."""
    answers = [reference.greedy(kind, prompt, NEW_TOKENS) for prompt in prompts]
    runner = step.ModelRunner(model, num_blocks=24, block_size=BLOCK_SIZE)
    logits = drive.forced_logits(runner, prompts, answers)
    worst = max(
        float((got - reference.greedy_logits(kind, prompt, NEW_TOKENS)).abs().max())
        for got, prompt in zip(logits, prompts)
    )
    if math.isnan(worst) or worst > CLOSE:
        return f"right tokens here, silently: logits off by up to {worst:.1g}"
    return None

"""Too few blocks, at every moment they can run out: a clear error, nothing lost, and the runner goes on."""

from __future__ import annotations

import pytest
import torch

from tests.drive import NAN, assert_idle, blocks_needed, decode, decode_logits, hostile_runner, poison, prefill_logits
from tests.reference import KINDS, greedy, greedy_logits, prompt

pytestmark = pytest.mark.zoo

BLOCK_SIZE = 4
# One ends with its prompt, one crosses a border while it decodes, one fills its last block exactly.
PROMPTS = [prompt(n, seed=30) for n in (5, 9, 3, 8)]
LIMITS = [6, 1, 9, 5]
ENOUGH = 10


def assert_clear(error, free: int) -> None:
    """The error and its one line of text say how many blocks were needed, how many are free and what to raise."""
    assert error.needed > error.free
    assert 0 <= error.free <= free
    message = str(error)
    assert "\n" not in message
    assert str(error.needed) in message
    assert str(error.free) in message
    assert "num_blocks" in message


def outputs_with(step, model, free: int):
    """Generate when only `free` blocks are; returns the outputs or the error, and the runner, its blocks all back."""
    runner = hostile_runner(step, model, ENOUGH, BLOCK_SIZE, seed=free)
    held_back = runner.cache.free_blocks[free:]
    del runner.cache.free_blocks[free:]
    before, told = sorted(runner.cache.free_blocks), [[] for _ in PROMPTS]
    try:
        result = step.generate(model, PROMPTS, LIMITS, runner=runner, on_token=lambda i, token: told[i].append(token))
        assert result == told
    except step.OutOfBlocks as error:
        result = error
        assert error.outputs == told
    assert sorted(runner.cache.free_blocks) == before
    runner.cache.free_blocks += held_back
    assert_idle(runner.cache)
    return result, runner


@pytest.mark.parametrize("free", range(ENOUGH + 1))
def test_every_number_of_free_blocks(step, load_tiny, free):
    """An error exactly when there are too few; what was produced is kept; then the same runner does it all."""
    model = load_tiny(step)
    needed = blocks_needed(step, PROMPTS, LIMITS, BLOCK_SIZE)
    assert 3 <= needed < ENOUGH
    expected = [greedy("llama", p, limit) for p, limit in zip(PROMPTS, LIMITS)]
    result, runner = outputs_with(step, model, free)
    if free >= needed:
        assert result == expected
    else:
        assert isinstance(result, step.OutOfBlocks)
        assert_clear(result, free)
        for output, ids in zip(result.outputs, expected):
            assert output == ids[: len(output)]
        assert sum(map(len, result.outputs)) < sum(LIMITS)
    poison(runner.cache, NAN)
    assert step.generate(model, PROMPTS, LIMITS, runner=runner) == expected
    assert_idle(runner.cache)


def test_more_blocks_never_give_fewer_tokens(step, load_tiny):
    """No block, no token; and a block more never loses a token that was there before."""
    counts = []
    for free in range(blocks_needed(step, PROMPTS, LIMITS, BLOCK_SIZE)):
        error, _ = outputs_with(step, load_tiny(step), free)
        counts.append(sum(map(len, error.outputs)))
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] > 0


def test_finished_requests_are_kept(step, load_tiny):
    """The first prompt is done when the others have used up the pool: its whole answer is in the error."""
    model = load_tiny(step)
    prompts, limits = [prompt(4, seed=31), prompt(6, seed=31)], [2, 40]
    runner = hostile_runner(step, model, num_blocks=6, block_size=BLOCK_SIZE)
    with pytest.raises(step.OutOfBlocks) as caught:
        step.generate(model, prompts, limits, runner=runner)
    first, second = caught.value.outputs
    assert first == greedy("llama", prompts[0], 2)
    # Six blocks hold 24 tokens: a prompt of 6 and 18 new ones, and the last new token needs no room.
    assert second == greedy("llama", prompts[1], 19)
    assert_idle(runner.cache)


def test_num_blocks_is_the_option(step, load_tiny):
    """`generate(num_blocks=...)` with exactly enough works; with one less it says what to raise."""
    model, needed = load_tiny(step), blocks_needed(step, PROMPTS, LIMITS, BLOCK_SIZE)
    expected = [greedy("llama", p, limit) for p, limit in zip(PROMPTS, LIMITS)]
    assert step.generate(model, PROMPTS, LIMITS, block_size=BLOCK_SIZE, num_blocks=needed) == expected
    for num_blocks in (needed - 1, 1):
        with pytest.raises(step.OutOfBlocks) as caught:
            step.generate(model, PROMPTS, LIMITS, block_size=BLOCK_SIZE, num_blocks=num_blocks)
        assert_clear(caught.value, num_blocks)


def test_a_prompt_that_does_not_fit(step, load_tiny):
    """`prefill` alone: the request is as if it had never come, and the live one goes on."""
    model, ids = load_tiny(step), prompt(6, seed=32)
    runner = hostile_runner(step, model, num_blocks=4, block_size=BLOCK_SIZE)
    cache = runner.cache
    prefill_logits(runner, "here", ids)
    free = sorted(cache.free_blocks)
    with pytest.raises(step.OutOfBlocks) as caught, torch.inference_mode():
        runner.prefill("too long", prompt(9, seed=32))
    assert (caught.value.needed, caught.value.free) == (3, 2)
    assert sorted(cache.free_blocks) == free
    assert not cache.block_tables.get("too long")
    row = decode_logits(runner, ["here"], greedy("llama", ids, 1))[0]
    torch.testing.assert_close(row, greedy_logits("llama", ids, 2)[1], rtol=0, atol=1e-4)


def test_decode_goes_on_once_there_is_room(step, load_tiny):
    """A decode step that found no block can be repeated when another request has left; no token is lost or doubled."""
    model = load_tiny(step)
    prompts = {"a": prompt(4, seed=33), "b": prompt(8, seed=33), "c": prompt(4, seed=33)}
    runner = hostile_runner(step, model, num_blocks=5, block_size=BLOCK_SIZE)
    cache = runner.cache
    for name, ids in prompts.items():
        prefill_logits(runner, name, ids)
    new = {name: greedy("llama", ids, 2) for name, ids in prompts.items()}
    # Every block is full: "a" can have the last free one, "b" none. Where requests are decoded one by one, "a" is done.
    order = ["a", "b"]
    with pytest.raises(step.OutOfBlocks) as caught, torch.inference_mode():
        decode(runner, order, [new[name][0] for name in order])
    assert (caught.value.needed, caught.value.free) == (1, 0)
    assert len(cache.free_blocks) + sum(map(len, cache.block_tables.values())) == cache.num_blocks
    again = [name for name in order if cache.seq_lens[name] == len(prompts[name])]
    assert again == (order if hasattr(runner, "decode_batch") else ["b"])
    cache.free("c")
    rows = decode_logits(runner, again, [new[name][0] for name in again])
    for name, row in zip(again, rows):
        torch.testing.assert_close(row, greedy_logits("llama", prompts[name], 2)[1], rtol=0, atol=1e-4)


def test_reserve_takes_all_or_nothing(step):
    """A reservation that cannot be met takes no block and makes no request; what can be met is, to the last block."""
    cache = step.PagedKVCache(KINDS["llama"].config(), 5, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    cache.reserve("a", 2 * BLOCK_SIZE)
    before = list(cache.block_tables["a"]), sorted(cache.free_blocks), cache.peak_blocks
    for request_id, needed, num_tokens in (("a", 4, 6 * BLOCK_SIZE), ("new", 4, 3 * BLOCK_SIZE + 1)):
        with pytest.raises(step.OutOfBlocks) as caught:
            cache.reserve(request_id, num_tokens)
        assert (caught.value.needed, caught.value.free) == (needed, 3)
        assert caught.value.outputs == []
        assert_clear(caught.value, 3)
        assert (list(cache.block_tables["a"]), sorted(cache.free_blocks), cache.peak_blocks) == before
        assert not cache.block_tables.get("new")
    cache.reserve("a", 5 * BLOCK_SIZE)
    assert cache.free_blocks == []
    assert sorted(cache.block_tables["a"]) == list(range(5))


def test_no_blocks_at_all(step, load_tiny):
    runner = step.ModelRunner(load_tiny(step), num_blocks=0, block_size=BLOCK_SIZE)
    with pytest.raises(step.OutOfBlocks) as caught:
        step.generate(load_tiny(step), [[1], [2]], 3, runner=runner)
    assert caught.value.outputs == [[], []]
    assert_clear(caught.value, 0)

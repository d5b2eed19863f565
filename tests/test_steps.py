"""The contract of every step: what transformers computes, for every model family, prompt length and block size.

Runners are hostile wherever a test makes its own: pools full of NaN, blocks handed out in a random order.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from contextlib import contextmanager

import pytest
import torch
import transformers

from tests import reference
from tests.drive import (
    NAN,
    assert_idle,
    blocks_needed,
    decode_logits,
    forced_logits,
    hostile_runner,
    poison,
    prefill_logits,
    recorded_logits,
)
from tests.reference import KINDS, VOCAB_SIZE, greedy, greedy_logits, prompt, until

# In float32, with logits of about 3: what is left is the order of summation.
TOLERANCE = {"rtol": 0, "atol": 1e-4}


def assert_logits(actual: list[torch.Tensor], kind: str, prompts: list[list[int]], limits: list[int]) -> None:
    for i, (prompt_ids, limit) in enumerate(zip(prompts, limits)):
        expected = greedy_logits(kind, prompt_ids, limit)
        torch.testing.assert_close(actual[i], expected, **TOLERANCE, msg=lambda m, i=i: f"prompt {i}: {m}")


def text(ids: list[int]) -> str:
    """Token ids as the text that a byte tokenizer makes of them."""
    return bytes(ids).decode("latin-1")


# --- equal to transformers ---


@pytest.mark.zoo
@pytest.mark.parametrize("kind", KINDS)
def test_equals_transformers(step, load_tiny, kind):
    """Mixed lengths in one call: logits at every position, greedy ids, text."""
    model = load_tiny(step, kind)
    prompts = [prompt(n) for n in (7, 1, 30, 4)]
    limits = [9, 9, 6, 9]
    expected = [greedy(kind, p, limit) for p, limit in zip(prompts, limits)]
    runner = hostile_runner(step, model, num_blocks=60, block_size=4)
    assert_logits(forced_logits(runner, prompts, expected), kind, prompts, limits)
    actual = step.generate(model, prompts, limits)
    assert actual == expected
    assert [text(ids) for ids in actual] == [text(ids) for ids in expected]
    assert all(type(token) is int for ids in actual for token in ids)


@pytest.mark.parametrize("kind", KINDS)
def test_model_without_a_cache(step, load_tiny, make_tiny, kind):
    """`model(ids)` is the decoder alone; its logits are the last position's, one row per sequence."""
    model, (_, hf) = load_tiny(step, kind), make_tiny(kind)
    ids = torch.tensor([prompt(40, seed=1), prompt(40, seed=2)])
    with torch.no_grad():
        logits = model(ids).logits
    assert logits.shape == (2, 1, VOCAB_SIZE)
    torch.testing.assert_close(logits, hf(ids, use_cache=False).logits[:, -1:], **TOLERANCE)
    assert not model.training


@pytest.mark.parametrize("kind", KINDS)
def test_weights_have_the_checkpoint_names(step, load_tiny, make_tiny, kind):
    model, (_, hf) = load_tiny(step, kind), make_tiny(kind)
    ours, theirs = ({name: t.shape for name, t in m.state_dict().items()} for m in (model, hf))
    assert ours == theirs
    tied = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert tied == KINDS[kind].settings["tie_word_embeddings"]


@pytest.mark.zoo
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_prompt_lengths_around_block_borders(step, load_tiny, block_size):
    """One token to more than three blocks, exactly full blocks included, and on across the next borders."""
    model = load_tiny(step)
    lengths = sorted({1, block_size - 1, block_size, block_size + 1, 3 * block_size + 5} - {0})
    prompts, limits = [prompt(n, seed=block_size) for n in lengths], [6] * len(lengths)
    expected = [greedy("llama", p, 6) for p in prompts]
    runner = hostile_runner(step, model, sum(lengths) + 6 * len(lengths), block_size)
    assert_logits(forced_logits(runner, prompts, expected), "llama", prompts, limits)
    assert step.generate(model, prompts, 6, block_size=block_size) == expected


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 16, 17])
def test_one_prompt_alone(step, load_tiny, block_size, length):
    """A batch of one, without any padding."""
    model, ids = load_tiny(step, "qwen2"), prompt(length, seed=3)
    assert step.generate(model, [ids], 5, block_size=block_size) == [greedy("qwen2", ids, 5)]


def test_many_prompts(step, load_tiny):
    """More prompts than anything else here has, equal ones among them."""
    prompts = [prompt(1 + i % 9, seed=4 + i % 5) for i in range(24)]
    assert step.generate(load_tiny(step), prompts, 3, block_size=4) == [greedy("llama", p, 3) for p in prompts]


def test_positions_up_to_the_last(step, load_tiny):
    """A prompt and its new tokens may fill all of max_position_embeddings."""
    ids = prompt(reference.MAX_POSITIONS - 4, seed=5)
    assert step.generate(load_tiny(step, "llama3"), [ids, [7]], 4) == [
        greedy("llama3", ids, 4),
        greedy("llama3", [7], 4),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(step, make_tiny, dtype):
    """Pools have the model's dtype. Below float32, ids may differ from transformers': the logits must be near."""
    folder, _ = make_tiny("qwen3")
    model = step.load_model(folder, dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    runner = hostile_runner(step, model, num_blocks=8, block_size=4)
    assert runner.cache.k_pools[0].dtype == runner.cache.v_pools[0].dtype == dtype
    ids, new = prompt(6, seed=6), greedy("qwen3", prompt(6, seed=6), 4)
    (logits,) = forced_logits(runner, [ids], [new])
    expected = greedy_logits("qwen3", ids, 4)
    # Logits of about 3, rounded to 8 bits in bfloat16 and 11 in float16 at every operation of two layers.
    atol = {torch.bfloat16: 0.25, torch.float16: 0.03}.get(dtype, 1e-4)
    torch.testing.assert_close(logits.float(), expected, rtol=0, atol=atol)


def test_build_model_is_seeded(step):
    """`build_model` takes a config and no folder; the same seed gives the same decoder."""
    config = KINDS["qwen2"].config()
    models = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        models.append(step.build_model(config))
    outputs = [step.generate(model, [prompt(5)], 8) for model in models]
    assert outputs[0] == outputs[1]
    assert not torch.equal(models[0].lm_head.weight, models[2].lm_head.weight)
    assert not models[0].training
    assert models[0].config is config


def takes_transformers_models(step) -> bool:
    """Since transformers 5 a model takes its history only as a Cache; a step that hands over tuples drives none."""
    return hasattr(step, "DynamicCache") or issubclass(step.PagedKVCache, transformers.Cache)


@contextmanager
def silence():
    """Fails when anything inside warns or when transformers logs a line."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    # A line logged once per process may have been logged before.
    transformers.utils.logging.warning_once.cache_clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        logger.removeHandler(handler)
    assert lines == []


@pytest.mark.parametrize("kind", KINDS)
def test_drives_a_transformers_model(step, make_tiny, kind):
    """A real transformers model in place of our decoder, driven from the same pool, without a warning."""
    if not takes_transformers_models(step):
        pytest.skip("this step hands the history over as a tuple, which transformers no longer takes")
    _, hf = make_tiny(kind)
    prompts, limits = [prompt(n, seed=7) for n in (9, 2, 5)], [5, 5, 3]
    expected = [greedy(kind, p, limit) for p, limit in zip(prompts, limits)]
    with silence():
        runner = hostile_runner(step, hf, num_blocks=20, block_size=4)
        assert_logits(forced_logits(runner, prompts, expected), kind, prompts, limits)
        assert step.generate(hf, prompts, limits) == expected


def test_generates_in_silence(step, load_tiny):
    """No warning and no line in a log, from transformers or torch."""
    with silence():
        step.generate(load_tiny(step), [prompt(5), prompt(3)], 4)


# --- ending ---


@pytest.mark.zoo
def test_one_request_ends_early(step, load_tiny):
    """Each prompt has its own max_new_tokens; who is done leaves, and the others go on as if alone."""
    prompts, limits = [prompt(n, seed=8) for n in (6, 11, 3, 8)], [4, 1, 12, 7]
    expected = [greedy("llama", p, limit) for p, limit in zip(prompts, limits)]
    runner = hostile_runner(step, load_tiny(step), num_blocks=24, block_size=4)
    assert step.generate(load_tiny(step), prompts, limits, runner=runner) == expected
    assert_idle(runner.cache)


@pytest.mark.zoo
def test_blocks_come_back_at_once(step, load_tiny):
    """From the last token of a request on, none of its blocks is in use, while the others still run."""
    model, limits = load_tiny(step), [4, 1, 12, 7]
    prompts = [prompt(n, seed=8) for n in (6, 11, 3, 8)]
    runner = hostile_runner(step, model, num_blocks=24, block_size=4)
    finished, counts = set(), [0] * len(prompts)

    def on_token(index, token):
        assert not finished & runner.cache.block_tables.keys()
        held = sum(len(table) for table in runner.cache.block_tables.values())
        assert held + len(runner.cache.free_blocks) == runner.cache.num_blocks
        counts[index] += 1
        if counts[index] == limits[index]:
            finished.add(index)

    step.generate(model, prompts, limits, runner=runner, on_token=on_token)
    assert finished == {0, 1, 2, 3}


@pytest.mark.zoo
@pytest.mark.parametrize("shape", [int, lambda t: [t], lambda t: {t, VOCAB_SIZE}, lambda t: (VOCAB_SIZE, t)])
@pytest.mark.parametrize("place", [0, 1, 5], ids="token {}".format)
def test_eos_ends_a_request(step, load_tiny, shape, place):
    """`eos_token_id` is one id or several; the one that ends a request is its last token."""
    prompts = [prompt(n, seed=9) for n in (5, 2, 9)]
    unlimited = [greedy("llama", p, 8) for p in prompts]
    eos = unlimited[1][place]
    expected = [until(ids, {eos}) for ids in unlimited]
    assert expected[1][-1] == eos
    runner = hostile_runner(step, load_tiny(step), num_blocks=24, block_size=4)
    assert step.generate(load_tiny(step), prompts, 8, eos_token_id=shape(eos), runner=runner) == expected
    assert_idle(runner.cache)


@pytest.mark.zoo
def test_several_eos_tokens(step, load_tiny):
    """Each of several ids ends a request, token id 0 too."""
    prompts = [prompt(n, seed=10) for n in (5, 2, 9)]
    unlimited = [greedy("qwen2", p, 8) for p in prompts]
    stop = {unlimited[0][2], unlimited[2][4], 0}
    expected = [until(ids, stop) for ids in unlimited]
    assert [len(ids) for ids in expected] != [8, 8, 8]
    assert step.generate(load_tiny(step, "qwen2"), prompts, 8, eos_token_id=sorted(stop)) == expected


@pytest.mark.zoo
def test_eos_token_zero(step, load_tiny):
    """Token id 0 is a token like any other."""
    model = step.build_model(KINDS["llama"].config(tie_word_embeddings=False))
    model.lm_head.weight.zero_()  # all logits equal: the first id is the greatest
    assert step.generate(model, [prompt(3)], 4) == [[0] * 4]
    assert step.generate(model, [prompt(3)], 4, eos_token_id=0) == [[0]]


# --- on_token ---


@pytest.mark.zoo
def test_on_token_is_called_as_soon_as_a_token_is_chosen(step, load_tiny):
    """Every call of the model is followed by one token per row before the next call, and nothing is told twice."""
    model = load_tiny(step)
    prompts, limits = [prompt(n, seed=11) for n in (4, 9, 2)], [5, 2, 4]
    told, waiting = [[] for _ in prompts], []

    def count_rows(module, args, out):
        assert waiting == []
        waiting.extend(range(len(out.logits)))

    def on_token(index, token):
        waiting.pop()
        told[index].append(token)

    hook = model.register_forward_hook(count_rows)
    try:
        outputs = step.generate(model, prompts, limits, on_token=on_token)
    finally:
        hook.remove()
    assert waiting == []
    assert told == outputs == [greedy("llama", p, limit) for p, limit in zip(prompts, limits)]


def test_an_error_in_on_token_leaves_the_runner_usable(step, load_tiny):
    """Whatever stops a call, a Ctrl-C too, gives every block back."""
    model, prompts = load_tiny(step), [prompt(6), prompt(3)]
    runner = hostile_runner(step, model, num_blocks=16, block_size=4)
    told = []

    def on_token(index, token):
        told.append(token)
        if len(told) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        step.generate(model, prompts, 6, runner=runner, on_token=on_token)
    assert_idle(runner.cache)
    assert step.generate(model, prompts, 6, runner=runner) == [greedy("llama", p, 6) for p in prompts]


# --- one runner, many requests ---


@pytest.mark.zoo
@pytest.mark.parametrize("value", [NAN, float("inf"), 1e4])
def test_runner_is_used_again(step, load_tiny, value):
    """Blocks left by earlier calls hold rubbish and come in another order: nothing of it is seen."""
    model = load_tiny(step)
    runner = hostile_runner(step, model, num_blocks=22, block_size=4, seed=1)
    for seed in (12, 13, 14):
        prompts = [prompt(n, seed) for n in (5, 17, 1, 8)]
        limits = [3 + seed % 4, 6, 2, 7]
        outputs = step.generate(model, prompts, limits, runner=runner)
        assert outputs == [greedy("llama", p, limit) for p, limit in zip(prompts, limits)]
        assert_idle(runner.cache)
        poison(runner.cache, value)


def test_a_runner_brings_its_own_block_size(step, load_tiny):
    """The cache of a runner that is passed in is the one that is used."""
    model, prompts = load_tiny(step), [prompt(9), prompt(4)]
    runner = step.ModelRunner(model, num_blocks=7, block_size=3)
    cache = runner.cache
    assert (cache.block_size, cache.num_blocks, len(cache.free_blocks)) == (3, 7, 7)
    assert step.generate(model, prompts, 4, runner=runner) == [greedy("llama", p, 4) for p in prompts]
    assert runner.cache is cache
    assert cache.peak_blocks == blocks_needed(step, prompts, [4, 4], 3)


@pytest.mark.zoo
@pytest.mark.parametrize("value", [NAN, float("inf"), 1e4])
@pytest.mark.parametrize("length", [3, 21])
def test_logits_do_not_depend_on_neighbours(step, load_tiny, length, value):
    """Alone, beside shorter and longer requests, and beside one whose own history is rubbish: the same logits."""
    model, ids, new = load_tiny(step), prompt(length, seed=15), greedy("llama", prompt(length, seed=15), 6)
    (alone,) = forced_logits(hostile_runner(step, model, 20, 4), [ids], [new])

    runner = hostile_runner(step, model, 40, 4, seed=2)
    others = {"short": prompt(2, seed=16), "long": prompt(30, seed=16)}
    for name, other in others.items():
        prefill_logits(runner, name, other)
    together = [prefill_logits(runner, "mine", ids)]
    order = ["short", "mine", "long"]
    for i, token in enumerate(new[:-1]):
        if i == 2:  # from now on the neighbours' histories are not finite, or far too large
            for name in others:
                poison(runner.cache, value, runner.cache.block_tables[name])
        with torch.inference_mode(), recorded_logits(model) as calls:
            if hasattr(runner, "decode_batch"):
                runner.decode_batch(order, [5, token, 6])
            else:
                for name, t in zip(order, [5, token, 6]):
                    runner.decode(name, t)
        together.append(torch.cat(calls)[1])
    torch.testing.assert_close(torch.stack(together), alone, rtol=0, atol=1e-5)


@pytest.mark.zoo
def test_requests_of_any_name_in_any_order(step, load_tiny):
    """Request ids are only names: a batch may hold any of the live requests, in any order, and a name may come back."""
    model = load_tiny(step)
    runner = hostile_runner(step, model, num_blocks=30, block_size=4, seed=3)
    prompts = {"b": prompt(7, seed=17), 5: prompt(4, seed=17), ("x", 1): prompt(12, seed=17)}
    logits = {name: [prefill_logits(runner, name, ids)] for name, ids in prompts.items()}
    new = {name: greedy("llama", ids, 5) for name, ids in prompts.items()}
    for batch in (["b", 5, ("x", 1)], [("x", 1), "b"], [5], [5, ("x", 1), "b"]):
        rows = decode_logits(runner, batch, [new[name][len(logits[name]) - 1] for name in batch])
        for name, row in zip(batch, rows):
            logits[name].append(row)
    for name, ids in prompts.items():
        count = len(logits[name])
        torch.testing.assert_close(torch.stack(logits[name]), greedy_logits("llama", ids, 5)[:count], **TOLERANCE)
    runner.cache.free("b")
    assert int(prefill_logits(runner, "b", prompts[5]).argmax()) == new[5][0]


def test_a_request_of_the_caller_survives_generate(step, load_tiny):
    """`generate` on a runner that holds another request leaves that one alone."""
    model, ids = load_tiny(step), prompt(6, seed=18)
    runner = hostile_runner(step, model, num_blocks=30, block_size=4, seed=4)
    expected = greedy_logits("llama", ids, 3)
    prefill_logits(runner, "keep", ids)
    for _ in range(2):
        prompts = [prompt(9, seed=19), prompt(2, seed=19)]
        assert step.generate(model, prompts, 5, runner=runner) == [greedy("llama", p, 5) for p in prompts]
        poison(runner.cache, blocks=runner.cache.free_blocks)
    assert list(runner.cache.block_tables) == list(runner.cache.seq_lens) == ["keep"]
    new = greedy("llama", ids, 3)
    for i in (1, 2):
        row = decode_logits(runner, ["keep"], [new[i - 1]])[0]
        torch.testing.assert_close(row, expected[i], **TOLERANCE)


# --- what a call takes ---


@pytest.mark.zoo
def test_peak_blocks(step, load_tiny):
    """`num_blocks=None` is enough, no request ever holds more blocks than its tokens fill, and the peak stays known."""
    model = load_tiny(step)
    for lengths, limits in (
        ([6, 11, 3, 8], [4, 1, 12, 7]),
        ([4], [1]),
        ([4], [2]),
        ([8, 8], [5, 9]),
        ([17, 2], [6, 3]),
    ):
        prompts = [prompt(n, seed=20) for n in lengths]
        runner = step.ModelRunner(model, num_blocks=40, block_size=4)
        step.generate(model, prompts, limits, runner=runner)
        assert runner.cache.peak_blocks == blocks_needed(step, prompts, limits, 4)
        assert step.generate(model, prompts, limits, block_size=4) == [
            greedy("llama", p, limit) for p, limit in zip(prompts, limits)
        ]


def test_no_prompts(step, load_tiny):
    assert step.generate(load_tiny(step), [], 5) == []
    assert step.generate(load_tiny(step), [], []) == []


BAD_CALLS = {
    "empty prompt": ({"prompts": [[1, 2], []]}, "empty"),
    "negative token id": ({"prompts": [[1, -1]]}, "token id"),
    "token id beyond the vocabulary": ({"prompts": [[1, VOCAB_SIZE]]}, "token id"),
    "no new tokens": ({"max_new_tokens": 0}, "max_new_tokens"),
    "negative number of new tokens": ({"max_new_tokens": -3}, "max_new_tokens"),
    "no new tokens for one prompt": ({"prompts": [[1], [2]], "max_new_tokens": [3, 0]}, "max_new_tokens"),
    "too few limits": ({"prompts": [[1], [2]], "max_new_tokens": [3]}, "max_new_tokens"),
    "too many limits": ({"prompts": [[1]], "max_new_tokens": [3, 3]}, "max_new_tokens"),
    "prompt too long": ({"prompts": [[1] * reference.MAX_POSITIONS]}, str(reference.MAX_POSITIONS)),
    "too long with its new tokens": ({"max_new_tokens": reference.MAX_POSITIONS - 1}, str(reference.MAX_POSITIONS)),
    "block size zero": ({"block_size": 0}, "block_size"),
    "negative block size": ({"block_size": -16}, "block_size"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_calls(step, load_tiny, case):
    """One line that names what was wrong, before the model has run."""
    changes, words = BAD_CALLS[case]
    call = {"prompts": [[1, 2]], "max_new_tokens": 4, **changes}
    with recorded_logits(load_tiny(step)) as calls, pytest.raises(ValueError) as error:
        step.generate(load_tiny(step), **call)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert not calls


@pytest.mark.parametrize("case", ["empty prompt", "token id beyond the vocabulary", "prompt too long", "no new tokens"])
def test_bad_calls_leave_the_runner_usable(step, load_tiny, case):
    model, good = load_tiny(step), prompt(5)
    runner = hostile_runner(step, model, num_blocks=8, block_size=4)
    call = {"prompts": [good], "max_new_tokens": 4, **BAD_CALLS[case][0]}
    with pytest.raises(ValueError):
        step.generate(model, **call, runner=runner)
    assert_idle(runner.cache)
    assert step.generate(model, [good], 4, runner=runner) == [greedy("llama", good, 4)]


SIGNATURES = {
    "write_kv_to_pool": "(k_pool, v_pool, k, v, block_table, start_pos)",
    "read_kv_from_pool": "(k_pool, v_pool, block_table, seq_len)",
    "gather_batch_kv": "(k_pools, v_pools, block_tables, seq_lens)",
    "write_slots": "(k_pool, v_pool, k, v, slot_mapping)",
    "read_slots": "(k_pool, v_pool, slots)",
    "paged_attention": "(q, k_pool, v_pool, block_tables, seq_lens, scale)",
    "load_model": "(path, device='cpu', dtype=torch.float32)",
    "build_model": "(config)",
    "generate": "(model, prompts, max_new_tokens, *, block_size=16, num_blocks=None, eos_token_id=None, runner=None, "
    "on_token=None)",
    "self_check": "()",
    "ModelRunner": "(model, *, num_blocks, block_size=16)",
    "ModelRunner.prefill": "(self, request_id, prompt)",
    "ModelRunner.decode": "(self, request_id, token)",
    "ModelRunner.decode_batch": "(self, request_ids, tokens)",
    "PagedKVCache": "(config, num_blocks, block_size, dtype, device)",
    "PagedKVCache.reserve": "(self, request_id, num_tokens)",
    "PagedKVCache.write": "(self, request_id, past_key_values)",
    "PagedKVCache.read": "(self, request_id)",
    "PagedKVCache.gather": "(self, request_ids)",
    "PagedKVCache.begin_step": "(self, request_ids, num_tokens)",
    "PagedKVCache.end_step": "(self)",
    "PagedKVCache.free": "(self, request_id)",
}
ALWAYS = {"load_model", "build_model", "generate", "self_check", "ModelRunner", "ModelRunner.prefill"}
ALWAYS |= {"PagedKVCache", "PagedKVCache.reserve", "PagedKVCache.free"}


def test_signatures(step):
    """Names and parameters are the same as long as they exist: what is written for one step runs on the next."""
    found = {}
    for name, expected in SIGNATURES.items():
        owner, _, method = name.partition(".")
        thing = getattr(step, owner, None)
        thing = vars(thing).get(method) if thing is not None and method else thing
        if thing is not None:
            found[name] = str(inspect.signature(thing))
            assert found[name] == expected, name
    assert found.keys() >= ALWAYS
    assert ("ModelRunner.decode" in found) != ("ModelRunner.decode_batch" in found)
    assert issubclass(step.OutOfBlocks, RuntimeError)

"""Any order of events, any shape: the cache against a dictionary of dense tensors, and paged against dense attention.

hypothesis makes the cases up. They are the same in every run, and a failing one is reduced to the smallest that fails.
"""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from tests.drive import NAN, assert_idle, forced_logits, hostile_runner, poison
from tests.reference import DenseKV
from tests.test_slots import append, assert_holds, assert_reads, assert_same, flat, read, slots_of, write

# No example takes long, but on a busy machine any may: nothing here depends on time.
REPEATABLE = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))

DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
BLOCK_SIZES = st.sampled_from([1, 2, 3, 4, 7, 16])


# --- the cache, event by event ---


class CacheMachine(RuleBasedStateMachine):
    """Requests come, grow one by one or together, and go, in a small pool that is often full. `step` is set below."""

    step = None
    requests = Bundle("requests")

    @initialize(
        block_size=BLOCK_SIZES, num_blocks=st.integers(1, 12), dtype=DTYPES, order=st.randoms(use_true_random=False)
    )
    def make(self, block_size, num_blocks, dtype, order):
        config = LlamaConfig(
            hidden_size=12, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=3, head_dim=4
        )
        self.cache = self.step.PagedKVCache(config, num_blocks, block_size, dtype, torch.device("cpu"))
        poison(self.cache)
        order.shuffle(self.cache.free_blocks)
        self.dense = DenseKV(2, 3, 4, dtype)
        self.dtype, self.count = dtype, 0

    def new_layers(self, batch, num_tokens):
        """Numbers that occur nowhere else in the run: per layer (k, v) [batch, 3, num_tokens, 4]."""
        self.count += 1
        generator = torch.Generator().manual_seed(self.count)
        numbers = torch.randn(2, 2, batch, 3, num_tokens, 4, generator=generator).to(self.dtype)
        return [tuple(layer) for layer in numbers]

    def blocks_for(self, request_id, num_tokens):
        """How many blocks the request lacks for so many tokens more."""
        length = self.dense.seq_len(request_id) if request_id in self.dense.layers else 0
        return -(-(length + num_tokens) // self.cache.block_size) - -(-length // self.cache.block_size)

    def add(self, request_ids, num_tokens):
        """Append to these requests; if the pool is too small for the first, nothing may change. True if it was done."""
        needed = sum(self.blocks_for(request_id, num_tokens) for request_id in request_ids)
        free = len(self.cache.free_blocks)
        if needed <= free:
            new = self.new_layers(len(request_ids), num_tokens)
            append(self.cache, request_ids, new)
            for b, request_id in enumerate(request_ids):
                self.dense.append(request_id, [(k[b].transpose(0, 1), v[b].transpose(0, 1)) for k, v in new])
            return True
        needed = self.blocks_for(request_ids[0], num_tokens)
        if needed > free:
            try:
                self.cache.reserve(request_ids[0], num_tokens)
            except self.step.OutOfBlocks as error:
                assert (error.needed, error.free) == (needed, free)
            else:
                raise AssertionError(f"{needed} blocks out of {free}")
        return False

    @rule(target=requests, num_tokens=st.integers(1, 20))
    def start(self, num_tokens):
        name = f"request {self.count}"
        return name if self.add([name], num_tokens) else multiple()

    @rule(request=requests, num_tokens=st.integers(1, 9))
    def grow(self, request, num_tokens):
        self.add([request], num_tokens)

    @rule(data=st.data())
    def grow_together(self, data):
        live = sorted(self.dense.layers)
        if live:
            self.add(data.draw(st.lists(st.sampled_from(live), min_size=1, unique=True)), 1)

    @rule(request=consumes(requests), value=st.sampled_from([NAN, 1e4]))
    def finish(self, request, value):
        blocks = list(self.cache.block_tables[request])
        self.cache.free(request)
        self.dense.free(request)
        poison(self.cache, value, blocks)

    @invariant()
    def holds(self):
        if hasattr(self, "dense"):
            assert_holds(self.cache, self.dense)

    @rule(data=st.data())
    def read_some(self, data):
        live = sorted(self.dense.layers)
        if live:
            assert_reads(self.cache, self.dense, data.draw(st.lists(st.sampled_from(live), min_size=1, unique=True)))

    def teardown(self):
        if hasattr(self, "dense"):
            for request in list(self.dense.layers):
                self.cache.free(request)
            assert_idle(self.cache)


def test_any_order_of_events(step):
    machine = type("Machine", (CacheMachine,), {"step": step})
    run_state_machine_as_test(machine, settings=settings(REPEATABLE, max_examples=30, stateful_step_count=25))


# --- the functions under study ---


@settings(REPEATABLE, max_examples=40)
@given(
    block_size=BLOCK_SIZES,
    start=st.integers(0, 20),
    num_tokens=st.integers(1, 25),
    heads=st.integers(1, 4),
    head_dim=st.integers(1, 9),
    dtype=DTYPES,
    random=st.randoms(use_true_random=False),
)
def check_copies(step, block_size, start, num_tokens, heads, head_dim, dtype, random):
    length = start + num_tokens
    num_blocks = -(-length // block_size) + 3
    table = random.sample(range(num_blocks), num_blocks - 3)
    shape = (num_blocks, block_size, heads, head_dim)
    pools = [torch.full(shape, NAN, dtype=dtype) for _ in "kv"]
    k, v = torch.randn(2, length, heads, head_dim, generator=torch.Generator().manual_seed(length)).to(dtype)
    if start:
        write(step, *pools, k[:start], v[:start], table, 0)
    write(step, *pools, k[start:], v[start:], table, start)
    for got, expected in zip(read(step, *pools, table, length), (k, v)):
        assert_same(got, expected)
    used = flat(slots_of(table, block_size, 0, length), block_size)
    for pool, expected in zip(pools, (k, v)):
        rows = pool.view(-1, heads, head_dim)
        assert_same(rows[used], expected)
        rows[used] = NAN
        assert rows.isnan().all()


def test_copies_of_any_shape(step):
    """What is written comes back bit by bit, in any dtype, and no other slot is touched."""
    check_copies(step)


# --- the whole model ---

# Two runs of one model in one dtype that add up in another order: error over the largest logit, or over 1 if that is
# smaller. A few units in the last place, ten times what was seen.
CLOSE = {torch.float32: 2e-6, torch.float16: 5e-3, torch.bfloat16: 3e-2}


@st.composite
def configs(draw):
    kv_heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    config_class = draw(st.sampled_from([LlamaConfig, Qwen2Config, Qwen3Config]))
    return config_class(
        vocab_size=draw(st.integers(2, 60)),
        hidden_size=kv_heads * groups * draw(st.integers(1, 8)),  # LlamaConfig wants a multiple
        intermediate_size=draw(st.integers(1, 40)),
        num_hidden_layers=draw(st.integers(1, 3)),
        num_attention_heads=kv_heads * groups,
        num_key_value_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 12)),
        max_position_embeddings=64,
        tie_word_embeddings=draw(st.booleans()),
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


@settings(REPEATABLE, max_examples=20)
@given(
    config=configs(),
    dtype=DTYPES,
    block_size=BLOCK_SIZES,
    lengths=st.lists(st.tuples(st.integers(1, 24), st.integers(1, 6)), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def check_attention(step, config, dtype, block_size, lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = step.build_model(config).to(dtype)
    texts = [torch.randint(config.vocab_size, (n + new,), generator=generator).tolist() for n, new in lengths]
    runner = hostile_runner(step, model, sum(-(-len(ids) // block_size) for ids in texts), block_size, seed)
    paged = forced_logits(
        runner, [ids[:n] for ids, (n, _) in zip(texts, lengths)], [ids[n:] for ids, (n, _) in zip(texts, lengths)]
    )
    assert_idle(runner.cache)
    for ids, (n, new), logits in zip(texts, lengths, paged):
        dense = torch.stack([model(torch.tensor([ids[: n + i]])).logits[0, -1] for i in range(new)])
        assert logits.dtype == dtype
        error, scale = (logits.float() - dense.float()).abs().max(), dense.float().abs().max().clamp(min=1)
        assert error <= CLOSE[dtype] * scale


def test_attention_of_any_shape(step):
    """Decoding from the blocks gives the logits that running the whole sequence without a cache gives."""
    check_attention(step)


# --- what no pool in a test is large enough for ---


@pytest.mark.zoo
@pytest.mark.having("write_slots")
def test_slots_beyond_32_bits(step):
    """Flat slot ids of a block far out: `begin_step` computes them without touching the pool."""
    config = LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=8)
    cache = step.PagedKVCache(config, 2, 16, torch.float32, torch.device("cpu"))
    block = 2**28 + 5
    cache.free_blocks[:] = [block]
    cache.begin_step(["a"], 7)
    assert cache.slot_mapping.tolist() == [block * 16 + i for i in range(7)]

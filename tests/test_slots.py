"""Where keys and values go and come from: the functions under study and the cache around them, without a model.

Copies are compared bit by bit. Block tables are shuffled and have holes, pools start full of NaN, and every slot
that should not have been touched is looked at too.
"""

from __future__ import annotations

import random
from itertools import chain

import pytest
import torch

from tests.drive import NAN, assert_idle, poison
from tests.reference import KINDS, DenseKV

pytestmark = pytest.mark.zoo

NUM_BLOCKS, NUM_KV_HEADS, HEAD_DIM = 13, 3, 8


def new_pools(block_size, num_layers=1, dtype=torch.float32, value=NAN):
    shape = (num_layers, NUM_BLOCKS, block_size, NUM_KV_HEADS, HEAD_DIM)
    return torch.full(shape, value, dtype=dtype), torch.full(shape, value, dtype=dtype)


def new_tokens(num_tokens, seed=0, dtype=torch.float32):
    """Different k and v [num_tokens, num_kv_heads, head_dim], in memory as attention hands them over: heads first."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, NUM_KV_HEADS, num_tokens, HEAD_DIM)
    k, v = torch.randn(shape, generator=generator).to(dtype).transpose(1, 2)
    return k, v


def shuffled_table(block_size, num_tokens, seed=0, spare=1):
    """A block table for num_tokens with `spare` blocks more than they fill, in no order, with unused blocks between."""
    return random.Random(seed).sample(range(NUM_BLOCKS), -(-num_tokens // block_size) + spare)


def slots_of(block_table, block_size, start, stop):
    """(block, slot) of each position from start to stop, written out the slow way."""
    return [(block_table[i // block_size], i % block_size) for i in range(start, stop)]


def flat(slots, block_size):
    return torch.tensor([block * block_size + slot for block, slot in slots], dtype=torch.int64)


def write(step, k_pool, v_pool, k, v, block_table, start_pos):
    """The step's own write."""
    if hasattr(step, "write_kv_to_pool"):
        step.write_kv_to_pool(k_pool, v_pool, k, v, block_table, start_pos)
    else:
        block_size = k_pool.shape[1]
        slots = slots_of(block_table, block_size, start_pos, start_pos + len(k))
        step.write_slots(k_pool, v_pool, k, v, flat(slots, block_size))


def read(step, k_pool, v_pool, block_table, seq_len):
    """One request's history by the step's own read, k and v [seq_len, num_kv_heads, head_dim]."""
    if hasattr(step, "read_kv_from_pool"):
        return step.read_kv_from_pool(k_pool, v_pool, block_table, seq_len)
    if hasattr(step, "gather_batch_kv"):
        ((k, v),) = step.gather_batch_kv([k_pool], [v_pool], [block_table], [seq_len])
        return k[0].transpose(0, 1), v[0].transpose(0, 1)
    block_size = k_pool.shape[1]
    return step.read_slots(k_pool, v_pool, flat(slots_of(block_table, block_size, 0, seq_len), block_size))


def assert_same(actual, expected):
    """Equal bit by bit, NaN included."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def around(block_size):
    return sorted({1, block_size - 1, block_size, block_size + 1, 3 * block_size + 5} - {0})


# --- write ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_write_touches_its_own_slots_only(step, block_size, dtype):
    """From any start, within a block and across borders, into a table in no order."""
    for start in (0, 1, block_size - 1, block_size, block_size + 1):
        for num_tokens in around(block_size):
            table = shuffled_table(block_size, start + num_tokens, seed=start)
            k_pools, v_pools = new_pools(block_size, dtype=dtype)
            k, v = new_tokens(num_tokens, seed=num_tokens, dtype=dtype)
            expected = new_pools(block_size, dtype=dtype)
            for i, (block, slot) in enumerate(slots_of(table, block_size, start, start + num_tokens)):
                expected[0][0, block, slot], expected[1][0, block, slot] = k[i], v[i]
            write(step, k_pools[0], v_pools[0], k, v, table, start)
            assert_same(k_pools, expected[0])
            assert_same(v_pools, expected[1])


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_write_appends(step, block_size):
    """A prompt and then one token at a time is the same as all at once."""
    num_tokens = 2 * block_size + 3
    table = shuffled_table(block_size, num_tokens, seed=1)
    k, v = new_tokens(num_tokens)
    at_once, one_by_one = new_pools(block_size), new_pools(block_size)
    write(step, at_once[0][0], at_once[1][0], k, v, table, 0)
    prompt = block_size + 1
    write(step, one_by_one[0][0], one_by_one[1][0], k[:prompt], v[:prompt], table, 0)
    for i in range(prompt, num_tokens):
        write(step, one_by_one[0][0], one_by_one[1][0], k[i : i + 1], v[i : i + 1], table, i)
    assert_same(one_by_one[0], at_once[0])
    assert_same(one_by_one[1], at_once[1])


def test_write_keeps_what_was_there(step):
    """Another request's blocks, and the earlier tokens of the block that is filled up, stay as they are."""
    k_pools, v_pools = new_pools(4, value=7.0)
    k, v = new_tokens(2)
    write(step, k_pools[0], v_pools[0], k, v, [5, 2], 3)
    untouched = torch.ones(NUM_BLOCKS, 4, dtype=torch.bool)
    untouched[5, 3] = untouched[2, 0] = False
    for pool, new in ((k_pools[0], k), (v_pools[0], v)):
        assert (pool[untouched] == 7).all()
        assert_same(torch.stack((pool[5, 3], pool[2, 0])), new)


# --- read ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_read_returns_the_history_in_order(step, block_size, dtype):
    """Not a token more, whatever lies behind it in the last block, in spare blocks and elsewhere."""
    for seq_len in around(block_size):
        table = shuffled_table(block_size, seq_len, seed=seq_len)
        (k_pools, v_pools), (k, v) = new_pools(block_size, dtype=dtype), new_tokens(seq_len, dtype=dtype)
        for i, (block, slot) in enumerate(slots_of(table, block_size, 0, seq_len)):
            k_pools[0, block, slot], v_pools[0, block, slot] = k[i], v[i]
        read_k, read_v = read(step, k_pools[0], v_pools[0], table, seq_len)
        assert_same(read_k, k)
        assert_same(read_v, v)


def test_read_is_a_copy(step):
    """What is read stays as it was when the pool is written again."""
    k_pools, v_pools = new_pools(4, value=1.0)
    k, v = read(step, k_pools[0], v_pools[0], [3], 4)
    k_pools.fill_(2.0)
    v_pools.fill_(2.0)
    assert (k == 1).all()
    assert (v == 1).all()


# --- gather ---


def batch_in_pools(block_size, seq_lens, num_layers=3, dtype=torch.float32):
    """Pools, block tables and the dense reference of requests whose blocks lie in between each other."""
    pools = new_pools(block_size, num_layers, dtype)
    blocks = random.Random(block_size).sample(range(NUM_BLOCKS), NUM_BLOCKS)
    dense, tables = DenseKV(num_layers, NUM_KV_HEADS, HEAD_DIM, dtype), []
    for request_id, seq_len in enumerate(seq_lens):
        tables.append([blocks.pop() for _ in range(-(-seq_len // block_size))])
        new = [new_tokens(seq_len, seed=100 * layer + request_id, dtype=dtype) for layer in range(num_layers)]
        dense.append(request_id, new)
        for layer, (k, v) in enumerate(new):
            for i, (block, slot) in enumerate(slots_of(tables[-1], block_size, 0, seq_len)):
                pools[0][layer, block, slot], pools[1][layer, block, slot] = k[i], v[i]
    return pools, tables, dense


@pytest.mark.having("gather_batch_kv")
@pytest.mark.parametrize("as_list", [False, True], ids=["tensor", "list"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_gather_pads_on_the_left(step, block_size, dtype, as_list):
    """Uneven lengths, tables of uneven length; pools given as one tensor or as a list of one per layer."""
    seq_lens = [1, 3, 5] if block_size == 1 else [block_size + 1, 1, 3 * block_size, block_size - 1]
    (k_pools, v_pools), tables, dense = batch_in_pools(block_size, seq_lens, dtype=dtype)
    before = k_pools.clone(), v_pools.clone()
    pools = (list(k_pools), list(v_pools)) if as_list else (k_pools, v_pools)
    gathered = step.gather_batch_kv(*pools, tables, seq_lens)
    assert len(gathered) == len(k_pools)
    for (k, v), (expected_k, expected_v) in zip(gathered, dense.batch(range(len(seq_lens)))):
        assert_same(k, expected_k)
        assert_same(v, expected_v)
    assert_same(k_pools, before[0])
    assert_same(v_pools, before[1])


@pytest.mark.having("gather_batch_kv")
@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf"), 1e30])
def test_padding_is_zero_whatever_it_reads(step, value):
    """Padding may read any slot on its way to zero, the first of a request or of the pool too: none may show."""
    seq_lens = [2, 9, 5, 1]
    (k_pools, v_pools), tables, _ = batch_in_pools(4, seq_lens)
    k_pools.nan_to_num_(nan=value)
    v_pools.nan_to_num_(nan=value)
    for table in tables:
        for pools in (k_pools, v_pools):
            pools[:, table[0], 0] = value
    for k, v in step.gather_batch_kv(k_pools, v_pools, tables, seq_lens):
        for b, seq_len in enumerate(seq_lens):
            padding = max(seq_lens) - seq_len
            for dense in (k, v):
                assert (dense[b, :, :padding] == 0).all()
                first = dense[b, :, padding]
                assert_same(first, torch.full_like(first, value))


@pytest.mark.having("gather_batch_kv")
def test_gather_reads_only_seq_len_tokens(step):
    """Spare blocks at the end of a table and the rest of the last block are not part of the history."""
    seq_lens = [5, 2]
    (k_pools, v_pools), tables, dense = batch_in_pools(4, seq_lens)
    spare = [block for block in range(NUM_BLOCKS) if block not in chain(*tables)]
    longer = [tables[0] + spare[:3], tables[1] + spare[3:4]]
    for layer, expected in zip(step.gather_batch_kv(k_pools, v_pools, longer, seq_lens), dense.batch([0, 1])):
        assert_same(layer[0], expected[0])
        assert_same(layer[1], expected[1])


@pytest.mark.having("gather_batch_kv")
def test_gather_in_the_order_of_the_batch(step):
    (k_pools, v_pools), tables, dense = batch_in_pools(4, [6, 2, 4])
    for order in ([2, 0, 1], [1], [1, 2]):
        seq_lens = [dense.seq_len(r) for r in order]
        gathered = step.gather_batch_kv(k_pools, v_pools, [tables[r] for r in order], seq_lens)
        for layer, expected in zip(gathered, dense.batch(order)):
            assert_same(layer[0], expected[0])
            assert_same(layer[1], expected[1])


# --- attention through the block table ---


@pytest.mark.having("paged_attention")
@pytest.mark.parametrize(("num_heads", "head_dim"), [(3, 16), (9, 8), (12, 64)])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_paged_attention_equals_dense_attention(step, block_size, num_heads, head_dim):
    """Grouped queries over uneven histories in scattered blocks; what lies behind a history is NaN."""
    seq_lens = [length for length in (1, block_size, block_size + 1, 3 * block_size + 2) if length <= 50]
    generator = torch.Generator().manual_seed(block_size)
    blocks = random.Random(block_size).sample(range(30), 30)
    shape = (30, block_size, NUM_KV_HEADS, head_dim)
    k_pool, v_pool = torch.full(shape, NAN), torch.full(shape, NAN)
    q = torch.randn(len(seq_lens), num_heads, head_dim, generator=generator)
    tables, expected = [], []
    for b, seq_len in enumerate(seq_lens):
        k, v = 2 * torch.randn(2, seq_len, NUM_KV_HEADS, head_dim, generator=generator)
        tables.append([blocks.pop() for _ in range(-(-seq_len // block_size))])
        for i, (block, slot) in enumerate(slots_of(tables[-1], block_size, 0, seq_len)):
            k_pool[block, slot], v_pool[block, slot] = k[i], v[i]
        k, v = (x.repeat_interleave(num_heads // NUM_KV_HEADS, dim=1) for x in (k, v))
        weights = (torch.einsum("hd,shd->hs", q[b], k) * head_dim**-0.5).softmax(dim=-1)
        expected.append(torch.einsum("hs,shd->hd", weights, v))
    # Behind a short table stands the block of another request, or one that is no block at all.
    width = max(map(len, tables)) + 1
    for table, filler in zip(tables, (tables[-1][0], 0, blocks[0], 0)):
        table.extend([filler] * (width - len(table)))
    table, lengths = torch.tensor(tables, dtype=torch.int32), torch.tensor(seq_lens, dtype=torch.int32)
    actual = step.paged_attention(q, k_pool, v_pool, table, lengths, head_dim**-0.5)
    torch.testing.assert_close(actual, torch.stack(expected), rtol=0, atol=1e-5)


# --- the cache around them ---


def new_cache(step, num_blocks=NUM_BLOCKS, block_size=4, dtype=torch.float32, kind="llama"):
    """A cache full of NaN that hands its blocks out in no order."""
    cache = step.PagedKVCache(KINDS[kind].config(), num_blocks, block_size, dtype, torch.device("cpu"))
    poison(cache)
    random.Random(block_size).shuffle(cache.free_blocks)
    return cache


def append(cache, request_ids, new):
    """Put new tokens behind the requests' histories: per layer (k, v) [batch, num_kv_heads, num_tokens, head_dim].

    Returns what the cache hands back for attention where it is the transformers cache itself, else None.
    """
    if hasattr(cache, "begin_step"):
        cache.begin_step(request_ids, new[0][0].shape[2])
        handed_back = [cache.update(k, v, layer) for layer, (k, v) in enumerate(new)]
        cache.end_step()
        return handed_back
    for b, request_id in enumerate(request_ids):
        cache.reserve(request_id, new[0][0].shape[2])
        cache.write(request_id, tuple((k[b : b + 1], v[b : b + 1]) for k, v in new))
    return None


def stored(cache, request_id):
    """What the pools hold for a request, read slot by slot: per layer (k, v) [seq_len, num_kv_heads, head_dim]."""
    slots = slots_of(cache.block_tables[request_id], cache.block_size, 0, cache.seq_lens[request_id])
    return [
        tuple(
            torch.stack([pools[layer][block, slot] for block, slot in slots])
            for pools in (cache.k_pools, cache.v_pools)
        )
        for layer in range(len(cache.k_pools))
    ]


def assert_holds(cache, dense):
    """The cache holds exactly these requests with exactly these tokens, and no block is lost or owned twice."""
    assert cache.block_tables.keys() == cache.seq_lens.keys() == dense.layers.keys()
    owned = list(chain(*cache.block_tables.values()))
    assert sorted(owned + cache.free_blocks) == list(range(cache.num_blocks))
    for request_id in dense.layers:
        assert cache.seq_lens[request_id] == dense.seq_len(request_id)
        assert len(cache.block_tables[request_id]) == -(-dense.seq_len(request_id) // cache.block_size)
        for (k, v), (expected_k, expected_v) in zip(stored(cache, request_id), dense.layers[request_id]):
            assert_same(k, expected_k)
            assert_same(v, expected_v)


def assert_reads(cache, dense, request_ids):
    """The step's own read or gather of these requests."""
    if hasattr(cache, "read"):
        read_back = [(cache.read(r), dense.batch([r])) for r in request_ids]
    elif hasattr(cache, "gather"):
        read_back = [(cache.gather(request_ids), dense.batch(request_ids))]
    else:
        read_back = []
    for layers, expected in read_back:
        assert len(layers) == len(expected)
        for (k, v), (expected_k, expected_v) in zip(layers, expected):
            assert_same(k, expected_k)
            assert_same(v, expected_v)


def random_layers(num_layers, batch, num_tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    shape = (num_layers, 2, batch, NUM_KV_HEADS, num_tokens, HEAD_DIM)
    return [tuple(layer) for layer in torch.randn(shape, generator=generator)]


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_cache_against_dense_tensors(step, block_size):
    """Requests come, grow together, and go, over and over; blocks given back are poisoned at once."""
    rng = random.Random(block_size)
    num_layers = KINDS["llama"].config().num_hidden_layers
    cache = new_cache(step, num_blocks=40, block_size=block_size)
    dense = DenseKV(num_layers, NUM_KV_HEADS, HEAD_DIM)
    for turn in range(40):
        live = list(dense.layers)
        if len(live) < 2 or (len(live) < 5 and rng.random() < 0.3):
            request_ids, num_tokens = [f"request {turn}"], rng.choice([1, 3, 4, 5])
        elif rng.random() < 0.2:
            leaver = rng.choice(live)
            before = set(cache.block_tables[leaver])
            cache.free(leaver)
            dense.free(leaver)
            assert before <= set(cache.free_blocks)
            poison(cache, blocks=before)
            assert_holds(cache, dense)
            continue
        elif max(dense.seq_len(r) for r in live) > 7:
            request_ids, num_tokens = [], 0
            for leaver in live:
                cache.free(leaver)
                dense.free(leaver)
            assert_idle(cache)
            poison(cache)
            continue
        else:
            request_ids, num_tokens = rng.sample(live, rng.randint(1, len(live))), 1
        new = random_layers(num_layers, len(request_ids), num_tokens, seed=turn)
        handed_back = append(cache, request_ids, new)
        for b, request_id in enumerate(request_ids):
            dense.append(request_id, [(k[b].transpose(0, 1), v[b].transpose(0, 1)) for k, v in new])
        assert_holds(cache, dense)
        assert_reads(cache, dense, list(dense.layers))
        if handed_back is not None and not hasattr(step, "paged_attention"):
            lengths = [dense.seq_len(r) for r in request_ids]
            for (k, v), (expected_k, expected_v) in zip(handed_back, dense.batch(request_ids)):
                assert k.shape == v.shape == expected_k.shape
                for b, length in enumerate(lengths):
                    assert_same(k[b, :, -length:], expected_k[b, :, -length:])
                    assert_same(v[b, :, -length:], expected_v[b, :, -length:])
                assert k.isfinite().all() and v.isfinite().all()  # attention multiplies padding by 0: NaN would stay


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_reserve_takes_no_block_too_many(step, block_size):
    """Room for n tokens more is as many blocks as n tokens more fill; asking again for the same changes nothing."""
    cache = new_cache(step, num_blocks=12, block_size=block_size)
    for num_tokens in range(1, 3 * min(block_size, 4) + 1):
        cache.reserve("a", num_tokens)
        held = -(-num_tokens // block_size)
        assert len(cache.block_tables["a"]) == held
        assert len(cache.free_blocks) == 12 - held
        assert cache.seq_lens["a"] == 0
    cache.reserve("b", 1)
    assert not set(cache.block_tables["a"]) & set(cache.block_tables["b"])
    assert cache.peak_blocks == held + 1
    cache.free("a")
    cache.free("b")
    assert cache.peak_blocks == held + 1
    assert_idle(cache)


def test_a_full_block_is_followed_by_a_new_one(step):
    """Exactly full: no block more than that, until the next token comes."""
    cache = new_cache(step)
    append(cache, ["a"], random_layers(2, 1, 8, seed=0))
    assert len(cache.block_tables["a"]) == 2
    table = list(cache.block_tables["a"])
    append(cache, ["a"], random_layers(2, 1, 1, seed=1))
    assert cache.block_tables["a"][:2] == table
    assert len(cache.block_tables["a"]) == 3


def test_pools_have_the_shape_of_the_config(step):
    """Layers, heads and head_dim from the config, where head_dim is given and where it follows from the hidden size."""
    for kind, (kv_heads, head_dim) in {"llama": (3, 8), "llama3": (2, 16), "qwen2": (2, 8), "qwen3": (1, 16)}.items():
        cache = step.PagedKVCache(KINDS[kind].config(), 5, 4, torch.bfloat16, torch.device("cpu"))
        assert len(cache.k_pools) == len(cache.v_pools) == 2
        for pool in (*cache.k_pools, *cache.v_pools):
            assert pool.shape == (5, 4, kv_heads, head_dim)
            assert pool.dtype == torch.bfloat16
        assert (cache.block_size, cache.num_blocks, cache.peak_blocks) == (4, 5, 0)
        assert isinstance(cache.free_blocks, list)
        assert_idle(cache)

"""Small experiments with the steps' own functions, shown on the steps' pages."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from shared.steps import find_step, load_step


def step(number):
    """The model.py of a step as a module."""
    return load_step(find_step(number))


class Calls(TorchDispatchMode):
    """Records the name of every operator that torch dispatches inside the `with` block."""

    def __enter__(self):
        self.names = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def pools():
    """One layer's pools: 8 blocks of 4 slots, 3 heads of 16 numbers, full of NaN."""
    return torch.full((8, 4, 3, 16), torch.nan), torch.full((8, 4, 3, 16), torch.nan)


torch.manual_seed(0)

# --8<-- [start:write]
k_pool, v_pool = pools()  # [8, 4, 3, 16], all NaN
k, v = torch.randn(2, 4, 3, 16)  # four new tokens
step("01").write_kv_to_pool(k_pool, v_pool, k, v, block_table=[5, 1, 3], start_pos=6)

assert torch.equal(k_pool[1, 2], k[0]) and torch.equal(k_pool[1, 3], k[1])  # positions 6 and 7
assert torch.equal(k_pool[3, 0], k[2]) and torch.equal(k_pool[3, 1], k[3])  # positions 8 and 9
assert k_pool.isfinite().sum() == k.numel()  # and nothing but these four slots
# --8<-- [end:write]

# --8<-- [start:read]
k_pool, v_pool = pools()
k, v = torch.randn(2, 10, 3, 16)
step("01").write_kv_to_pool(k_pool, v_pool, k, v, [5, 1, 3], 0)
k_read, v_read = step("01").read_kv_from_pool(k_pool, v_pool, [5, 1, 3], seq_len=10)
assert torch.equal(k_read, k) and torch.equal(v_read, v)
# --8<-- [end:read]

# --8<-- [start:recompute]
prompt, new = 40, 32
without_cache = sum(prompt + i for i in range(new))  # every token of the sequence, for every new token
with_cache = prompt + (new - 1)  # the prompt once, then one token at a time
assert (without_cache, with_cache) == (1776, 71)
# --8<-- [end:recompute]

# --8<-- [start:write_calls]
copies = {}
for number in ("01", "02"):
    for tokens in (1, 4, 512):
        k_pool, v_pool = torch.zeros(2, 128, 4, 3, 16)
        k, v = torch.randn(2, tokens, 3, 16)
        with Calls() as calls:
            step(number).write_kv_to_pool(k_pool, v_pool, k, v, list(range(128)), 0)
        copies[number, tokens] = calls.names.count("copy_"), calls.names.count("index_put_")
assert [copies["01", tokens] for tokens in (1, 4, 512)] == [(2, 0), (8, 0), (1024, 0)]
assert [copies["02", tokens][1] for tokens in (1, 4, 512)] == [2, 2, 2]
# --8<-- [end:write_calls]

# --8<-- [start:one_token]
k_pool, v_pool = torch.zeros(2, 8, 4, 3, 16)
k, v = torch.randn(2, 1, 3, 16)
work = {}
for number in ("01", "02"):
    with Calls() as calls:
        step(number).write_kv_to_pool(k_pool, v_pool, k, v, [5, 1, 3], 6)
    work[number] = [name for name in calls.names if name not in ("select", "view", "detach", "alias")]
assert work["01"] == ["copy_", "copy_"]
assert {"arange", "floor_divide", "remainder", "index", "index_put_"} <= set(work["02"])
assert len(work["02"]) > 2 * len(work["01"])  # for one token, the arithmetic on positions is the larger part
# --8<-- [end:one_token]

# --8<-- [start:gather]
k_pool, v_pool = pools()
write, tables, seq_lens = step("03").write_kv_to_pool, [[5, 1, 3], [6, 4]], [10, 6]
k_a, v_a = torch.randn(2, 10, 3, 16)
k_b, v_b = torch.randn(2, 6, 3, 16)
write(k_pool, v_pool, k_a, v_a, tables[0], 0)
write(k_pool, v_pool, k_b, v_b, tables[1], 0)

((k, v),) = step("03").gather_batch_kv([k_pool], [v_pool], tables, seq_lens)  # a single layer
assert k.shape == (2, 3, 10, 16)  # [batch, num_kv_heads, longest, head_dim]
assert torch.equal(k[0].transpose(0, 1), k_a)
assert torch.equal(k[1, :, 4:].transpose(0, 1), k_b)  # B ends in the same column as A
assert (k[1, :, :4] == 0).all()  # and has four columns of zeros before it, in a pool full of NaN
# --8<-- [end:gather]

# --8<-- [start:gather_equal]
layers, tables, seq_lens = 2, [[5, 1, 3], [6, 4]], [10, 6]
k_pools, v_pools = torch.randn(2, layers, 8, 4, 3, 16)
naive = step("03").gather_batch_kv(k_pools, v_pools, tables, seq_lens)
vectorized = step("04").gather_batch_kv(k_pools, v_pools, tables, seq_lens)
for (k, v), (k_04, v_04) in zip(naive, vectorized):
    assert torch.equal(k, k_04) and torch.equal(v, v_04)  # copies: equal to the bit, not nearly
# --8<-- [end:gather_equal]

# --8<-- [start:gather_calls]
layers, tables = 2, [[5, 1, 3], [6, 4]]
k_pools, v_pools = torch.randn(2, layers, 8, 4, 3, 16)
copies, reads = [], []
for seq_lens in ([10, 6], [12, 8]):
    with Calls() as calls:
        step("03").gather_batch_kv(k_pools, v_pools, tables, seq_lens)
    copies.append(calls.names.count("copy_"))
    with Calls() as calls:
        step("04").gather_batch_kv(k_pools, v_pools, tables, seq_lens)
    reads.append(calls.names.count("index"))
assert copies == [2 * layers * (10 + 6), 2 * layers * (12 + 8)]  # K and V, each layer, each token of each history
assert reads == [2 * layers, 2 * layers]  # whatever the lengths
# --8<-- [end:gather_calls]

# --8<-- [start:padding_reads]
k_pool, v_pool = pools()
k_pool[6, 0] = torch.inf  # the first slot of B: the one its padding reads
v_pool.copy_(k_pool)
((k, v),) = step("04").gather_batch_kv([k_pool], [v_pool], [[5, 1, 3], [6, 4]], [10, 6])
assert (k[1, :, :4] == 0).all()  # zero, although what was read there is infinite
# --8<-- [end:padding_reads]

# --8<-- [start:cache_copies]
k, v = torch.randn(2, 8, 3, 100, 16)  # dense, [batch, num_kv_heads, seq, head_dim]
cache = DynamicCache()
with Calls() as calls:
    cache.update(k, v, 0)
    cache.update(k[:, :, -1:], v[:, :, -1:], 0)
assert calls.names.count("cat") == 4  # K and V, on the first fill and on the next token
assert cache.layers[0].keys.data_ptr() != k.data_ptr()
# --8<-- [end:cache_copies]

# --8<-- [start:read_back]
k, v = torch.randn(2, 8, 3, 100, 16)
cache = DynamicCache()
cache.update(k, v, 0)
for layer, (keys, values, *_) in enumerate(cache):  # works in every version; key_cache[l] and layers[l].keys do not
    assert layer == 0 and torch.equal(keys, k) and torch.equal(values, v)
# --8<-- [end:read_back]

# --8<-- [start:slot_mapping]
config = SimpleNamespace(num_hidden_layers=2, num_key_value_heads=3, head_dim=16)
cache = step("06").PagedKVCache(config, num_blocks=8, block_size=4, dtype=torch.float32, device="cpu")
cache.block_tables, cache.seq_lens = {"A": [5, 1, 3], "B": [6, 4]}, {"A": 10, "B": 6}
cache.begin_step(["A", "B"], num_tokens=1)

assert cache.slot_mapping.tolist() == [3 * 4 + 2, 4 * 4 + 2]  # position 10 of A, position 6 of B
assert cache.slots[1].tolist() == [32] * 4 + [24, 25, 26, 27] + [16, 17, 18]  # padding; block 6; block 4
assert cache.slots.dtype == torch.int64
# --8<-- [end:slot_mapping]

# --8<-- [start:slot_calls]
config = SimpleNamespace(num_hidden_layers=2, num_key_value_heads=3, head_dim=16)
for requests, seq_len in ((2, 8), (8, 8), (8, 15)):
    cache = step("06").PagedKVCache(config, num_blocks=40, block_size=4, dtype=torch.float32, device="cpu")
    cache.block_tables = {r: [4 * r + i for i in range(4)] for r in range(requests)}
    cache.seq_lens = dict.fromkeys(range(requests), seq_len)
    cache.begin_step(list(range(requests)), num_tokens=1)
    k, v = torch.randn(2, requests, 3, 1, 16)
    with Calls() as calls:
        cache.update(k, v, 0)
    work = sorted(name for name in calls.names if name.startswith("index") or name == "cat")
    assert work == ["index_copy_", "index_copy_", "index_select", "index_select"]  # any batch, any history
# --8<-- [end:slot_calls]

# --8<-- [start:zero_block]
config = SimpleNamespace(num_hidden_layers=1, num_key_value_heads=3, head_dim=16)
cache = step("06").PagedKVCache(config, num_blocks=8, block_size=4, dtype=torch.float32, device="cpu")
cache.k_pools.fill_(torch.nan)  # every block that can be handed out
k, v = step("06").read_slots(cache.padded_k_pools[0], cache.padded_v_pools[0], torch.tensor([[32, 20]]))
assert (k[0, 0] == 0).all() and k[0, 1].isnan().all()  # slot 32 is padding's, slot 20 is block 5's first
# --8<-- [end:zero_block]

# --8<-- [start:online_softmax]
scores, values = torch.randn(10), torch.randn(10, 16)
top, total, summed = torch.tensor(-torch.inf), torch.tensor(0.0), torch.zeros(16)
for block in (slice(0, 4), slice(4, 8), slice(8, 10)):  # blocks of four; the last holds two tokens
    new_top = torch.maximum(top, scores[block].max())
    weights, shrink = (scores[block] - new_top).exp(), (top - new_top).exp()
    total, summed = total * shrink + weights.sum(), summed * shrink + weights @ values[block]
    top = new_top
assert torch.allclose(summed / total, scores.softmax(0) @ values)  # the softmax over all ten at once
# --8<-- [end:online_softmax]

# --8<-- [start:paged_attention]
k_pool, v_pool = pools()  # NaN wherever nobody writes
tables, seq_lens = torch.tensor([[5, 1, 3], [6, 4, 7]], dtype=torch.int32), torch.tensor([10, 6], dtype=torch.int32)
q, scale = torch.randn(2, 9, 16), 16**-0.5  # nine query heads share three key/value heads
expected = []
for b, length in enumerate(seq_lens.tolist()):
    k, v = torch.randn(2, length, 3, 16)
    step("01").write_kv_to_pool(k_pool, v_pool, k, v, tables[b].tolist(), 0)
    dense = (x.transpose(0, 1)[None] for x in (k, v))
    expected.append(F.scaled_dot_product_attention(q[b][None, :, None], *dense, scale=scale, enable_gqa=True)[0, :, 0])

for name in ("reference", "numba"):
    attention = step("07").find_kernel(name, k_pool)
    out = attention(q, k_pool, v_pool, tables, seq_lens, scale)
    assert torch.allclose(out, torch.stack(expected), atol=1e-5)
# --8<-- [end:paged_attention]

# --8<-- [start:rule_of_256]
config = SimpleNamespace(num_hidden_layers=1, num_key_value_heads=1, head_dim=1)
lengths = [37, 42, 36, 44, 58, 52, 79, 110]  # tokens of eight short requests
reserved = {}
for block_size in (16, 64, 256):
    cache = step("07").PagedKVCache(config, 2048 // block_size, block_size, dtype=torch.float32, device="cpu")
    for request, length in enumerate(lengths):
        cache.reserve(request, length)
    reserved[block_size] = cache.peak_blocks * block_size
assert sum(lengths) == 458
assert reserved == {16: 512, 64: 640, 256: 2048}  # slots taken for these 458 tokens
# --8<-- [end:rule_of_256]

# --8<-- [start:weight_bytes]
weight, rows = torch.empty(1536, 576, device="meta"), 8  # one of the MLP's matrices of the default model
bytes_read = weight.numel() * weight.element_size()
operations = 2 * rows * weight.numel()
assert operations / bytes_read == 4  # per byte, for eight rows in float32; a CPU core can do many times that
# --8<-- [end:weight_bytes]

# --8<-- [start:thin_matmul]
for rows, size, outputs in ((1, 576, 192), (8, 576, 1536), (13, 77, 31)):
    x, weight = torch.randn(rows, size), torch.randn(outputs, size)
    y = step("08").thin_matmul(x, weight)
    exact = x.double() @ weight.double().T
    bound = size * 2**-24 * (x.double().abs() @ weight.double().abs().T)
    assert ((y - exact).abs() <= bound).all()
# --8<-- [end:thin_matmul]

"""The claims of the page on indexing, each a named section that tests run on its own after these first lines."""

import torch
from pytest import raises
from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchDispatchMode):
    """Records the name of every operator that torch dispatches inside the `with` block."""

    def __enter__(self):
        self.names = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


torch.manual_seed(0)

# --8<-- [start:view]
x = torch.tensor([[1, 2], [3, 4], [5, 6]])
row, rows, flat = x[0], x[1:3], x.flatten()
assert row.data_ptr() == x.data_ptr()  # the same memory
row[0] = 100
assert x[0, 0] == 100  # a write through the view is a write to x
assert flat[0] == 100  # flatten of a contiguous tensor is a view too
# --8<-- [end:view]

# --8<-- [start:copy]
x = torch.tensor([[1, 2], [3, 4], [5, 6]])
idx = torch.tensor([2, 0, 2])
y = x[idx]
assert y.tolist() == [[5, 6], [1, 2], [5, 6]]  # any order, any row as often as you like
y[0] = 0
assert x.tolist() == [[1, 2], [3, 4], [5, 6]]  # y is a copy: x has not changed
assert x[idx].data_ptr() != x[idx].data_ptr()  # a new copy each time
# --8<-- [end:copy]

# --8<-- [start:pairing]
pool = torch.randn(8, 16, 4, 32)  # [num_blocks, block_size, num_kv_heads, head_dim]
blocks = torch.tensor([3, 3, 5])
slots = torch.tensor([0, 1, 2])
got = pool[blocks, slots]
assert got.shape == (3, 4, 32)
assert torch.equal(got, torch.stack([pool[3, 0], pool[3, 1], pool[5, 2]]))
# --8<-- [end:pairing]

# --8<-- [start:outer]
pool = torch.randn(8, 16, 4, 32)
blocks, slots = torch.tensor([3, 5]), torch.tensor([0, 1, 2])
every = pool[blocks[:, None], slots]  # [2, 1] against [3]: every block with every slot
assert every.shape == (2, 3, 4, 32)
assert torch.equal(every[1, 2], pool[5, 2])
# --8<-- [end:outer]

# --8<-- [start:grid]
pool = torch.randn(8, 16, 4, 32)
blocks = torch.tensor([[3, 3, 5], [0, 7, 7]])  # [batch, seq]
slots = torch.tensor([[0, 1, 2], [15, 0, 1]])  # [batch, seq]
dense = pool[blocks, slots]
assert dense.shape == (2, 3, 4, 32)  # the index tensors' shape, then what was not indexed
assert torch.equal(dense[1, 0], pool[0, 15])
# --8<-- [end:grid]

# --8<-- [start:separated]
pools = torch.randn(2, 8, 16, 4, 32)  # [num_layers, num_blocks, block_size, num_kv_heads, head_dim]
blocks, slots, heads = torch.tensor([3, 3, 5]), torch.tensor([0, 1, 2]), torch.tensor([0, 1, 0])
assert pools[:, blocks, slots].shape == (2, 3, 4, 32)  # side by side: the result stands in their place
assert pools[:, blocks, :, heads].shape == (3, 2, 16, 32)  # a slice between them: it moves to the front
# --8<-- [end:separated]

# --8<-- [start:flat]
pool = torch.randn(8, 16, 4, 32)
blocks, slots = torch.tensor([3, 3, 5]), torch.tensor([0, 1, 2])
flat_pool = pool.flatten(0, 1)  # [num_blocks * block_size, num_kv_heads, head_dim], a view
flat_ids = blocks * 16 + slots
assert flat_pool.data_ptr() == pool.data_ptr()
assert torch.equal(flat_pool[flat_ids], pool[blocks, slots])
assert torch.equal(flat_pool.index_select(0, flat_ids), pool[blocks, slots])
# --8<-- [end:flat]

# --8<-- [start:write]
pool, k = torch.zeros(8, 16, 4, 32), torch.randn(3, 4, 32)
blocks, slots = torch.tensor([3, 3, 5]), torch.tensor([0, 1, 2])
with Calls() as calls:
    pool[blocks, slots] = k
assert calls.names == ["index_put_"]  # one operator, however many tokens
assert torch.equal(pool[5, 2], k[2])
assert pool.count_nonzero() == k.count_nonzero()  # and nothing else was touched
# --8<-- [end:write]

# --8<-- [start:loop_write]
pool, k = torch.zeros(8, 16, 4, 32), torch.randn(3, 4, 32)
with Calls() as calls:
    for i, (block, slot) in enumerate([(3, 0), (3, 1), (5, 2)]):
        pool[block, slot] = k[i]
assert calls.names.count("copy_") == 3  # a whole [num_kv_heads, head_dim] row each
assert set(calls.names) - {"copy_"} <= {"select", "view"}  # the rest only makes views
# --8<-- [end:loop_write]

# --8<-- [start:lost_write]
pool, k = torch.zeros(8, 16, 4, 32), torch.randn(4, 32)
pool[torch.tensor([3, 5])][:, 0] = k  # the first [...] makes a copy; the copy is written, then dropped
assert pool.count_nonzero() == 0
pool[3][0] = k  # with integers the first [...] is a view: this write arrives
assert torch.equal(pool[3, 0], k)
# --8<-- [end:lost_write]

# --8<-- [start:duplicates]
pool = torch.zeros(8, 16)
pool[torch.tensor([3, 3]), torch.tensor([0, 0])] = torch.tensor([1.0, 2.0])
assert pool[3, 0] in (1.0, 2.0)  # torch does not promise which of the two
# --8<-- [end:duplicates]

# --8<-- [start:list_index]
x, table = torch.tensor([[1, 2], [3, 4], [5, 6]]), [5, 1, 3]
assert torch.equal(x[[2, 0]], x[torch.tensor([2, 0])])  # a list is a fine index into a tensor
with raises(TypeError):
    table[torch.tensor([0, 2])]  # a tensor is no index into a list
assert torch.tensor(table)[torch.tensor([0, 2])].tolist() == [5, 3]  # so the table becomes a tensor first
# --8<-- [end:list_index]

# --8<-- [start:sync]
x, i = torch.arange(10), torch.tensor(3)
with Calls() as calls:
    x[i]
assert "_local_scalar_dense" in calls.names  # .item(): on a GPU the CPU waits here
with Calls() as calls:
    x[i[None]]
assert "_local_scalar_dense" not in calls.names  # an index of one dimension stays on the device
with Calls() as calls:
    [5, 1, 3][torch.tensor(2)]
assert "_local_scalar_dense" in calls.names  # a list asks the tensor for a Python number
# --8<-- [end:sync]

# --8<-- [start:mask_shape]
x = torch.arange(6)
keep = x > 3
assert x[keep].shape == (2,)  # as long as there are True in it: the CPU must look before it goes on
assert torch.where(keep, x, 0).shape == (6,)  # the same shape whatever the mask holds
# --8<-- [end:mask_shape]

# --8<-- [start:minus_one]
slots = torch.zeros(8)
slots[torch.tensor([2, -1])] = 1.0
assert slots.tolist() == [0, 0, 1, 0, 0, 0, 0, 1]  # -1 is the last slot, not "skip"
# --8<-- [end:minus_one]

# --8<-- [start:out_of_range]
pool = torch.zeros(8, 16)
with raises(IndexError):  # on a GPU: a device-side assertion, reported later and elsewhere
    pool[torch.tensor([8]), torch.tensor([0])]
# --8<-- [end:out_of_range]

# --8<-- [start:int32]
block = torch.tensor([2**27], dtype=torch.int32)
assert (block * 16).item() == -(2**31)  # 2**31 does not fit: the product wraps, silently
assert (block.long() * 16).item() == 2**31
# --8<-- [end:int32]

# --8<-- [start:layout]
k = torch.randn(2, 5, 4, 32)  # [batch, seq, num_kv_heads, head_dim]
heads_first = k.transpose(1, 2)  # [batch, num_kv_heads, seq, head_dim]
assert heads_first.data_ptr() == k.data_ptr()  # transpose only renames strides
assert not heads_first.is_contiguous()
assert heads_first.contiguous().data_ptr() != k.data_ptr()  # contiguous() has to copy
# --8<-- [end:layout]

# --8<-- [start:quiz]
pool, k, block_table = torch.zeros(8, 4), torch.tensor(1.0), [5, 1, 3]
pool[torch.tensor(block_table)][9 // 4, 9 % 4] = k
pool[block_table][2][1] = k
assert pool.count_nonzero() == 0
pool[block_table[9 // 4], 9 % 4] = k
assert pool[3, 1] == 1
# --8<-- [end:quiz]

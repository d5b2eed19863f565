"""paged_attention and write_slots as Triton kernels, for CUDA devices; any block size, head count and head_dim.

TRITON_INTERPRET=1, set before this file is imported, runs them on the CPU, slowly, to check them. Vectors have a power
of two elements in Triton, so rows of 3 heads x 64 are padded to 256 and masked.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def attend(
    q_ptr, k_ptr, v_ptr, table_ptr, len_ptr, out_ptr, scale, table_width, block_size, num_kv_heads, group, head_dim,
    GROUP: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program per request and kv head: its query heads go over the history in tiles, with online softmax."""
    request, kv = tl.program_id(0), tl.program_id(1)
    head, dim, in_tile = tl.arange(0, GROUP), tl.arange(0, DIM), tl.arange(0, TILE)
    q_rows = (request * num_kv_heads + kv) * group + head
    q_at = q_rows[:, None] * head_dim + dim[None, :]
    q_there = (head < group)[:, None] & (dim < head_dim)[None, :]
    q = tl.load(q_ptr + q_at, mask=q_there, other=0.0).to(tl.float32)
    top = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    summed = tl.zeros([GROUP, DIM], tl.float32)
    seq_len = tl.load(len_ptr + request)
    for start in range(0, seq_len, TILE):
        position = start + in_tile
        there = position < seq_len
        block = tl.load(table_ptr + request * table_width + position // block_size, mask=there, other=0)
        # int64: a large pool has more elements than int32 can count.
        slot = block.to(tl.int64) * block_size + position % block_size
        at = (slot[:, None] * num_kv_heads + kv) * head_dim + dim[None, :]
        kv_there = there[:, None] & (dim < head_dim)[None, :]
        k = tl.load(k_ptr + at, mask=kv_there, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + at, mask=kv_there, other=0.0).to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(there[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp(scores - new_top[:, None])
        shrink = tl.exp(top - new_top)
        total = total * shrink + tl.sum(weights, axis=1)
        summed = summed * shrink[:, None] + tl.dot(weights, v, input_precision="ieee")
        top = new_top
    tl.store(out_ptr + q_at, (summed / total[:, None]).to(out_ptr.dtype.element_ty), mask=q_there)


def paged_attention(q, k_pool, v_pool, block_tables, seq_lens, scale):
    """As paged_attention in model.py."""
    (batch, num_heads, head_dim), (block_size, num_kv_heads) = q.shape, k_pool.shape[1:3]
    q, block_tables = q.contiguous(), block_tables.contiguous()
    out, group = torch.empty_like(q), num_heads // num_kv_heads
    attend[batch, num_kv_heads](
        q, k_pool, v_pool, block_tables, seq_lens, out, scale, block_tables.shape[1], block_size, num_kv_heads, group,
        head_dim, max(16, triton.next_power_of_2(group)), max(16, triton.next_power_of_2(head_dim)), TILE=32,
    )  # fmt: skip
    return out


@triton.jit
def store(k_ptr, v_ptr, k_pool_ptr, v_pool_ptr, slot_ptr, row_size, ROW: tl.constexpr):
    """One program per token: its rows of k and v go to its slot; slot -1 (a padded batch's empty place) is skipped."""
    token = tl.program_id(0)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    element = tl.arange(0, ROW)
    there = (element < row_size) & (slot >= 0)
    k = tl.load(k_ptr + token * row_size + element, mask=there)
    v = tl.load(v_ptr + token * row_size + element, mask=there)
    tl.store(k_pool_ptr + slot * row_size + element, k, mask=there)
    tl.store(v_pool_ptr + slot * row_size + element, v, mask=there)


def write_slots(k_pool, v_pool, k, v, slot_mapping):
    """As write_slots in model.py, but tokens whose slot is -1 are not stored."""
    row_size = k_pool.shape[2] * k_pool.shape[3]
    k, v = k.contiguous(), v.contiguous()
    store[(len(k),)](k, v, k_pool, v_pool, slot_mapping, row_size, triton.next_power_of_2(row_size))

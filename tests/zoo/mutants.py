"""The bugs. Each names the definition it changes, what is replaced there by what, and the steps that have that code.

A mutant may need other words in other steps: it then has several edits, for different steps. Two edits for the same
step are both made. The steps are numbers, "01 02"; an edit whose `old` does not occur exactly once in its definition
is an error, so the zoo cannot go stale unseen.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass


@dataclass(frozen=True)
class Edit:
    """In the definition `where` ("write_kv_to_pool", "PagedKVCache.free") of these steps, `old` becomes `new`."""

    steps: str
    where: str
    old: str
    new: str

    def applies_to(self, number: str) -> bool:
        return number in self.steps.split()


@dataclass(frozen=True)
class Mutant:
    """One bug: its name, what is wrong in one sentence, and a public thread about it where one was found."""

    name: str
    bug: str
    edits: tuple[Edit, ...]
    seen: str = ""

    @property
    def steps(self) -> list[str]:
        """Numbers of the steps this bug can be planted in."""
        return sorted({number for edit in self.edits for number in edit.steps.split()})


class DoesNotApply(Exception):
    """The code a mutant wants to change is not there: the mutant has to be brought up to date."""


def plant(mutant: Mutant, number: str, source: str) -> str:
    """The text of step `number`'s model.py with the bug in it. Raises DoesNotApply."""
    for edit in mutant.edits:
        if edit.applies_to(number):
            first, last = _span(source, edit.where)
            lines = source.splitlines(keepends=True)
            definition = "".join(lines[first:last])
            found = definition.count(edit.old)
            if found != 1:
                raise DoesNotApply(
                    f"{mutant.name}: {edit.where} of step {number} has {edit.old!r} {found} times, not once"
                )
            source = "".join([*lines[:first], definition.replace(edit.old, edit.new), *lines[last:]])
    compile(source, mutant.name, "exec")
    return source


def _span(source: str, qualified_name: str) -> tuple[int, int]:
    """First line of a definition, counted from 0, and the line after its last."""
    body = ast.parse(source).body
    for name in qualified_name.split("."):
        node = next((n for n in body if getattr(n, "name", None) == name), None)
        if node is None:
            raise DoesNotApply(f"there is no {qualified_name}")
        body = node.body
    return node.lineno - 1, node.end_lineno


GITHUB = "https://github.com/"

# Steps whose code has the same text there.
SINGLE, BATCHED = "01 02", "03 04 05"
PART_ONE = f"{SINGLE} {BATCHED}"
SLOTS, PAGED = "06 07 08", "07 08"
ALL = f"{PART_ONE} {SLOTS}"

MUTANTS = (
    # --- writing into the blocks
    Mutant(
        "floor-and-remainder-swapped",
        "the block is looked up with % and the slot computed with //",
        (
            Edit(
                "01",
                "write_kv_to_pool",
                "block_table[position // block_size], position % block_size",
                "block_table[position % block_size], position // block_size",
            ),
            Edit("02 03 04 05", "write_kv_to_pool", "[positions // block_size]", "[positions % block_size]"),
            Edit(
                "02 03 04 05", "write_kv_to_pool", "slots = positions % block_size", "slots = positions // block_size"
            ),
        ),
    ),
    Mutant(
        "next-block-one-token-early",
        "the last token of every block is written into the next block",
        (
            Edit(
                "01",
                "write_kv_to_pool",
                "block_table[position // block_size]",
                "block_table[(position + 1) // block_size]",
            ),
            Edit("02 03 04 05", "write_kv_to_pool", "[positions // block_size]", "[(positions + 1) // block_size]"),
            Edit("06", "PagedKVCache.begin_step", "positions.clamp(min=0) //", "(positions.clamp(min=0) + 1) //"),
            Edit(PAGED, "PagedKVCache.begin_step", "gather(1, positions //", "gather(1, (positions + 1) //"),
        ),
        GITHUB + "EricLBuehler/mistral.rs/pull/552",
    ),
    Mutant(
        "start-position-forgotten",
        "new tokens are written from the request's first slot on, over its history",
        (
            Edit("01", "write_kv_to_pool", "position = start_pos + i", "position = i"),
            Edit("02 03 04 05", "write_kv_to_pool", "arange(start_pos, start_pos + k.shape[0]", "arange(0, k.shape[0]"),
            Edit("06", "PagedKVCache.begin_step", "self.slots[:, self.max_len :]", "self.slots[:, :num_tokens]"),
            Edit(PAGED, "PagedKVCache.begin_step", "seq_lens[:, None] + torch", "0 * seq_lens[:, None] + torch"),
        ),
    ),
    Mutant(
        "table-ignored-after-first-entry",
        "the request's blocks are taken to lie one behind the other in the pool",
        (
            Edit(
                "01",
                "write_kv_to_pool",
                "block_table[position // block_size]",
                "(block_table[0] + position // block_size) % len(k_pool)",
            ),
            Edit(
                "02 03 04 05",
                "write_kv_to_pool",
                "torch.tensor(block_table, device=k_pool.device)[positions // block_size]",
                "(block_table[0] + positions // block_size) % len(k_pool)",
            ),
        ),
    ),
    Mutant(
        "table-order-ignored",
        "the block table is treated as a set: blocks are used in the order of their ids",
        (
            Edit("01", "write_kv_to_pool", "block_table[position", "sorted(block_table)[position"),
            Edit("02 03 04 05", "write_kv_to_pool", "torch.tensor(block_table,", "torch.tensor(sorted(block_table),"),
            Edit(SLOTS, "PagedKVCache.begin_step", "self.block_tables[r]", "sorted(self.block_tables[r])"),
        ),
    ),
    Mutant(
        "keys-in-the-value-pool",
        "the values' pool is filled with the keys",
        (
            Edit("01", "write_kv_to_pool", "= v[i]", "= k[i]"),
            Edit("02 03 04 05", "write_kv_to_pool", "v_pool[blocks, slots] = v", "v_pool[blocks, slots] = k"),
            Edit(SLOTS, "write_slots", "index_copy_(0, slot_mapping, v)", "index_copy_(0, slot_mapping, k)"),
        ),
    ),
    Mutant(
        "added-instead-of-replaced",
        "a write adds to what the slot holds, which is right as long as every slot is new",
        (
            Edit("01", "write_kv_to_pool", "k_pool[block, slot] = k[i]", "k_pool[block, slot] += k[i]"),
            Edit(
                "02 03 04 05",
                "write_kv_to_pool",
                "k_pool[blocks, slots] = k",
                "k_pool.index_put_((blocks, slots), k, accumulate=True)",
            ),
            Edit(SLOTS, "write_slots", "index_copy_(0, slot_mapping, k)", "index_add_(0, slot_mapping, k)"),
        ),
        GITHUB + "llmmanorg/llmman/pull/118",
    ),
    Mutant(
        "rounded-on-the-way-in",
        "keys pass through bfloat16 on their way into a float32 pool",
        (
            Edit("01", "write_kv_to_pool", "= k[i]", "= k[i].bfloat16()"),
            Edit("02 03 04 05", "write_kv_to_pool", "slots] = k\n", "slots] = k.bfloat16().to(k.dtype)\n"),
            Edit(SLOTS, "write_slots", "slot_mapping, k)\n", "slot_mapping, k.bfloat16().to(k.dtype))\n"),
        ),
    ),
    Mutant(
        "last-token-not-written",
        "a prompt's last token is left out of the cache",
        (
            Edit("01", "write_kv_to_pool", "range(k.shape[0])", "range(max(1, k.shape[0] - 1))"),
            Edit(
                "02 03 04 05",
                "write_kv_to_pool",
                "v_pool[blocks, slots] = v",
                "v_pool[blocks[:-1], slots[:-1]] = v[:-1]",
            ),
        ),
    ),
    # --- reading one request's blocks
    Mutant(
        "tail-read-past-the-end",
        "whole blocks are read, the unused slots of the last one included",
        (
            Edit(SINGLE, "read_kv_from_pool", "for block in blocks])[:seq_len]\n    v", "for block in blocks])\n    v"),
            Edit(
                SINGLE,
                "read_kv_from_pool",
                "v_pool[block] for block in blocks])[:seq_len]",
                "v_pool[block] for block in blocks])",
            ),
        ),
        GITHUB + "vllm-project/vllm/issues/641",
    ),
    Mutant(
        "last-partial-block-lost",
        "the number of blocks to read is rounded down, so tokens in a block that is not full are forgotten",
        (
            Edit(
                SINGLE,
                "read_kv_from_pool",
                "math.ceil(seq_len / k_pool.shape[1])",
                "max(1, seq_len // k_pool.shape[1])",
            ),
        ),
    ),
    Mutant(
        "read-in-pool-order",
        "blocks are read in the order of their ids instead of the table's",
        (
            Edit(SINGLE, "read_kv_from_pool", "block_table[: math", "sorted(block_table)[: math"),
            Edit("03", "gather_batch_kv", "block_table[i //", "sorted(block_table)[i //"),
            Edit("04 05", "gather_batch_kv", "torch.tensor(t) for", "torch.tensor(sorted(t)) for"),
        ),
    ),
    Mutant(
        "values-read-from-the-key-pool",
        "what comes back as values are the keys",
        (
            Edit(SINGLE, "read_kv_from_pool", "v_pool[block]", "k_pool[block]"),
            Edit("03", "gather_batch_kv", "= v_pool[block, slot]", "= k_pool[block, slot]"),
            Edit("04 05", "gather_batch_kv", "v = v_pool[", "v = k_pool["),
            Edit("06", "read_slots", "v = v_pool.", "v = k_pool."),
        ),
    ),
    Mutant(
        "reshaped-instead-of-transposed",
        "heads and tokens change places by reshape, which only relabels the numbers",
        (
            Edit(SINGLE, "PagedKVCache.read", "k.transpose(0, 1)[None]", "k.reshape(k.shape[1], -1, k.shape[2])[None]"),
            Edit(BATCHED, "gather_batch_kv", "k.transpose(1, 2)", "k.reshape(k.shape[0], k.shape[2], -1, k.shape[3])"),
            Edit(
                "06",
                "PagedKVCache.update",
                "dense.transpose(1, 2)",
                "dense.reshape(len(k), k.shape[1], -1, k.shape[3])",
            ),
        ),
    ),
    # --- gathering a batch
    Mutant(
        "padded-on-the-right",
        "short histories are padded on the right while the mask hides the left",
        (
            Edit("03", "gather_batch_kv", "k[b, max_len - seq_len + i]", "k[b, i]"),
            Edit("03", "gather_batch_kv", "v[b, max_len - seq_len + i]", "v[b, i]"),
            Edit(
                "04 05",
                "gather_batch_kv",
                "- (max_len - torch.tensor(seq_lens, device=device)[:, None])\n    padding = (positions < 0)",
                ".expand(len(seq_lens), -1)\n    padding = (positions >= torch.tensor(seq_lens)[:, None])",
            ),
        ),
        GITHUB + "huggingface/transformers/pull/48161",
    ),
    Mutant(
        "padding-multiplied-away",
        "padding is made zero by multiplying, which leaves NaN and inf what they are",
        (
            Edit(
                "04 05",
                "gather_batch_kv",
                "k_pool[blocks, slots].masked_fill_(padding, 0)",
                "k_pool[blocks, slots] * ~padding",
            ),
            Edit(
                "04 05",
                "gather_batch_kv",
                "v_pool[blocks, slots].masked_fill_(padding, 0)",
                "v_pool[blocks, slots] * ~padding",
            ),
        ),
        GITHUB + "Dao-AILab/flash-attention/issues/2374",
    ),
    Mutant(
        "padding-left-as-it-is",
        "padding keeps what its slots happen to hold and relies on the mask alone",
        (
            Edit("04 05", "gather_batch_kv", "v_pool[blocks, slots].masked_fill_(padding, 0)", "v_pool[blocks, slots]"),
            Edit("03", "gather_batch_kv", "v = torch.zeros_like(k)", "v = k_pool[0, 0].expand_as(k).clone()"),
        ),
        GITHUB + "Dao-AILab/flash-attention/issues/1745",
    ),
    Mutant(
        "padding-reads-before-the-table",
        "negative positions of the padding are used as indices",
        (Edit("04 05", "gather_batch_kv", "positions = positions.clamp(min=0)", "positions = positions"),),
    ),
    Mutant(
        "everyone-reads-the-first-table",
        "every row of the batch is gathered through the first request's block table",
        (
            Edit("03", "gather_batch_kv", "block_table[i //", "block_tables[0][i //"),
            Edit("04 05", "gather_batch_kv", "tables.gather(1", "tables[:1].expand_as(tables).gather(1"),
            Edit(SLOTS, "PagedKVCache.begin_step", "self.block_tables[r]", "self.block_tables[request_ids[0]]"),
        ),
    ),
    Mutant(
        "block-border-off-by-one-in-the-gather",
        "the first token of every block but the first is looked up in the block before it",
        (
            Edit("03", "gather_batch_kv", "block_table[i // block_size]", "block_table[max(i - 1, 0) // block_size]"),
            Edit("04 05", "gather_batch_kv", "positions // block_size)", "(positions - 1).clamp(min=0) // block_size)"),
        ),
    ),
    Mutant(
        "gathered-from-the-first-layer",
        "every layer gets the first layer's history",
        (
            Edit("03", "gather_batch_kv", "= k_pool[block, slot]", "= k_pools[0][block, slot]"),
            Edit("04 05", "gather_batch_kv", "k = k_pool[", "k = k_pools[0]["),
        ),
    ),
    # --- handing out blocks
    Mutant(
        "full-block-has-room-for-one-more",
        "a block is asked for one token late: none for the first new token of a prompt that fills its last block",
        (Edit(ALL, "PagedKVCache.reserve", "(seq_len + num_tokens) /", "(seq_len + num_tokens - 1) /"),),
        GITHUB + "GeeeekExplorer/nano-vllm/issues/117",
    ),
    Mutant(
        "one-block-too-many",
        "a request whose tokens exactly fill their blocks is given an empty one on top",
        (
            Edit(
                ALL,
                "PagedKVCache.reserve",
                "math.ceil((seq_len + num_tokens) / self.block_size)",
                "(seq_len + num_tokens) // self.block_size + 1",
            ),
        ),
    ),
    Mutant(
        "blocks-it-has-not-counted",
        "every step asks for all the blocks the request needs, those that it has included",
        (Edit(ALL, "PagedKVCache.reserve", " - len(table)\n", "\n"),),
        GITHUB + "gittensor-ai-lab/sparkinfer/pull/146",
    ),
    Mutant(
        "block-handed-to-two-requests",
        "a block is put into a table and stays on the free list",
        (
            Edit(
                ALL,
                "PagedKVCache.reserve",
                "[self.free_blocks.pop() for _ in range(needed)]",
                "self.free_blocks[len(self.free_blocks) - needed :]",
            ),
        ),
        GITHUB + "LMCache/LMCache/issues/5005",
    ),
    Mutant(
        "failed-reserve-leaves-traces",
        "the request is entered before it is known whether there are blocks for it",
        (
            Edit(
                ALL,
                "PagedKVCache.reserve",
                "        if needed >",
                "        self.block_tables[request_id] = table\n        if needed >",
            ),
        ),
    ),
    Mutant(
        "blocks-taken-before-the-check",
        "what is left of the pool is taken before the request is refused",
        (
            Edit(
                ALL,
                "PagedKVCache.reserve",
                "            raise OutOfBlocks(needed, len(self.free_blocks))",
                "            needed -= len(self.free_blocks)\n            self.free_blocks.clear()\n"
                "            raise OutOfBlocks(needed, 0)",
            ),
        ),
    ),
    Mutant(
        "peak-of-the-moment",
        "peak_blocks is the number of blocks in use now, not the largest there was",
        (
            Edit(
                ALL,
                "PagedKVCache.reserve",
                "max(self.peak_blocks, self.num_blocks - len(self.free_blocks))",
                "self.num_blocks - len(self.free_blocks)",
            ),
        ),
    ),
    Mutant(
        "table-keeps-freed-blocks",
        "blocks go back to the free list and stay in the request's table",
        (Edit(ALL, "PagedKVCache.free", "self.block_tables.pop(request_id)", "self.block_tables[request_id]"),),
        GITHUB + "gittensor-ai-lab/sparkinfer/pull/185",
    ),
    Mutant(
        "one-block-never-comes-back",
        "a finished request's last block is not returned",
        (Edit(ALL, "PagedKVCache.free", "pop(request_id)", "pop(request_id)[:-1]"),),
        GITHUB + "kekzl/imp/issues/1115",
    ),
    Mutant(
        "block-freed-twice",
        "a finished request's first block is put on the free list twice",
        (
            Edit(
                ALL,
                "PagedKVCache.free",
                "self.free_blocks += self.block_tables.pop(request_id)",
                "self.free_blocks += self.block_tables[request_id][:1] + self.block_tables.pop(request_id)",
            ),
        ),
        GITHUB + "LMCache/LMCache/issues/5005",
    ),
    Mutant(
        "length-outlives-the-request",
        "a freed request's length stays, and the next request of that id starts behind it",
        (Edit(ALL, "PagedKVCache.free", "        del self.seq_lens[request_id]\n", ""),),
    ),
    # --- slots
    Mutant(
        "padding-is-slot-minus-one",
        "padding gets slot -1, which a kernel may skip but an index takes for the last slot or for an error",
        (
            Edit(
                "06", "PagedKVCache.begin_step", "positions < 0, self.num_blocks * self.block_size", "positions < 0, -1"
            ),
        ),
    ),
    Mutant(
        "padding-is-a-real-slot",
        "padding reads the pool's first slot, which some request owns",
        (
            Edit(
                "06", "PagedKVCache.begin_step", "positions < 0, self.num_blocks * self.block_size", "positions < 0, 0"
            ),
        ),
        GITHUB + "sgl-project/sglang/issues/36207",
    ),
    Mutant(
        "slots-in-32-bits",
        "block times block size is computed in int32 and overflows in a pool of more than 2147483647 slots",
        (
            Edit("06", "PagedKVCache.begin_step", "blocks = tables.gather", "blocks = tables.int().gather"),
            Edit(PAGED, "PagedKVCache.begin_step", "slots = tables.gather", "slots = tables.int().gather"),
        ),
        GITHUB + "vllm-project/vllm/issues/1486",
    ),
    # --- attention that reads the blocks
    Mutant(
        "new-token-not-counted",
        "the lengths given to the kernel leave out the new token, which therefore does not see itself",
        (Edit(PAGED, "PagedKVCache.begin_step", "(seq_lens + num_tokens).int()", "seq_lens.clamp(min=1).int()"),),
    ),
    Mutant(
        "scale-forgotten",
        "scores are not divided by the square root of head_dim",
        (Edit(PAGED, "PagedKVCache.attend", "q.shape[3] ** -0.5 if", "1.0 if"),),
    ),
    Mutant(
        "kernel-skips-every-second-block",
        "of the block table every second entry is read",
        (
            Edit(
                "07",
                "attend",
                "block_tables[b, position // block_size]",
                "block_tables[b, position // block_size // 2 * 2]",
            ),
        ),
    ),
    Mutant(
        "kernel-groups-heads-wrongly",
        "query heads are dealt out to the key heads in turn instead of in groups",
        (
            Edit("07", "attend", "head, w = heads[h],", "head, w = heads[(h - kv * group) * num_kv_heads + kv],"),
            Edit(
                "07",
                "reference_attention",
                "unflatten(0, (num_kv_heads, -1))",
                "unflatten(0, (-1, num_kv_heads)).transpose(0, 1)",
            ),
        ),
    ),
    Mutant(
        "old-sum-not-scaled-down",
        "when a larger score comes, the weights summed up before stay as they are",
        (
            Edit("07", "attend", "math.exp(tops[h] - highest)", "math.exp(highest - highest)"),
            Edit("07", "reference_attention", "summed * shrink +", "summed +"),
        ),
    ),
    Mutant(
        "tail-of-the-tile-counted",
        "a tile that is not full lends the weights of its unused places to the sum",
        (
            Edit("07", "attend", "w[i] = 0", "w[i] = w[i]"),
            Edit("07", "reference_attention", "min(block_size, seq_len - start)", "block_size"),
        ),
        GITHUB + "flashinfer-ai/flashinfer/issues/941",
    ),
    Mutant(
        "threads-added-up-as-equals",
        "the threads' sums are added without bringing them to one largest score",
        (Edit("07", "attend", "np.float32(math.exp(top[t, b, h] - highest))", "np.float32(1)"),),
    ),
    # --- compiled products
    Mutant(
        "last-outputs-not-computed",
        "outputs that do not fill four streams are left as the memory was",
        (Edit("08", "multiply", "(num_outputs + 3) // 4", "num_outputs // 4"),),
    ),
    Mutant(
        "odd-row-lost",
        "rows are worked off in pairs, and the last of an odd number is forgotten",
        (Edit("08", "multiply", "range(0, rows, 2)", "range(0, rows - 1, 2)"),),
    ),
    Mutant(
        "projections-change-places",
        "the weights handed to the compiled layer are query, value, key",
        (
            Edit(
                "08",
                "ThinLayer.__init__",
                "attention.q_proj, attention.k_proj, attention.v_proj",
                "attention.q_proj, attention.v_proj, attention.k_proj",
            ),
        ),
    ),
    Mutant(
        "norms-change-places",
        "the compiled layer gives the queries the keys' norm and the keys the queries'",
        (
            Edit(
                "08",
                "ThinLayer.__init__",
                "attention.q_norm, attention.k_norm",
                "attention.k_norm, attention.q_norm",
            ),
        ),
    ),
    # --- keeping count
    Mutant(
        "one-per-call",
        "a write counts as one token, however long the prompt",
        (
            Edit(PART_ONE, "PagedKVCache.write", "start_pos + len(k)", "start_pos + 1"),
            Edit(SLOTS, "PagedKVCache.end_step", "+= self.num_tokens", "+= 1"),
        ),
    ),
    Mutant(
        "first-layer-moves-the-length",
        "the length advances with the first layer's write, so the layers above write further on",
        (
            Edit(
                PART_ONE,
                "PagedKVCache.write",
                "k, v, table, start_pos)\n",
                "k, v, table, start_pos)\n            start_pos += len(k)\n",
            ),
            Edit(PART_ONE, "PagedKVCache.write", "= start_pos + len(k)", "+= len(k)"),
        ),
        GITHUB + "fla-org/flash-linear-attention/issues/766",
    ),
    Mutant(
        "written-into-the-first-layer",
        "every layer's keys go to the first layer's pool",
        (
            Edit(PART_ONE, "PagedKVCache.write", "self.k_pools[layer]", "self.k_pools[0]"),
            Edit("06", "PagedKVCache.update", "self.padded_k_pools[layer_idx]", "self.padded_k_pools[0]"),
            Edit(PAGED, "PagedKVCache.store", "self.k_pools[layer_idx]", "self.k_pools[0]"),
        ),
    ),
    Mutant(
        "values-one-layer-off",
        "values go to the pool of the layer below",
        (
            Edit(PART_ONE, "PagedKVCache.write", "self.v_pools[layer]", "self.v_pools[layer - 1]"),
            Edit(PAGED, "PagedKVCache.store", "self.v_pools[layer_idx]", "self.v_pools[layer_idx - 1]"),
        ),
    ),
    Mutant(
        "reshaped-before-the-write",
        "new keys are brought into the pool's layout by reshape instead of transpose",
        (
            Edit(
                PART_ONE,
                "PagedKVCache.write",
                "k[0].transpose(0, 1)",
                "k[0].reshape(k.shape[2], k.shape[1], k.shape[3])",
            ),
            Edit(
                "06",
                "PagedKVCache.update",
                "new.transpose(1, 2).flatten(0, 1)",
                "new.reshape(-1, k.shape[1], k.shape[3])",
            ),
            Edit(
                PAGED,
                "PagedKVCache.store",
                "new.transpose(1, 2).flatten(0, 1)",
                "new.reshape(-1, k.shape[1], k.shape[3])",
            ),
        ),
    ),
    # --- attention
    Mutant(
        "heads-tiled",
        "key heads are repeated 0 1 2 0 1 2 where the query heads need 0 0 1 1 2 2",
        (
            Edit(
                f"{PART_ONE} 06",
                "Attention.forward",
                "(q, k, v, attn_mask=mask, is_causal=T > 1, enable_gqa=True)",
                "(q, *(x.repeat(1, q.shape[1] // k.shape[1], 1, 1) for x in (k, v)), attn_mask=mask, is_causal=T > 1)",
            ),
        ),
        GITHUB + "onnx/onnx/pull/7274",
    ),
    Mutant(
        "prompt-sees-its-future",
        "the causal mask is missing where a prompt is run",
        (
            Edit(f"{PART_ONE} 06", "Attention.forward", "is_causal=T > 1", "is_causal=False"),
            Edit(PAGED, "PagedKVCache.attend", "is_causal=q.shape[2] > 1", "is_causal=False"),
        ),
    ),
    Mutant(
        "mask-forgotten",
        "padding takes part in attention",
        (Edit(f"{BATCHED} 06", "Attention.forward", "attn_mask=mask", "attn_mask=None"),),
    ),
    Mutant(
        "keys-not-rotated",
        "RoPE turns the queries and not the keys",
        (
            Edit(
                f"{PART_ONE} 06 07",
                "Attention.forward",
                "rotate(q, cos, sin), rotate(k, cos, sin)",
                "rotate(q, cos, sin), k",
            ),
        ),
    ),
    Mutant(
        "rope-pairs-interleaved",
        "dimension i is paired with i + 1 where these checkpoints pair it with i + D / 2",
        (Edit(f"{PART_ONE} 06 07", "rotate", "x.chunk(2, dim=-1)", "(x[..., ::2], x[..., 1::2])"),),
        GITHUB + "huggingface/transformers/issues/25199",
    ),
    Mutant(
        "rope-in-low-precision",
        "the rotation angles are rounded to bfloat16, which cannot tell position 257 from 256",
        (Edit(ALL, "Decoder.forward", "angles.cos().to(x.dtype)", "angles.bfloat16().float().cos().to(x.dtype)"),),
        GITHUB + "huggingface/candle/pull/3520",
    ),
    Mutant(
        "rope-scaling-ignored",
        "Llama 3's stretching of the slow rotations is left out",
        (Edit(ALL, "rope_frequencies", '== "llama3"', '== "llama 3"'),),
    ),
    Mutant(
        "history-behind-the-new-token",
        "past and new keys are joined in the wrong order",
        (
            Edit("01 02 03 04", "Attention.forward", "torch.cat((past_v, v), dim=2)", "torch.cat((v, past_v), dim=2)"),
            Edit("05", "ModelRunner.decode_batch", "dense.update(k, v, layer)", "dense.update(k, v.flip(2), layer)"),
        ),
    ),
    # --- the runner
    Mutant(
        "positions-of-the-padded-row",
        "every row decodes at the longest row's position: the mask is right, the position ids are not",
        (
            Edit(
                f"{BATCHED} {SLOTS}",
                "ModelRunner.decode_batch",
                "position_ids=seq_lens,",
                "position_ids=seq_lens.max().expand_as(seq_lens),",
            ),
        ),
        GITHUB + "unslothai/unsloth/issues/3699",
    ),
    Mutant(
        "position-one-too-far",
        "the new token is rotated to the position behind its own",
        (
            Edit(
                SINGLE,
                "ModelRunner.decode",
                "position_ids=torch.tensor([[self.cache.seq_lens[request_id]]]",
                "position_ids=torch.tensor([[self.cache.seq_lens[request_id] + 1]]",
            ),
            Edit(
                f"{BATCHED} {SLOTS}", "ModelRunner.decode_batch", "position_ids=seq_lens,", "position_ids=seq_lens + 1,"
            ),
        ),
        GITHUB + "microsoft/onnxruntime-genai/pull/2354",
    ),
    Mutant(
        "every-new-token-at-position-zero",
        "no position ids are passed in decoding, so each new token is taken for the first",
        (
            Edit(
                SINGLE,
                "ModelRunner.decode",
                "            position_ids=torch.tensor([[self.cache.seq_lens[request_id]]], device=self.device),\n",
                "",
            ),
            Edit(f"{BATCHED} {SLOTS}", "ModelRunner.decode_batch", "            position_ids=seq_lens,\n", ""),
        ),
        GITHUB + "Blaizzy/mlx-vlm/issues/1983",
    ),
    Mutant(
        "mask-hides-the-first-token",
        "the mask begins one column late",
        (Edit(f"{BATCHED} 06", "ModelRunner.decode_batch", "(columns >= seq_lens", "(columns > seq_lens"),),
    ),
    Mutant(
        "mask-one-column-short",
        "the mask does not cover the new token, which therefore does not see itself",
        (
            Edit(
                f"{BATCHED} 06",
                "ModelRunner.decode_batch",
                "(columns >= seq_lens.max() - seq_lens)",
                "((columns >= seq_lens.max() - seq_lens) & (columns < seq_lens.max()))",
            ),
        ),
    ),
    Mutant(
        "everyone-stores-the-first-row",
        "what is appended to every request is the first row's new keys",
        (
            Edit(BATCHED, "ModelRunner.decode_batch", "(k[b : b + 1, :, -1:],", "(k[:1, :, -1:],"),
            Edit("06", "PagedKVCache.update", "(new.transpose(1, 2)", "(new[:1].expand_as(new).transpose(1, 2)"),
            Edit(PAGED, "PagedKVCache.store", "(new.transpose(1, 2)", "(new[:1].expand_as(new).transpose(1, 2)"),
        ),
    ),
    Mutant(
        "first-token-stored-again",
        "after decoding it is the oldest key, not the newest, that is appended",
        (
            Edit(SINGLE, "ModelRunner.decode", "k[:, :, -1:]", "k[:, :, :1]"),
            Edit(BATCHED, "ModelRunner.decode_batch", "(k[b : b + 1, :, -1:],", "(k[b : b + 1, :, :1],"),
        ),
    ),
    Mutant(
        "history-appended-again",
        "after decoding the whole history is appended, not just the new token",
        (
            Edit(SINGLE, "ModelRunner.decode", "[(k[:, :, -1:], v[:, :, -1:]) for", "[(k, v) for"),
            Edit(
                BATCHED,
                "ModelRunner.decode_batch",
                "(k[b : b + 1, :, -1:], v[b : b + 1, :, -1:])",
                "(k[b : b + 1], v[b : b + 1])",
            ),
        ),
    ),
    Mutant(
        "answers-change-places",
        "the next tokens are handed back in the wrong order",
        (
            Edit(
                f"{BATCHED} {SLOTS}",
                "ModelRunner.decode_batch",
                "argmax(dim=-1).tolist()",
                "argmax(dim=-1).tolist()[::-1]",
            ),
        ),
    ),
    Mutant(
        "no-block-for-the-new-token",
        "decoding writes the new token without reserving a slot for it",
        (
            Edit(SINGLE, "ModelRunner.decode", "        self.cache.reserve(request_id, 1)\n", ""),
            Edit(
                BATCHED,
                "ModelRunner.decode_batch",
                "        for request_id in request_ids:\n            self.cache.reserve(request_id, 1)\n",
                "",
            ),
        ),
    ),
    # --- generate
    Mutant(
        "prompt-token-fed-again",
        "each step feeds the prompt's last token instead of the one just chosen",
        (
            Edit(SINGLE, "generate", "outputs[index][-1]))", "prompt[-1]))"),
            Edit(f"{BATCHED} {SLOTS}", "generate", "[outputs[index][-1] for", "[prompts[index][-1] for"),
        ),
    ),
    Mutant(
        "end-token-ignored",
        "a request goes on after its end-of-sequence token",
        (Edit(ALL, "generate", "if token in stop or len", "if len"),),
    ),
    Mutant(
        "only-the-first-end-token",
        "of several end-of-sequence tokens one is known",
        (Edit(ALL, "generate", "set(eos_token_id or ())", "set(list(eos_token_id or ())[:1])"),),
    ),
    Mutant(
        "one-token-too-many",
        "the limit is checked before the new token is counted",
        (Edit(ALL, "generate", "len(outputs[index]) == limits[index]", "len(outputs[index]) > limits[index]"),),
    ),
    Mutant(
        "answers-lost-on-failure",
        "running out of blocks throws away what was produced",
        (Edit(ALL, "generate", "error.outputs = outputs", "error.outputs = []"),),
    ),
    Mutant(
        "blocks-kept-after-failure",
        "a call that fails does not give its blocks back",
        (
            Edit(
                ALL,
                "generate",
                "            cache.free(index)\n    return",
                "            pass\n    return",
            ),
        ),
        GITHUB + "vllm-project/vllm-ascend/issues/16662",
    ),
    Mutant(
        "pool-sized-for-the-prompts",
        "the default pool has no room for the new tokens",
        (Edit(ALL, "generate", "(len(p) + n - 1) / block_size", "len(p) / block_size"),),
    ),
    # --- the model around it
    Mutant(
        "norm-after-rotation",
        "Qwen3's norm of the queries comes after RoPE",
        (
            Edit(
                f"{PART_ONE} 06 07",
                "Attention.forward",
                "q = self.q_norm(self.q_proj(x).view(B, T, -1, self.head_dim)).transpose(1, 2)",
                "q = self.q_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)",
            ),
            Edit(
                f"{PART_ONE} 06 07",
                "Attention.forward",
                "rotate(q, cos, sin), rotate(k",
                "self.q_norm(rotate(q, cos, sin)), rotate(k",
            ),
        ),
    ),
    Mutant(
        "bias-forgotten",
        "Qwen2's biases of queries, keys and values are left out",
        (
            Edit(f"{PART_ONE} 06 07", "Attention.forward", "v = self.v_proj(x)", "v = F.linear(x, self.v_proj.weight)"),
            Edit(
                "08", "ThinLayer.__init__", "torch.empty(0, 0) if p.bias is None else p.bias[None]", "torch.empty(0, 0)"
            ),
        ),
    ),
)

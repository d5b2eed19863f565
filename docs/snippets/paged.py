"""The arithmetic of the page on paged KV."""

import math

# --8<-- [start:locate]
block_size, block_table = 4, [5, 1, 3]  # request A

position = 9
block, slot = block_table[position // block_size], position % block_size
assert (block, slot) == (3, 1)
# --8<-- [end:locate]

# --8<-- [start:blocks_needed]
block_size, seq_len, num_tokens = 4, 8, 1  # two full blocks, and one token more
blocks_held = math.ceil(seq_len / block_size)
blocks_wanted = math.ceil((seq_len + num_tokens) / block_size)
assert (blocks_held, blocks_wanted) == (2, 3)  # the ninth token needs a block of its own
assert math.ceil((7 + num_tokens) / block_size) == 2  # the eighth still fits
# --8<-- [end:blocks_needed]

# --8<-- [start:waste]
block_size = 16
for seq_len in (1, 15, 16, 17, 1000):
    unused = -seq_len % block_size  # slots of the last block that hold nothing
    assert unused < block_size
    assert unused == math.ceil(seq_len / block_size) * block_size - seq_len
# --8<-- [end:waste]


# --8<-- [start:bytes]
def kv_bytes_per_token(num_layers, num_kv_heads, head_dim, bytes_per_number):
    return 2 * num_layers * num_kv_heads * head_dim * bytes_per_number  # 2: one K, one V


assert kv_bytes_per_token(30, 3, 64, 4) == 45 * 1024  # SmolLM2-135M in float32
assert kv_bytes_per_token(28, 4, 128, 2) == 56 * 1024  # Qwen2.5-7B in float16
# --8<-- [end:bytes]

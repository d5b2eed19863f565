"""paged_attention by the package flash-attn: CUDA, float16 or bfloat16, block sizes that are multiples of 256.

Source: flash_attn_with_kvcache of flash-attn 2.5 and later; versions 3 and 4 call the table page_table.
"""


def flash_arguments(q, k_pool, v_pool, block_tables, seq_lens, scale):
    """The arguments of flash_attn_with_kvcache for those of paged_attention, whose newest token is stored already."""
    return {
        "q": q[:, None],  # [B, T = 1, H, D]
        "k_cache": k_pool,
        "v_cache": v_pool,
        "cache_seqlens": seq_lens.int(),
        "block_table": block_tables.int(),
        "softmax_scale": scale,
        "causal": False,  # the only query may see everything that is stored
    }


def paged_attention(q, k_pool, v_pool, block_tables, seq_lens, scale):
    """As paged_attention in model.py."""
    from flash_attn import flash_attn_with_kvcache

    return flash_attn_with_kvcache(**flash_arguments(q, k_pool, v_pool, block_tables, seq_lens, scale))[:, 0]

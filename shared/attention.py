"""Let transformers' own models attend through block tables, where a step's cache can do that.

A step's PagedKVCache with a method `attend(q, k, v, layer_idx, scale)` needs no history handed to the model. Its
attention is registered with transformers under a name, in both registries: the one of attention functions, and the one
of masks, because a name that is only in the first gets no mask from transformers and says nothing. Here no mask is
what is meant: the cache knows how long each request is, and nothing is padded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache

NAME = "block_tables"
# Families whose attention is softmax(q k / sqrt(D)) v over the whole history, called through the registry.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


class Handover(Cache):
    """What the model takes for its cache: it keeps nothing, and marks the new keys with the cache that will."""

    def __init__(self, paged):
        super().__init__(layers=[])
        self.paged = paged

    def update(self, k: Tensor, v: Tensor, layer_idx: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        k.paged_cache = self.paged
        return k, v

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.paged.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.paged.get_mask_sizes(query_length, layer_idx)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling=None, **kwargs
) -> tuple[Tensor, None]:
    """The attention function of the name above. query: [B, H, T, D]; key and value: the new ones, [B, K, T, D]."""
    out = key.paged_cache.attend(query, key, value, module.layer_idx, scaling)
    return out.transpose(1, 2), None


def no_mask(*args, **kwargs) -> None:
    return None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, no_mask)


def can_read_blocks(model: nn.Module) -> bool:
    """Whether this transformers model's attention may be replaced: full attention to the history, in every layer."""
    config = model.config
    full = all(kind == "full_attention" for kind in getattr(config, "layer_types", None) or [])
    # Mistral has no such list: its window is there or None. Qwen has a window that may be switched off.
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    return config.model_type in FAMILIES and full and window is None


@contextmanager
def block_tables(model: nn.Module) -> Iterator[None]:
    """The model has the registered attention meanwhile, and needs a Handover for its cache."""
    before = model.config._attn_implementation
    model.config._attn_implementation = NAME
    try:
        yield
    finally:
        model.config._attn_implementation = before

"""What the steps are compared with and do not share: transformers, and a dictionary of dense tensors."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 211
MAX_POSITIONS = 128

# Small enough for milliseconds, and uneven wherever a decoder could go wrong unseen: head_dim is not
# hidden_size / num_attention_heads in llama3 and qwen3, and no two sizes of one model are equal.
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "num_hidden_layers": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# With a base of 100 and 32 original positions the four kinds of wavelength all occur: one shorter than 32 / 4 (kept),
# one between (blended), and some longer than 32 (stretched).
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@dataclass(frozen=True)
class Kind:
    """One family of tiny models. `shard_size` is what save_pretrained may put into one file."""

    model_class: type
    config_class: type
    settings: dict
    shard_size: str = "1GB"

    def config(self, **changes):
        return self.config_class(**{**_SIZES, **self.settings, **changes})


KINDS = {
    "llama": Kind(
        LlamaForCausalLM,
        LlamaConfig,
        {
            "hidden_size": 72,
            "intermediate_size": 100,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
        },
    ),
    "llama3": Kind(
        LlamaForCausalLM,
        LlamaConfig,
        {
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rope_parameters": _LLAMA3_ROPE,
            "tie_word_embeddings": False,
        },
        shard_size="30KB",
    ),
    "qwen2": Kind(
        Qwen2ForCausalLM,
        Qwen2Config,
        {
            "hidden_size": 48,
            "intermediate_size": 68,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3": Kind(
        Qwen3ForCausalLM,
        Qwen3Config,
        {
            "hidden_size": 36,
            "intermediate_size": 60,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "tie_word_embeddings": True,
        },
        shard_size="30KB",
    ),
}


@cache
def hf_model(kind: str) -> PreTrainedModel:
    """A tiny transformers model of this kind in float32, the same in every process.

    Every parameter is random, norms and biases too: with the ones and zeros of a fresh model a decoder that forgets
    them would pass. Weights are large enough for every token of the history to move the logits by 0.1 or more,
    embeddings small enough for a tied head not to simply repeat the last token; the last norm brings the logits down
    to about 3, where rounding in float32 is below 1e-5.
    """
    model = KINDS[kind].model_class(KINDS[kind].config()).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            parameter.copy_((1 + 0.3 * noise) * (0.25 if name == "model.norm.weight" else 1))
        elif name.endswith("bias") or "embed_tokens" in name:
            parameter.copy_(0.3 * noise)
        else:
            parameter.copy_(2 * noise / parameter.shape[1] ** 0.5)
    return model


def save_model(kind: str, folder: Path) -> Path:
    """Write the tiny model as an ordinary model folder (in several files for the kinds that say so)."""
    hf_model(kind).save_pretrained(folder, max_shard_size=KINDS[kind].shard_size)
    return folder


def prompt(length: int, seed: int = 0) -> list[int]:
    """`length` random token ids, the same for the same arguments."""
    return random.Random(1000 * seed + length).choices(range(VOCAB_SIZE), k=length)


@cache
def _greedy(kind: str, prompt: tuple[int, ...], num_tokens: int) -> tuple[tuple[int, ...], torch.Tensor]:
    ids, logits = list(prompt), []
    for _ in range(num_tokens):
        logits.append(hf_model(kind)(torch.tensor([ids]), use_cache=False).logits[0, -1])
        best = logits[-1].topk(2)
        assert best.values[0] - best.values[1] > 5e-5, "rounding could decide this token: take another prompt"
        ids.append(int(best.indices[0]))
    return tuple(ids[len(prompt) :]), torch.stack(logits)


def greedy(kind: str, prompt: list[int], num_tokens: int) -> list[int]:
    """The next token ids by transformers, which runs the whole sequence again for every token and caches nothing."""
    return list(_greedy(kind, tuple(prompt), num_tokens)[0])


def greedy_logits(kind: str, prompt: list[int], num_tokens: int) -> torch.Tensor:
    """The logits those ids were chosen from, [num_tokens, vocab_size]."""
    return _greedy(kind, tuple(prompt), num_tokens)[1]


def until(ids: list[int], stop: set[int]) -> list[int]:
    """`ids` up to and with the first that is in `stop`."""
    for i, token in enumerate(ids):
        if token in stop:
            return ids[: i + 1]
    return ids


class DenseKV:
    """What a paged cache should hold: per request and layer a dense k and v [num_tokens, num_kv_heads, head_dim]."""

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32):
        self.num_layers = num_layers
        self.empty = torch.empty(0, num_kv_heads, head_dim, dtype=dtype)
        self.layers: dict = {}

    def append(self, request_id, new: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Put one (k, v) per layer behind what the request has."""
        old = self.layers.get(request_id, [(self.empty, self.empty)] * self.num_layers)
        self.layers[request_id] = [
            (torch.cat((old_k, k)), torch.cat((old_v, v))) for (old_k, old_v), (k, v) in zip(old, new)
        ]

    def free(self, request_id) -> None:
        del self.layers[request_id]

    def seq_len(self, request_id) -> int:
        return len(self.layers[request_id][0][0])

    def batch(self, request_ids: list) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Per layer (k, v), each [batch, num_kv_heads, longest, head_dim], zeros on the left of the shorter ones."""
        return [
            tuple(self._pad([self.layers[r][layer][side] for r in request_ids]) for side in (0, 1))
            for layer in range(self.num_layers)
        ]

    @staticmethod
    def _pad(rows: list[torch.Tensor]) -> torch.Tensor:
        longest = max(len(row) for row in rows)
        padded = [torch.cat((row.new_zeros(longest - len(row), *row.shape[1:]), row)) for row in rows]
        return torch.stack(padded).transpose(1, 2)

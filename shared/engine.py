"""`--engine transformers`: a step's runner and pools around transformers' own model, in place of the step's decoder.

The steps' runners call whatever model they are given, and read a few attributes of its config. Not every architecture
has them, so the size of its keys and values is measured: one token is run, and what lands in the cache is looked at.
"""

from __future__ import annotations

import functools
import inspect
import sys
from itertools import dropwhile
from pathlib import Path
from types import ModuleType

import torch
import transformers
from torch import nn

from shared.errors import UserError
from shared.steps import Step, list_steps


def load_model(step: ModuleType, engine: str, folder: str | Path, device="cpu", dtype=torch.float32) -> nn.Module:
    """The model in `folder` for this step's runner: `step.load_model`'s, or transformers'.

    Raises:
        ValueError: the step's decoder cannot be this model (from `step.load_model`).
        UserError: transformers cannot load it, or its keys and values do not fit the steps' pools.
    """
    if engine == "own":
        return step.load_model(folder, device=device, dtype=dtype)
    if not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"transformers {transformers.__version__} cannot load {folder}: {reason}") from error
    return TransformersModel(model.to(device))


def build_model(step: ModuleType, engine: str, config) -> nn.Module:
    """The same, with random weights, from a transformers config."""
    if engine == "own":
        return step.build_model(config)
    return TransformersModel(transformers.AutoModelForCausalLM.from_config(config))


class TransformersModel(nn.Module):
    """A transformers causal LM as the steps' runners call it: same forward, plus what some architectures lack.

    `config` has the sizes of the cache as measured, and everything else from the model's own (text) config.
    Raises UserError for a model whose cache is not one k and one v [B, K, T, D] per layer.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        parameters = inspect.signature(model.forward).parameters
        cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self.config = CacheConfig(model, cache_argument)
        takes_positions = "position_ids" in parameters
        # Nobody reads the logits of a prompt's other tokens; without this they cost [T, vocab_size] floats.
        extra = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}

        @functools.wraps(model.forward)  # a runner may look at the signature for the name of the cache argument
        def forward(*args, **kwargs):
            if not takes_positions:  # such a model counts them from the attention mask
                kwargs.pop("position_ids", None)
            try:
                return run(model, args, kwargs | extra, cache_argument)
            except (AttributeError, TypeError, ValueError) as error:
                if isinstance(kwargs.get("past_key_values"), tuple):
                    raise UserError(no_tuples(error)) from error
                raise

        self.forward = forward


def run(model: nn.Module, args: tuple, kwargs: dict[str, object], cache_argument: str):
    """The model's output; its attention goes through the cache's block table, if both the cache and the model can."""
    cache = kwargs.get(cache_argument)
    if not hasattr(cache, "attend"):
        return model(*args, **kwargs)
    from shared.attention import Handover, block_tables, can_read_blocks  # needs what old versions do not have

    if not can_read_blocks(model):
        return model(*args, **kwargs)
    with block_tables(model):
        return model(*args, **kwargs | {cache_argument: Handover(cache), "attention_mask": None})


class CacheConfig:
    """A model's config with num_hidden_layers, num_key_value_heads, head_dim as its cache has them."""

    def __init__(self, model: nn.Module, cache_argument: str):
        # A config may hold several, of which one is the text model's. Old versions know no such configs.
        text_config = getattr(model.config, "get_text_config", None)
        self.config = text_config() if text_config else model.config
        self.num_hidden_layers, self.num_key_value_heads, self.head_dim = cache_shape(model, cache_argument)
        self.vocab_size = model.get_input_embeddings().num_embeddings
        # Without a table of positions (ALiBi) there is no limit.
        self.max_position_embeddings = getattr(self.config, "max_position_embeddings", None) or sys.maxsize

    def __getattr__(self, name: str):
        return getattr(self.__dict__["config"], name)


@torch.inference_mode()
def cache_shape(model: nn.Module, cache_argument: str) -> tuple[int, int, int]:
    """(layers, num_kv_heads, head_dim) of the keys and values that one token leaves in the model's cache."""
    cache = transformers.DynamicCache()
    token = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
    name = type(model).__name__
    try:
        model(token, use_cache=True, **{cache_argument: cache})
        shapes = {tensor.shape for k, v, *_ in cache for tensor in (k, v)}
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise UserError(
            f"{name} does not keep its history as keys and values in a DynamicCache ({error}): "
            "the steps can only drive models that do"
        ) from error
    if len(shapes) != 1 or len(min(shapes)) != 4:
        raise UserError(
            f"{name} keeps {' and '.join(str(tuple(shape)) for shape in sorted(shapes))} for one token: "
            "the steps' pools have one size of keys and values for all layers"
        )
    _, num_kv_heads, _, head_dim = shapes.pop()
    return len(list(cache)), num_kv_heads, head_dim


def steps_with_cache_object() -> list[Step]:
    """The first step that hands the model a DynamicCache, and those after it: today's transformers takes no tuple."""
    return list(dropwhile(lambda step: "DynamicCache" not in step.model_py.read_text(encoding="utf-8"), list_steps()))


def no_tuples(error: Exception) -> str:
    """Why a step that passes its history as a tuple stops here, and what to run instead."""
    instead = [step.slug for step in steps_with_cache_object()[:1]]
    return (
        f"transformers {transformers.__version__} takes no tuple as past_key_values, as versions before 4.48 did "
        f"({type(error).__name__}: {error}): run {' or '.join([*instead, '--engine own'])}"
    )

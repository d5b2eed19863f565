"""Try every way of handing a cache to the transformers installed here: `python -m shared.compat.probe` prints JSON.

Run by `python -m shared.compat`, once in each version's environment. Nothing here asks for the version.
"""

from __future__ import annotations

import inspect
import json
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict

import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from shared.compat import hunt
from shared.compat.watch import messages
from shared.engine import TransformersModel, steps_with_cache_object
from shared.steps import Step, code_hash, list_steps, load_step

FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}
PROMPT, TOKEN, NEIGHBOUR = [11, 3, 42], 17, [7, 29, 60, 5, 81, 2, 33]
TOLERANCE = 1e-3  # the logits are of order 10, and another history moves them by more than 1


def random_model(family: str):
    """A tiny model in which the history matters: weights far larger than those training starts from."""
    config_class, model_class = FAMILIES[family]
    torch.manual_seed(0)
    config = config_class(
        vocab_size=99,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    return model_class(config).eval().requires_grad_(False)


def last_logits(model, tokens: list[int]) -> torch.Tensor:
    """What the last token's logits [vocab_size] must be: the whole sequence at once, and no cache."""
    return model(torch.tensor([tokens]), use_cache=False).logits[0, -1]


def prefilled(model, tokens: list[int]) -> tuple:
    """One (k, v) per layer, each [1, K, T, D]: the tokens' history."""
    cache = DynamicCache()
    model(torch.tensor([tokens]), use_cache=True, **{cache_argument(model): cache})
    return tuple((k, v) for k, v, *_ in cache)


def cache_argument(model) -> str:
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def filled(past: tuple) -> DynamicCache:
    cache = DynamicCache()
    for layer, (k, v) in enumerate(past):
        cache.update(k, v, layer)
    return cache


# ---- ways of calling the model: the cache's part of the arguments, made from the history and from `by_signature`

PREFILLS: dict[str, Callable] = {
    "nothing": lambda past, by_signature: {},
    "empty": lambda past, by_signature: {"past_key_values": DynamicCache()},
    "empty_as_cache": lambda past, by_signature: {"cache": DynamicCache()},
    "empty_by_signature": lambda past, by_signature: {by_signature: DynamicCache()},
}
DECODES: dict[str, Callable] = {
    "tuple": lambda past, by_signature: {"past_key_values": past},
    "filled": lambda past, by_signature: {"past_key_values": filled(past)},
    "filled_as_cache": lambda past, by_signature: {"cache": filled(past)},
    "filled_by_signature": lambda past, by_signature: {by_signature: filled(past)},
    "from_legacy_cache": lambda past, by_signature: {by_signature: DynamicCache.from_legacy_cache(past)},
    "cache_of_tuple": lambda past, by_signature: {by_signature: DynamicCache(past)},
}


def try_call(model, build: Callable, tokens: list[int], past: tuple) -> dict:
    """`messages` come from the call, `reading` from looking at the cache in its output afterwards.

    `logits_equal`: to those of the whole sequence without a cache. `cached`: tokens in the cache that the caller
    passed, or in the one that came back when none was passed.
    """
    sequence = [*past_tokens(past), *tokens]
    expected = last_logits(model, sequence)
    failure = None
    with messages() as found:
        try:
            arguments = build(past, cache_argument(model))
            out = model(torch.tensor([tokens]), use_cache=True, **arguments)
        except Exception as error:
            failure = error
    if failure:
        return {"error": describe(failure), "messages": [asdict(message) for message in found]}
    with messages() as reading:
        returned = out.past_key_values
    passed = next(iter(arguments.values()), None)
    layers = list(returned if passed is None or isinstance(passed, tuple) else passed)
    return {
        "messages": [asdict(message) for message in found],
        "reading": [asdict(message) for message in reading],
        "returns": type(returned).__name__,
        "logits_equal": bool((out.logits[0, -1] - expected).abs().max() < TOLERANCE),
        "cached": layers[0][0].shape[2] if layers and layers[0][0] is not None else 0,
        "expected": len(sequence),
    }


def past_tokens(past: tuple) -> list[int]:
    """The tokens whose history `past` is."""
    return PROMPT if past else []


def describe(error: BaseException) -> dict[str, str]:
    return {"type": type(error).__name__, "text": " ".join(str(error).split())}


# ---- what a cache can do


READS: dict[str, Callable] = {
    "iterate": lambda cache: list(cache)[1][0],
    "index": lambda cache: cache[1][0],
    "key_cache": lambda cache: cache.key_cache[1],
    "layers": lambda cache: cache.layers[1].keys,
    "to_legacy_cache": lambda cache: cache.to_legacy_cache()[1][0],
}


def try_read(read: Callable, past: tuple) -> dict:
    """Whether `read` gives layer 1's keys, and what is said on the way."""
    cache = filled(past)
    with messages() as found:
        try:
            keys = read(cache)
        except Exception as error:
            return {"error": describe(error)}
    return {"equal": torch.equal(keys, past[1][0]), "messages": [asdict(message) for message in found]}


def copies(past: tuple) -> dict:
    """What `update` does with memory: whether it copies what it is given first, and all it has for each new token."""
    k, v = (tensor.clone() for tensor in past[0])
    cache = DynamicCache()
    first, _ = cache.update(k, v, 0)
    second, _ = cache.update(k[:, :, :1], v[:, :, :1], 0)
    return {
        "first_fill": first.data_ptr() != k.data_ptr(),
        "each_step": second.data_ptr() != first.data_ptr(),
        "items_per_layer": len(next(iter(filled(past)))),
    }


# ---- left padding: a short and a long request in one batch, the short one padded on the left

PADDING = {
    "mask_and_positions": ("attention_mask", "position_ids"),
    "mask_only": ("attention_mask",),
    "positions_only": ("position_ids",),
    "neither": (),
}


def pad_error(model, given: tuple[str, ...], phase: str) -> dict:
    """How far the short request's logits are from those of the request alone, and what is said about it.

    phase: "prefill" runs both prompts as one padded batch; "decode" prefills each alone, pads the histories with
    zeros as the steps do, and runs one token behind them.
    """
    missing = len(NEIGHBOUR) - len(PROMPT)
    if phase == "prefill":
        tokens, length = [[0] * missing + PROMPT, NEIGHBOUR], len(NEIGHBOUR)
        positions = [[0] * missing + list(range(len(PROMPT))), list(range(length))]
        expected, cache = last_logits(model, PROMPT), DynamicCache()
    else:
        tokens, length = [[TOKEN], [TOKEN]], len(NEIGHBOUR) + 1
        positions = [[len(PROMPT)], [len(NEIGHBOUR)]]
        expected = last_logits(model, [*PROMPT, TOKEN])
        short, long = prefilled(model, PROMPT), prefilled(model, NEIGHBOUR)
        pad = torch.nn.functional.pad
        cache = filled(
            tuple(
                tuple(torch.cat((pad(a, (0, 0, missing, 0)), b)) for a, b in zip(short_kv, long_kv))
                for short_kv, long_kv in zip(short, long)
            )
        )
    arguments = {
        "attention_mask": torch.tensor([[0] * missing + [1] * (length - missing), [1] * length]),
        "position_ids": torch.tensor(positions),
    }
    arguments = {name: arguments[name] for name in given} | {cache_argument(model): cache}
    with messages() as found:
        out = model(torch.tensor(tokens), use_cache=True, **arguments)
    return {
        "error": float((out.logits[0, -1] - expected).abs().max()),
        "messages": [asdict(message) for message in found],
    }


# ---- the steps, around this version's own models


def compared_steps() -> list[Step]:
    """The steps up to the first that hands the model a DynamicCache: those after it are for today's versions only."""
    steps = list_steps()
    return steps[: steps.index(steps_with_cache_object()[0]) + 1]


def try_step(step: Step, model) -> dict:
    """Whether the step generates the tokens that the model gives without any cache, and every message on the way.

    After an error: what transformers raised, and what is `shown` to the user of `--engine transformers` instead.
    """
    prompts = [PROMPT, NEIGHBOUR, [5], NEIGHBOUR * 2]
    expected = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(10):
            tokens.append(int(last_logits(model, tokens).argmax()))
        expected.append(tokens[len(prompt) :])
    failure = None
    with messages() as found:
        try:
            generated = load_step(step).generate(TransformersModel(model), prompts, 10, block_size=4)
        except Exception as error:
            failure = error
    result = {"messages": [asdict(message) for message in found]}
    if failure:
        return result | {"error": describe(failure.__cause__ or failure), "shown": str(failure)}
    return result | {"tokens_equal": generated == expected}


@torch.inference_mode()
def probe(family: str) -> dict:
    model = random_model(family)
    past = prefilled(model, PROMPT)
    return {
        "cache_argument": cache_argument(model),
        "prefill": {name: try_call(model, build, PROMPT, ()) for name, build in PREFILLS.items()},
        "decode": {name: try_call(model, build, [TOKEN], past) for name, build in DECODES.items()},
        "reads": {name: try_read(read, past) for name, read in READS.items()},
        "copies": copies(past),
        "padding": {
            phase: {name: pad_error(model, given, phase) for name, given in PADDING.items()}
            for phase in ("prefill", "decode")
        },
        "steps": {step.slug: try_step(step, model) for step in compared_steps()},
    }


def everything() -> dict:
    """What results/compat/VERSION.json holds."""
    torch.set_num_threads(1)
    return {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "code_hashes": {step.slug: code_hash(step) for step in compared_steps()},
        "families": {family: probe(family) for family in FAMILIES},
        "hunt": hunt.record(random_model("llama"), PROMPT, TOKEN),
    }


if __name__ == "__main__":
    json.dump(everything(), sys.stdout, indent=1)

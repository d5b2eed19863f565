"""What is measured: every step, and transformers as the baseline, behind the same few calls.

A subject holds a model; `start(lengths, room)` gives it empty caches, `fill_history()` or `prefill(prompts)` fills
them, `decode(tokens)` is one engine step of decode for all requests. `generate` is the whole thing, as a user calls it.
"""

from __future__ import annotations

import inspect
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import ClassVar

import torch
import torch.nn.functional as F
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig, StoppingCriteria
from transformers.utils import is_flash_attn_2_available

from shared.bench.measure import replaced, synchronize
from shared.bench.plan import BASELINE
from shared.bench.workloads import SHAPE
from shared.engine import TransformersModel
from shared.models import resolve_model, shape_config
from shared.steps import Step, code_hash, find_step, load_step

BLOCK_SIZE = 16

OnToken = Callable[[int, int], None]


def why_no_flash_attention(device: str, dtype: torch.dtype) -> str | None:
    """Why transformers cannot be measured with flash-attn here; None if it can."""
    if not device.startswith("cuda"):
        return "flash-attn needs a CUDA device"
    if dtype == torch.float32:
        return "flash-attn computes in half precision only"
    return None if is_flash_attn_2_available() else "flash-attn is not installed"


def load_baseline_model(model: str, device: str, dtype: torch.dtype, attention: str = "sdpa") -> torch.nn.Module:
    """The transformers model of that name; for a shape, one with random weights that are the same in every process."""
    if model.startswith(SHAPE):
        torch.manual_seed(0)
        with torch.device(device):
            loaded = AutoModelForCausalLM.from_config(
                shape_config(model.removeprefix(SHAPE)), dtype=dtype, attn_implementation=attention
            )
    else:
        loaded = AutoModelForCausalLM.from_pretrained(resolve_model(model), dtype=dtype, attn_implementation=attention)
    return loaded.to(device).eval().requires_grad_(False)


def load_step_model(module: ModuleType, model: str, device: str, dtype: torch.dtype) -> torch.nn.Module:
    """The step's own decoder with the same weights as the baseline's."""
    if not model.startswith(SHAPE):
        return module.load_model(resolve_model(model), device=device, dtype=dtype)
    reference = load_baseline_model(model, device, dtype)
    decoder = module.build_model(reference.config).to(device, dtype)
    decoder.load_state_dict(reference.state_dict(), assign=True)
    return decoder.eval().requires_grad_(False)


def random_history(config: object, request: int, layer: int, length: int, device: object, dtype: torch.dtype):
    """Stand-in keys and values [length, K, D] of one request and layer; the same for every subject."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    generator = torch.Generator().manual_seed(1000 * request + layer)
    shape = (2, length, config.num_key_value_heads, head_dim)
    k, v = torch.randn(shape, generator=generator).to(device, dtype)
    return k, v


def fill_pools(cache: object, config: object, lengths: list[int]) -> None:
    """Give request 0, 1, ... of a step's PagedKVCache a random history of that length, straight into the pools."""
    device, dtype = cache.k_pools[0].device, cache.k_pools[0].dtype
    for request, length in enumerate(lengths):
        cache.reserve(request, length)
        positions = torch.arange(length, device=device)
        blocks = torch.tensor(cache.block_tables[request], device=device)[positions // cache.block_size]
        for layer in range(config.num_hidden_layers):
            k, v = random_history(config, request, layer, length, device, dtype)
            cache.k_pools[layer][blocks, positions % cache.block_size] = k
            cache.v_pools[layer][blocks, positions % cache.block_size] = v
        cache.seq_lens[request] = length


class Sections:
    """What named sections of a run cost, by a meter that only goes up (milliseconds, or operators dispatched).

    `spent` maps a section's name to the meter's growth inside it. Sections do not nest: the outermost wins.
    """

    def __init__(self, meter: Callable[[], object]):
        self.meter, self.spent, self._open = meter, {}, False

    def wrap(self, name: str, function: Callable, applies: Callable[..., bool] = lambda *a, **k: True) -> Callable:
        def wrapped(*args, **kwargs):
            if self._open or not applies(*args, **kwargs):
                return function(*args, **kwargs)
            self._open = True
            before = self.meter()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent[name] = self.spent.get(name, 0) + (self.meter() - before)
                self._open = False

        return wrapped


def joins_history(tensors, dim: int = 0, **_) -> bool:
    """Is this torch.cat the one that appends new K/V [B, K, T, D] to the history?"""
    return dim in (2, -2) and tensors[0].dim() == 4


class Subject:
    """Common to both kinds. Subclasses set `name`, `code`, `model`, `device`, `dtype`."""

    name: str
    code: str
    model: torch.nn.Module
    device: str
    dtype: torch.dtype

    def start(self, lengths: list[int], room: int) -> None:
        """Empty caches for requests whose histories will be `lengths` tokens long, with room for `room` more each."""
        raise NotImplementedError

    def fill_history(self) -> None:
        """Fill the caches up to the lengths given to `start` with random_history, bypassing the model."""
        raise NotImplementedError

    def prefill(self, prompts: list[list[int]]) -> list[int]:
        raise NotImplementedError

    def decode(self, tokens: list[int]) -> list[int]:
        raise NotImplementedError

    def generate(self, prompts: list[list[int]], new_tokens: int, on_token: OnToken) -> list[list[int]]:
        raise NotImplementedError

    def kv_bytes(self) -> int:
        """Bytes of keys and values held for the requests at the peak since `start` or `generate`."""
        raise NotImplementedError

    def floor(self, batch: int) -> Callable[[], object]:
        """The forward pass that a decode step makes, without any cache or history."""
        ids = torch.ones(batch, 1, dtype=torch.long, device=self.device)
        positions = torch.full_like(ids, 100)
        return lambda: self.model(ids, position_ids=positions, use_cache=False)

    def _sections(self, sections: Sections) -> list[tuple[object, str, object]]:
        """What to replace so that the subject's parts are timed; both kinds share these."""
        attention = F.scaled_dot_product_attention
        return [
            (F, "scaled_dot_product_attention", sections.wrap("attention", attention)),
            (torch, "cat", sections.wrap("cache", torch.cat, joins_history)),
            (DynamicCache, "update", sections.wrap("cache", DynamicCache.update)),
        ]

    @contextmanager
    def sections(self, meter: Callable[[], object] | None = None) -> Iterator[Sections]:
        """Meter the parts of what runs inside, in milliseconds unless another meter is given.

        Names: attention, gather, write, cache (copies that the cache object makes to append or to be filled).
        """
        sections = Sections(meter or self._milliseconds)
        with replaced(self._sections(sections)):
            yield sections

    def _milliseconds(self) -> float:
        synchronize(self.device)
        return 1e3 * time.perf_counter()


class StepSubject(Subject):
    """One step of the ladder. Its pools' free blocks are shuffled, so that every block table is fragmented."""

    PARTS: ClassVar = {
        "write_kv_to_pool": "write",
        "write_slots": "write",
        "read_kv_from_pool": "gather",
        "gather_batch_kv": "gather",
        "read_slots": "gather",
        "paged_attention": "attention",
    }

    def __init__(self, step: Step, model: torch.nn.Module):
        self.name, self.code, self.module, self.model = step.slug, code_hash(step), load_step(step), model
        weight = next(model.parameters())
        self.device, self.dtype = str(weight.device), weight.dtype
        self.runner, self.lengths = None, []

    def start(self, lengths: list[int], room: int) -> None:
        self.runner, self.lengths = None, list(lengths)
        blocks = sum(math.ceil((length + room) / BLOCK_SIZE) for length in lengths)
        self.runner = self.module.ModelRunner(self.model, num_blocks=blocks, block_size=BLOCK_SIZE)
        random.Random(0).shuffle(self.runner.cache.free_blocks)

    def fill_history(self) -> None:
        fill_pools(self.runner.cache, self.model.config, self.lengths)

    def prefill(self, prompts: list[list[int]]) -> list[int]:
        return [self.runner.prefill(request, prompt) for request, prompt in enumerate(prompts)]

    def decode(self, tokens: list[int]) -> list[int]:
        if hasattr(self.runner, "decode_batch"):
            return self.runner.decode_batch(list(range(len(tokens))), tokens)
        return [self.runner.decode(request, token) for request, token in enumerate(tokens)]

    def generate(self, prompts: list[list[int]], new_tokens: int, on_token: OnToken) -> list[list[int]]:
        self.start([len(prompt) for prompt in prompts], new_tokens)
        return self.module.generate(self.model, prompts, new_tokens, runner=self.runner, on_token=on_token)

    def kv_bytes(self) -> int:
        cache = self.runner.cache
        block = sum(pool[0].numel() * pool[0].element_size() for pool in (cache.k_pools[0], cache.v_pools[0]))
        return cache.peak_blocks * block * self.model.config.num_hidden_layers

    def floor(self, batch: int) -> Callable[[], object]:
        if hasattr(self.module.ModelRunner, "decode_batch"):
            return super().floor(batch)
        single = super().floor(1)
        return lambda: [single() for _ in range(batch)]

    def _sections(self, sections: Sections) -> list[tuple[object, str, object]]:
        own = [
            (self.module, f, sections.wrap(s, getattr(self.module, f)))
            for f, s in self.PARTS.items()
            if hasattr(self.module, f)
        ]
        begin = getattr(self.module.PagedKVCache, "begin_step", None)
        if begin is not None:  # computes the slot ids or block table that the reads of all layers share
            own.append((self.module.PagedKVCache, "begin_step", sections.wrap("gather", begin)))
        return super()._sections(sections) + own


class _Clock(StoppingCriteria):
    """Called by generate after every token of the batch: passes it on, never stops."""

    def __init__(self, device: str, on_token: OnToken):
        self.device, self.on_token = device, on_token

    def __call__(self, input_ids, scores, **kwargs):
        for index, token in enumerate(input_ids[:, -1].tolist()):
            self.on_token(index, token)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class BaselineSubject(Subject):
    """transformers: `generate` end to end, and the same prefill and decode by hand with its DynamicCache."""

    def __init__(self, model: torch.nn.Module, name: str = BASELINE):
        self.name, self.code, self.model = name, f"transformers {transformers.__version__}", model
        weight = next(model.parameters())
        self.device, self.dtype = str(weight.device), weight.dtype
        self.model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)  # no stop tokens
        parameters = inspect.signature(self.model.forward).parameters
        self.cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self.cache, self.lengths = None, []

    def start(self, lengths: list[int], room: int) -> None:
        self.cache, self.lengths = DynamicCache(), list(lengths)
        longest = max(lengths)
        columns = torch.arange(longest, device=self.device)
        self.mask = (columns >= longest - torch.tensor(lengths, device=self.device)[:, None]).long()

    def fill_history(self) -> None:
        config, longest = self.model.config, max(self.lengths)
        for layer in range(config.num_hidden_layers):
            rows = [random_history(config, r, layer, n, self.device, self.dtype) for r, n in enumerate(self.lengths)]
            padded = [F.pad(torch.stack(row), (0, 0, 0, 0, longest - row[0].shape[0], 0)) for row in rows]
            k, v = torch.stack(padded, dim=1).transpose(2, 3).contiguous()
            self.cache.update(k, v, layer)

    def prefill(self, prompts: list[list[int]]) -> list[int]:
        ids = torch.zeros_like(self.mask)
        for row, prompt in zip(ids, prompts):
            row[-len(prompt) :] = torch.tensor(prompt)
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)
        return self._forward(ids, positions)

    def decode(self, tokens: list[int]) -> list[int]:
        positions = self.mask.sum(-1, keepdim=True)
        self.mask = F.pad(self.mask, (0, 1), value=1)
        return self._forward(torch.tensor(tokens, device=self.device)[:, None], positions)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> list[int]:
        out = self.model(
            ids,
            attention_mask=self.mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self.cache_argument: self.cache},
        )
        return out.logits[:, -1].argmax(-1).tolist()

    def generate(self, prompts: list[list[int]], new_tokens: int, on_token: OnToken) -> list[list[int]]:
        self.start([len(prompt) for prompt in prompts], new_tokens)
        ids = torch.zeros_like(self.mask)
        for row, prompt in zip(ids, prompts):
            row[-len(prompt) :] = torch.tensor(prompt)
        config = GenerationConfig(
            max_new_tokens=new_tokens, do_sample=False, pad_token_id=0, return_dict_in_generate=True
        )
        out = self.model.generate(
            ids,
            attention_mask=self.mask,
            generation_config=config,
            stopping_criteria=[_Clock(self.device, on_token)],
        )
        self.cache = out.past_key_values
        return out.sequences[:, ids.shape[1] :].tolist()

    def kv_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for layer in self.cache for t in layer[:2])


def make_subject(name: str, model: str, device: str, dtype: torch.dtype, engine: str = "own") -> Subject:
    """The subject called `name`, with the weights of `model`: a step's slug, or the baseline, with sdpa or, as in
    `transformers/eager`, with the attention named.

    engine: `transformers` puts its model into the step's runner in place of the step's own decoder.
    """
    library, _, attention = name.partition("/")
    if library == BASELINE:
        return BaselineSubject(load_baseline_model(model, device, dtype, attention or "sdpa"), name)
    step = find_step(name)
    if engine == "transformers":
        return StepSubject(step, TransformersModel(load_baseline_model(model, device, dtype)))
    return StepSubject(step, load_step_model(load_step(step), model, device, dtype))

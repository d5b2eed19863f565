"""A step's own write and gather, called alone: no model, no re-typed copy, block tables fragmented.

Steps offer `write_kv_to_pool` or, with slot ids computed ahead, `write_slots`; and for reading `PagedKVCache.read`,
`gather`, or `begin_step` and `update`. What a step has is what is called.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from types import ModuleType

import torch

from shared.bench.measure import replaced
from shared.bench.subjects import BLOCK_SIZE, Sections, fill_pools


def make_cache(module: ModuleType, config: object, lengths: list[int], room: int, device: str, dtype: torch.dtype):
    """A PagedKVCache whose free blocks are shuffled, big enough for requests of these lengths and `room` more each."""
    blocks = sum(math.ceil((length + room) / BLOCK_SIZE) for length in lengths)
    cache = module.PagedKVCache(config, blocks, BLOCK_SIZE, dtype, device)
    random.Random(0).shuffle(cache.free_blocks)
    return cache


def slots_of(cache: object, request: int, positions: torch.Tensor) -> torch.Tensor:
    """Flat slot ids of a request's positions."""
    table = torch.tensor(cache.block_tables[request], device=positions.device)
    return table[positions // cache.block_size] * cache.block_size + positions % cache.block_size


def writer(
    module: ModuleType, config: object, batch: int, tokens: int, device: str, dtype: torch.dtype
) -> Callable[[], None]:
    """A function that writes `tokens` new tokens of each of `batch` requests, once in every layer.

    With write_slots the slot ids are ready, as they are in a decode step, where all layers share them; with
    write_kv_to_pool computing the indices is part of the call.
    """
    cache = make_cache(module, config, [0] * batch, tokens, device, dtype)
    for request in range(batch):
        cache.reserve(request, tokens)
    k, v = (torch.randn(tokens * batch, *cache.k_pools[0].shape[2:], device=device).to(dtype) for _ in range(2))
    pools = [(cache.k_pools[layer], cache.v_pools[layer]) for layer in range(config.num_hidden_layers)]
    if hasattr(module, "write_slots"):
        positions = torch.arange(tokens, device=device)
        slots = torch.cat([slots_of(cache, request, positions) for request in range(batch)])

        def write_all() -> None:
            for k_pool, v_pool in pools:
                module.write_slots(k_pool, v_pool, k, v, slots)

    else:
        rows = [
            (cache.block_tables[r], k[r * tokens : (r + 1) * tokens], v[r * tokens : (r + 1) * tokens])
            for r in range(batch)
        ]

        def write_all() -> None:
            for k_pool, v_pool in pools:
                for table, k_new, v_new in rows:
                    module.write_kv_to_pool(k_pool, v_pool, k_new, v_new, table, 0)

    return write_all


def gatherer(
    module: ModuleType, config: object, lengths: list[int], device: str, dtype: torch.dtype, meter: Callable[[], object]
) -> Callable[[], object]:
    """A function that reads all requests' histories in every layer once and returns what that cost by `meter`.

    Building indices is part of it. Where reading happens inside `update`, only begin_step and the read are metered.
    """
    cache = make_cache(module, config, lengths, 1, device, dtype)
    fill_pools(cache, config, lengths)
    requests = list(range(len(lengths)))
    if hasattr(cache, "begin_step"):
        return _gather_in_update(module, cache, config, requests, meter)
    if hasattr(cache, "gather"):
        gather = lambda: cache.gather(requests)  # noqa: E731
    else:
        gather = lambda: [cache.read(request) for request in requests]  # noqa: E731

    def metered() -> object:
        before = meter()
        result = gather()
        after = meter()
        del result
        return after - before

    return metered


def _gather_in_update(
    module: ModuleType, cache: object, config: object, requests: list[int], meter: Callable[[], object]
):
    k = cache.k_pools[0].new_zeros(len(requests), cache.k_pools[0].shape[2], 1, cache.k_pools[0].shape[3])
    lengths = dict(cache.seq_lens)

    def metered() -> object:
        sections = Sections(meter)
        changes = [
            (module, "read_slots", sections.wrap("gather", module.read_slots)),
            (type(cache), "begin_step", sections.wrap("gather", type(cache).begin_step)),
        ]
        with replaced(changes):
            cache.begin_step(requests, 1)
            for layer in range(config.num_hidden_layers):
                cache.update(k, k, layer)
            cache.end_step()
        cache.seq_lens.update(lengths)
        return sections.spent.get("gather", 0)

    return metered

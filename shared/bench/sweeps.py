"""Micro sweeps: a step's own functions alone, over sizes, with the machine's limit measured beside them.

Every function yields rows as dictionaries: `workload`, `batch`, the sizes, `ms` with quartiles, `gb_per_s`, samples.
GB/s counts the keys and values handed over (or the weights used) once, whatever a variant moves to get there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace

import torch
import torch.nn.functional as F
from transformers import DynamicCache

from shared.bench import counts
from shared.bench.cache_ops import gatherer, make_cache, writer
from shared.bench.measure import sample, spread, synchronize
from shared.bench.plan import MACHINE
from shared.bench.subjects import BLOCK_SIZE, fill_pools, load_baseline_model, random_history
from shared.steps import find_step, load_step

MEMCPY, READ = "memcpy", "read"


def row(workload: str, batch: int, samples: list[float], nbytes: int, **more: object) -> dict:
    """`samples` in milliseconds, as is everything that ends in _ms."""
    median, q1, q3 = spread(samples)
    return {
        "workload": workload,
        "batch": batch,
        "ms": median,
        "ms_q1": q1,
        "ms_q3": q3,
        "gb_per_s": nbytes / median / 1e6,
        "samples": samples,
        **more,
    }


def kv_bytes(config: object, tokens: int, dtype: torch.dtype) -> int:
    """Keys and values of that many tokens in all layers."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * tokens * dtype.itemsize


def write(
    module: ModuleType, config: object, points: list[tuple[int, int]], device: str, dtype: torch.dtype
) -> Iterator[dict]:
    """(batch, tokens each): one write in every layer; `ms` is per layer."""
    layers = config.num_hidden_layers
    tiny = counts.tiny_config(1, config.num_key_value_heads, _head_dim(config))
    with torch.inference_mode():
        for batch, tokens in points:
            samples = [ms / layers for ms in sample(writer(module, config, batch, tokens, device, dtype), device)]
            ops, nbytes = _continued(lambda n: counts.count_write(module, tiny, n, dtype), tokens)
            calls = 1 if hasattr(module, "write_slots") else batch
            payload = kv_bytes(config, batch * tokens, dtype) // layers
            cost = {"ops": ops * calls, "bytes_moved": nbytes * batch}
            yield row(f"tokens-{tokens}", batch, samples, payload, tokens=tokens, **cost)


def gather(
    module: ModuleType, config: object, points: list[tuple[int, int]], device: str, dtype: torch.dtype
) -> Iterator[dict]:
    """(batch, history): what reading all histories in all layers costs before attention can start."""

    def now() -> float:
        synchronize(device)
        return 1e3 * time.perf_counter()

    with torch.inference_mode():
        for batch, history in points:
            run = gatherer(module, config, [history] * batch, device, dtype, now)
            samples = _metered(run)
            del run
            ops, nbytes = _gather_cost(module, config, batch, history, dtype)
            payload = kv_bytes(config, batch * history, dtype)
            yield row(f"history-{history}", batch, samples, payload, history=history, ops=ops, bytes_moved=nbytes)


def memcpy(config: object, points: list[tuple[int, int]], device: str, dtype: torch.dtype) -> Iterator[dict]:
    """The gather's ceiling: the same bytes copied from dense tensors to dense tensors that exist already."""
    with torch.inference_mode():
        for batch, history in points:
            samples = sample(_copier(_dense(config, batch, history, device, dtype)), device)
            payload = kv_bytes(config, batch * history, dtype)
            cost = {"ops": 2 * config.num_hidden_layers, "bytes_moved": 2 * payload}
            yield row(f"history-{history}", batch, samples, payload, history=history, **cost)


def _copier(dense: list[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
    pairs = [(torch.empty_like(source), source) for kv in dense for source in kv]

    def copy() -> None:
        for target, source in pairs:
            target.copy_(source)

    return copy


def attention_dense(
    config: object, points: list[tuple[int, int]], device: str, dtype: torch.dtype
) -> Iterator[tuple[str, dict]]:
    """(variant, row): attention on dense K/V; transformers' append and attention; reading the bytes once."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    groups = config.num_attention_heads // config.num_key_value_heads
    layer_like = SimpleNamespace(num_key_value_groups=groups, is_causal=True)
    with torch.inference_mode():
        for batch, history in points:
            dense = _dense(config, batch, history, device, dtype)
            q = torch.randn(batch, config.num_attention_heads, 1, _head_dim(config), device=device).to(dtype)
            new = torch.zeros_like(dense[0][0][:, :, :1])
            cache = DynamicCache()
            for layer, (k, v) in enumerate(dense):
                cache.update(k, v, layer)
            kept = [(layer.keys, layer.values) for layer in cache.layers]

            def sdpa() -> None:
                for k, v in dense:  # noqa: B023 (called before the next point)
                    F.scaled_dot_product_attention(q, k, v, enable_gqa=True)  # noqa: B023

            def appended() -> None:
                for i, (keys, values) in enumerate(kept):  # noqa: B023
                    k, v = cache.update(new, new, i)  # noqa: B023
                    sdpa_attention_forward(layer_like, q, k, v, None)  # noqa: B023
                    cache.layers[i].keys, cache.layers[i].values = keys, values  # noqa: B023

            def read() -> None:
                for k, v in dense:  # noqa: B023
                    k.sum(), v.sum()

            payload = kv_bytes(config, batch * history, dtype)
            for variant, run in (("sdpa", sdpa), ("transformers", appended), (READ, read)):
                yield variant, row(f"history-{history}", batch, sample(run, device), payload, history=history)


def attention_of(
    module: ModuleType, slug: str, config: object, points: list[tuple[int, int]], device: str, dtype: torch.dtype
) -> Iterator[tuple[str, dict]]:
    """(variant, row) of a step's attention over the history, from its pool to the result, in all layers.

    A step with paged kernels gives the one it would choose under its own name and the others that work here as
    `slug/kernel`; a step that gathers gives its gather and then scaled_dot_product_attention.
    """
    with torch.inference_mode():
        for batch, history in points:
            cache = make_cache(module, config, [history] * batch, 1, device, dtype)
            fill_pools(cache, config, [history] * batch)
            payload = kv_bytes(config, batch * history, dtype)
            for variant, run in _attentions(module, slug, config, cache, batch, history):
                yield variant, row(f"history-{history}", batch, sample(run, device), payload, history=history)
            del cache


def _attentions(module: ModuleType, slug: str, config: object, cache: object, batch: int, history: int):
    pools = [(cache.k_pools[layer], cache.v_pools[layer]) for layer in range(config.num_hidden_layers)]
    size = _head_dim(config)
    q = torch.randn(batch, config.num_attention_heads, size, device=pools[0][0].device).to(pools[0][0].dtype)
    if not hasattr(module, "find_kernel"):

        def gather_and_attend() -> None:
            for k, v in cache.gather(list(range(batch))):
                F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)

        yield slug, gather_and_attend
        return
    tables = torch.tensor([cache.block_tables[r] for r in range(batch)], dtype=torch.int32, device=q.device)
    lengths = torch.full((batch,), history, dtype=torch.int32, device=q.device)
    chosen = module.find_kernel(None, pools[0][0])
    kernels = {slug: chosen}
    for name in module.ATTENTION_KERNELS:
        try:
            kernel = module.find_kernel(name, pools[0][0])
        except ValueError:  # cannot work here
            continue
        if kernel is not chosen:
            kernels[f"{slug}/{name}"] = kernel
    for variant, kernel in kernels.items():

        def attend(kernel=kernel) -> None:
            for k_pool, v_pool in pools:
                kernel(q, k_pool, v_pool, tables, lengths, size**-0.5)

        yield variant, attend


def matmul(name: str, model: str, rows: list[int], device: str, dtype: torch.dtype) -> Iterator[tuple[str, dict]]:
    """(variant, row): all of the model's weight matrices times `rows` rows, the products of one decode step.

    For the machine: F.linear, the same with weights packed by oneDNN ahead (CPU), and a sum that reads all weights.
    """
    loaded = load_baseline_model(model, device, dtype)
    weights = [layer.weight for layer in loaded.modules() if isinstance(layer, torch.nn.Linear)]
    nbytes = sum(w.numel() * w.element_size() for w in weights)
    with torch.inference_mode():
        for n in rows:
            xs = [torch.randn(n, w.shape[1], device=device).to(dtype) for w in weights]
            for variant, product, prepared in _products(name, weights, n, device):

                def run(product=product, prepared=prepared, xs=xs) -> None:
                    for x, w in zip(xs, prepared):
                        product(x, w)

                yield variant, row("weights", n, sample(run, device, 1.0), nbytes)
                del run, prepared


def _products(name: str, weights: list[torch.Tensor], rows: int, device: str):
    """(variant, product of x and w, the w's)."""
    if name != MACHINE:
        yield name, load_step(find_step(name)).thin_matmul, weights
        return
    yield "F.linear", F.linear, weights
    yield READ, lambda x, w: w.sum(), weights
    if device == "cpu" and torch.backends.mkldnn.is_available() and weights[0].dtype == torch.float32:
        pack, linear = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise
        yield "packed", lambda x, w: linear(x, w, None, "none", [], ""), [pack(w, rows) for w in weights]


def _dense(
    config: object, batch: int, history: int, device: str, dtype: torch.dtype
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Contiguous K/V [B, K, S, D] by layer."""
    dense = []
    for layer in range(config.num_hidden_layers):
        rows = [torch.stack(random_history(config, r, layer, history, device, dtype)) for r in range(batch)]
        k, v = torch.stack(rows, dim=1).transpose(2, 3).contiguous()
        dense.append((k, v))
    return dense


def _head_dim(config: object) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _metered(run: Callable[[], float], seconds: float = 0.6) -> list[float]:
    """Samples of a function that returns its own milliseconds; the first call warms up unless it takes over 2 s."""
    first = run()
    if first > 2000:
        return [first]
    samples: list[float] = []
    while len(samples) < 3 or (sum(samples) < 1e3 * seconds and len(samples) < 50):
        samples.append(run())
    return samples


def _continued(
    count: Callable[[int], object], size: int, short: tuple[int, int] = (2 * BLOCK_SIZE, 4 * BLOCK_SIZE)
) -> tuple[int, int]:
    """Operators and bytes at `size`: counted if it is small, else continued from two small sizes (both are linear)."""
    if size <= short[1]:
        counted = count(size)
    else:
        low, high = (count(n) for n in short)
        counted = low + (high - low) * (size - short[0]) // (short[1] - short[0])
    return int(counted[0]), int(counted[2])


def _gather_cost(module: ModuleType, config: object, batch: int, history: int, dtype: torch.dtype) -> tuple[int, int]:
    tiny = counts.tiny_config(config.num_hidden_layers, config.num_key_value_heads, _head_dim(config))
    return _continued(lambda n: counts.count_gather(module, tiny, [n] * batch, dtype), history)

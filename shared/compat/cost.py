"""What the cache object costs in a decode step, beside the gather: `python -m shared.compat.cost --measure`.

Writes results/cache_cost.json. Everything is timed over all layers of the default model's shape, with the gather of
the first step that fills a DynamicCache.
"""

from __future__ import annotations

import argparse
import random
import time
from itertools import pairwise

from shared.errors import plain_errors
from shared.launch import ensure_dependencies
from shared.steps import ROOT

RESULTS = ROOT / "results" / "cache_cost.json"
SHAPE, BATCH, BLOCK_SIZE, HISTORIES, ROUNDS = "smollm2-135m", 8, 16, (128, 512, 2048), 15
# None: giving memory back, which belongs to none of them.
PARTS = ("gather", "fill", "append", None, "append_to_tuple", None, "copy")


def one_round(module, pools: tuple, tables: list[list[int]], history: int, token) -> dict[str, float]:
    """Milliseconds of each part of a decode step's traffic over all layers, in the order in which it comes.

    pools: k and v [L, N, P, K, D]; token [B, K, 1, D] stands for the new k and v of every layer. Every part leaves its
    result in memory that is new, as in a step.
    """
    import torch
    from transformers import DynamicCache

    laps = [time.perf_counter()]
    dense = module.gather_batch_kv(*pools, tables, [history] * len(tables))
    laps.append(time.perf_counter())
    cache = DynamicCache()
    for layer, (k, v) in enumerate(dense):
        cache.update(k, v, layer)
    laps.append(time.perf_counter())
    for layer in range(len(dense)):
        cache.update(token, token, layer)
    laps.append(time.perf_counter())
    del cache
    laps.append(time.perf_counter())
    present = [(torch.cat((k, token), dim=2), torch.cat((v, token), dim=2)) for k, v in dense]
    laps.append(time.perf_counter())
    del present
    laps.append(time.perf_counter())
    copies = [(k.clone(), v.clone()) for k, v in dense]
    laps.append(time.perf_counter())
    del copies
    times = [1e3 * (end - start) for start, end in pairwise(laps)]
    return {part: ms for part, ms in zip(PARTS, times) if part}


def measure(threads: int) -> dict:
    import torch

    from shared.bench.measure import load_average, pin_threads
    from shared.bench.record import environment
    from shared.engine import steps_with_cache_object
    from shared.models import shape_config
    from shared.steps import code_hash, load_step

    pin_threads(threads)
    step, config, rows = steps_with_cache_object()[0], shape_config(SHAPE), []
    module = load_step(step)
    env = environment("cache-cost", f"shape:{SHAPE}", "cpu", "float32", threads) | {"load_before": load_average()}
    heads, head_dim = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    token = torch.randn(BATCH, heads, 1, head_dim)
    for history in HISTORIES:
        blocks = BATCH * history // BLOCK_SIZE
        order = random.Random(0).sample(range(blocks), blocks)
        tables = [order[request::BATCH] for request in range(BATCH)]
        pools = torch.randn(2, config.num_hidden_layers, blocks, BLOCK_SIZE, heads, head_dim).unbind()
        with torch.inference_mode():
            rounds = [one_round(module, pools, tables, history, token) for _ in range(ROUNDS + 1)][1:]
        common = {"history": history, "batch": BATCH, "bytes": sum(pool.nbytes for pool in pools)}
        common |= {"step": step.slug, "code_hash": code_hash(step)}
        rows += [{"part": part, **common, "samples_ms": [times[part] for times in rounds]} for part in rounds[0]]
    return {"environment": env | {"load_after": load_average()}, "rows": rows}


@plain_errors()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m shared.compat.cost", description=__doc__)
    parser.add_argument("--measure", action="store_true", required=True, help="measure, about a minute and 4 GB")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads (default: 1)")
    options = parser.parse_args(argv)
    ensure_dependencies()
    from shared.bench.record import write_json

    write_json(RESULTS, measure(options.threads))
    print(f"wrote {RESULTS.relative_to(ROOT)}; `make report` makes the table from it")


if __name__ == "__main__":
    main()

"""What the two seed articles say, checked by running it.

    python -m shared.docs.claims                 the names of the checks
    python -m shared.docs.claims NAME            one check: runs it and prints what came out
    python -m shared.docs.claims --measure       all of them, into results/claims.json

What the checks print is the same on every machine (counts, bits, names; no times), so that a test can compare it.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shared.errors import UserError, plain_errors
from shared.steps import ROOT, list_steps, load_step

RESULTS = ROOT / "results" / "claims.json"
CHECKS: dict[str, Callable[[], list[str]]] = {}


def check(function: Callable[[], list[str]]) -> Callable[[], list[str]]:
    CHECKS[function.__name__.replace("_", "-")] = function
    return function


class Calls(TorchDispatchMode):
    """Names of the operators that torch dispatches inside the `with` block, those that only make views left out."""

    def __enter__(self):
        self.names: list[str] = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    def __str__(self):
        return ", ".join(f"{name} × {n}" if n > 1 else name for name, n in Counter(self.names).items()) or "none"


def first_with(name: str, function_source: str):
    """The first step whose `name` contains the source text `function_source`: no step is named here."""
    import inspect

    for step in list_steps():
        function = getattr(load_step(step), name, None)
        if function is not None and function_source in inspect.getsource(function):
            return function
    raise UserError(f"no step has a {name} with {function_source!r}: the checks have to follow the code")


def write_loop():
    return first_with("write_kv_to_pool", "for i in range")


def write_at_once():
    return first_with("write_kv_to_pool", "k_pool[blocks, slots] = k")


def one_layer(num_blocks=8, block_size=4):
    torch.manual_seed(0)
    return torch.zeros(2, num_blocks, block_size, 3, 16)


def writes(write, tokens: int) -> Calls:
    k_pool, v_pool = one_layer(num_blocks=128)
    k, v = torch.randn(2, tokens, 3, 16)
    with Calls() as calls:
        write(k_pool, v_pool, k, v, list(range(128)), 0)
    return calls


@check
def one_launch() -> list[str]:
    """The vectorised write: which operators does it dispatch, and how many?"""
    counts = {tokens: writes(write_at_once(), tokens) for tokens in (1, 512)}
    return [f"T = {tokens}: {len(c.names)} operators: {c}" for tokens, c in counts.items()]


@check
def one_token() -> list[str]:
    """Loop and vectorised write, for one token and for 512: operators that do more than make a view."""
    lines = []
    for tokens in (1, 512):
        loop, at_once = (len(writes(write, tokens).names) for write in (write_loop(), write_at_once()))
        lines.append(f"T = {tokens}: loop {loop} operators, vectorised {at_once}")
    return lines


@check
def one_element() -> list[str]:
    """What one assignment of the loop copies."""
    k_pool, _ = one_layer()
    before = k_pool.clone()
    k_pool[3, 1] = torch.randn(3, 16)
    return [f"numbers changed by one assignment: {int((k_pool != before).sum())} (3 heads × 16)"]


@check
def list_index() -> list[str]:
    """A list as an index, an index into a list, and a tensor without dimensions as an index."""
    x, table, idx = torch.arange(12).view(6, 2), [5, 1, 3], torch.tensor([2, 0])
    lines = [f"x[[2, 0]] equals x[tensor([2, 0])]: {torch.equal(x[[2, 0]], x[idx])}"]
    try:
        table[idx]
    except TypeError as error:
        lines.append(f"[5, 1, 3][tensor([2, 0])]: TypeError: {error}")
    with Calls() as calls:
        x[[2, 0]]
    lines.append(f"operators of x[[2, 0]]: {calls}")
    with Calls() as calls:
        x[torch.tensor(2)]
    lines.append(f"operators of x[tensor(2)]: {calls}  (_local_scalar_dense is .item())")
    return lines


@check
def loop_sync() -> list[str]:
    """Does the loop's indexing with Python numbers read anything back from the device?"""
    calls = writes(write_loop(), 4)
    return [
        f"operators of the loop for 4 tokens: {calls}",
        f".item() among them: {'_local_scalar_dense' in calls.names}",
    ]


def gathers(function, seq_lens, layers=2) -> Calls:
    k_pools, v_pools = torch.zeros(2, layers, 8, 4, 3, 16)
    with Calls() as calls:
        function(k_pools, v_pools, [[5, 1, 3], [6, 4]], seq_lens)
    return calls


@check
def iterations() -> list[str]:
    """28 layers × 8 requests × 128 tokens, and what one iteration of the loop copies."""
    loop = first_with("gather_batch_kv", "for i in range")
    copies = gathers(loop, [10, 6]).names.count("copy_")
    positions = 2 * (10 + 6)
    return [
        f"28 × 8 × 128 = {28 * 8 * 128} positions",
        f"2 layers, histories of 10 and 6: {positions} positions, {copies} copies: {copies // positions} each (K, V)",
        f"so 28 × 8 × 128 positions are {28 * 8 * 128 * copies // positions} copies",
    ]


@check
def padding_slot() -> list[str]:
    """Which slot does the padding read, with the position clamped to 0? Every slot holds its own number."""
    pool = torch.arange(8 * 4).view(8, 4)
    table, positions = torch.tensor([6, 4]), torch.arange(-4, 6).clamp(min=0)
    read = pool[table[positions // 4], positions % 4]
    return [
        f"table [6, 4], four columns of padding: they read {[divmod(int(i), 4) for i in read[:4]]} as (block, slot)",
        "so it is slot 0 of the request's own first block, and block 0 belongs to whom it belongs",
    ]


@check
def multiply() -> list[str]:
    """Zeroing the padding by multiplication and by selection, when it reads something that is no number."""
    read, keep = torch.tensor([float("nan"), float("inf"), 2.0]), torch.tensor([0.0, 0.0, 1.0])
    return [
        f"read × mask:        {(read * keep).tolist()}",
        f"where(mask, read, 0): {torch.where(keep.bool(), read, 0.0).tolist()}",
    ]


@check
def bool_half() -> list[str]:
    """bool × half against half × half."""
    torch.manual_seed(0)
    k = torch.randn(100_000).half()
    keep = torch.rand(100_000) > 0.5
    return [f"equal to the bit: {torch.equal(k * keep, k * keep.half())}; dtype of the product: {(k * keep).dtype}"]


@check
def concatenates() -> list[str]:
    """What DynamicCache does with the history when one token is added."""
    from transformers import DynamicCache

    cache, k = DynamicCache(), torch.randn(8, 3, 100, 16)
    cache.update(k, k, 0)
    before = next(iter(cache))[0]
    with Calls() as calls:
        cache.update(k[:, :, -1:], k[:, :, -1:], 0)
    after = next(iter(cache))[0]
    return [
        f"operators for one more token: {calls}",
        f"history in the same memory as before: {before.data_ptr() == after.data_ptr()}",
        f"numbers written for 8 × 3 × 1 × 16 new ones: {after.numel()} for K alone",
    ]


@check
def pool_size() -> list[str]:
    """512 blocks for Qwen2.5-7B in float16: bytes by block size."""
    per_token = 2 * 28 * 4 * 128 * 2
    return [
        f"block size {size}: 512 × {size} × {per_token} bytes = {512 * size * per_token / 1e9:.2f} GB"
        for size in (16, 64)
    ]


@check
def gap() -> list[str]:
    """The article's own numbers for a batch of eight."""
    return [
        f"201.0 / 408.9 = {201.0 / 408.9:.1%}",
        f"361.3 / 408.9 = {361.3 / 408.9:.1%}, so the gap is {1 - 361.3 / 408.9:.1%}",
    ]


def run_all() -> dict[str, list[str]]:
    return {name: function() for name, function in CHECKS.items()}


def measure() -> dict:
    """What every check prints here."""
    import transformers

    environment = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"environment": environment, "checks": run_all()}


def render(path: Path = RESULTS) -> dict[str, str]:
    """What each check printed, as a fragment under docs/generated."""
    shown = json.loads(path.read_text(encoding="utf-8"))["checks"] if path.is_file() else {}
    return {
        f"claims/{name}.md": "```text\n" + "\n".join(shown[name]) + "\n```\n" if name in shown else "Not run yet.\n"
        for name in CHECKS
    }


@plain_errors()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", help="the check to run")
    parser.add_argument("--measure", action="store_true", help=f"run all and write {RESULTS.relative_to(ROOT)}")
    parser.add_argument(
        "--also", action="append", default=[], metavar="PYTHON", help="a Python with other transformers"
    )
    options = parser.parse_args()
    if options.measure:
        RESULTS.parent.mkdir(exist_ok=True)
        new = RESULTS.with_suffix(".json.new")
        new.write_text(json.dumps(measure(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(new, RESULTS)
    elif options.name is None:
        for name, function in CHECKS.items():
            print(f"{name:14} {function.__doc__}")
    elif options.name in CHECKS:
        print("\n".join(CHECKS[options.name]()))
    else:
        raise UserError(f"there is no check {options.name!r}; there are: {', '.join(CHECKS)}")


if __name__ == "__main__":
    main()

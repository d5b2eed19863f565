"""Count what a piece of PyTorch code asks the dispatcher to do, and find the formula the counts follow.

Counts are the same on every machine and in every run, which is why tests assert them and never a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operators that store a small source into a large tensor: the bytes that move are the source's.
_SCATTERS = {"index_put_": 2, "_index_put_impl_": 2, "index_copy_": 3, "scatter_": 3, "index_add_": 3}


class OpCounter(TorchDispatchMode):
    """Context manager. `all`: operators dispatched; `non_view`: those that do more than describe memory anew;
    `bytes_moved`: what the non-view ones write, counted twice, since for a copy as much has to be read."""

    def __init__(self):
        super().__init__()
        self.all = self.non_view = self.bytes_moved = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.all += 1
        if not func.is_view:
            self.non_view += 1
            position = _SCATTERS.get(func.overloadpacket.__name__)
            written = [args[position]] if position is not None and len(args) > position else out
            self.bytes_moved += 2 * _nbytes(written)
        return out


def _nbytes(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (tuple, list)):
        return sum(map(_nbytes, value))
    return 0


def count_ops(function: Callable[[], object]) -> OpCounter:
    """Run `function` once, without gradients, and return what it dispatched."""
    with torch.inference_mode(), OpCounter() as counter:
        function()
    return counter


@dataclass(frozen=True)
class Law:
    """A count as a sum of whole multiples of products of sizes, such as 7 + 5·L + 8·L·S."""

    coefficients: dict[str, int]

    def __call__(self, **sizes: int) -> int:
        return sum(factor * _product(term, sizes) for term, factor in self.coefficients.items())

    def __str__(self) -> str:
        parts = [str(f) if t == "1" else t if f == 1 else f"{f}·{t}" for t, f in self.coefficients.items()]
        return " + ".join(parts).replace("+ -", "− ") or "0"

    @property
    def variables(self) -> set[str]:
        """The sizes the count grows with; conditions such as [T=1] are none."""
        return {name for term in self.coefficients for name in term.split("·") if name.isalpha()}


def find_law(observations: Sequence[tuple[dict[str, int], int]], terms: Sequence[str]) -> Law:
    """The one law over `terms` ("1", "L", "L·S", ...) that gives every observed count exactly.

    Args:
        observations: pairs of the sizes by name and the count seen with them; more of them than terms.
    Raises:
        ValueError: the sizes do not tell the terms apart, or no whole-number law fits all counts.
    """
    matrix = np.array([[_product(term, sizes) for term in terms] for sizes, _ in observations], dtype=float)
    counts = np.array([count for _, count in observations], dtype=float)
    if np.linalg.matrix_rank(matrix) < len(terms):
        raise ValueError(f"these sizes do not tell apart the terms {', '.join(terms)}")
    factors = np.linalg.lstsq(matrix, counts, rcond=None)[0].round().astype(int)
    law = Law({term: int(factor) for term, factor in zip(terms, factors) if factor})
    for sizes, count in observations:
        if law(**sizes) != count:
            raise ValueError(f"no law over {', '.join(terms)}: {law} gives {law(**sizes)} at {sizes}, counted {count}")
    return law


def _product(term: str, sizes: dict[str, int]) -> int:
    result = 1
    for name in term.split("·"):
        result *= 1 if name == "1" else sizes[name]
    return result

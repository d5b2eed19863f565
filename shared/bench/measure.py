"""Small tools for measuring: a clock that waits for the device, quartiles, memory peaks, the machine's own limits."""

from __future__ import annotations

import contextlib
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.utils.benchmark import Timer

from shared.opcount import count_ops


def pin_threads(threads: int) -> None:
    """Give torch and numba the same number of threads. OMP_NUM_THREADS and NUMBA_NUM_THREADS are set by the parent."""
    torch.set_num_threads(threads)
    with contextlib.suppress(ImportError):
        import numba

        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def timed(function: Callable[[], object], device: str) -> tuple[float, object]:
    """Seconds one call takes, and what it returned."""
    synchronize(device)
    start = time.perf_counter()
    result = function()
    synchronize(device)
    return time.perf_counter() - start, result


def sample(function: Callable[[], object], device: str, seconds: float = 0.3, slow: float = 0.5) -> list[float]:
    """Milliseconds per call after a warm-up: several samples over about `seconds`, or one of a slow function."""
    first, _ = timed(function, device)
    if first > slow:  # or it had something to compile
        second, _ = timed(function, device)
        if second > slow:
            return [1e3 * second]
    timer = Timer("function()", globals={"function": function}, num_threads=torch.get_num_threads())
    return [1e3 * t for t in timer.blocked_autorange(min_run_time=seconds).times]


def spread(samples: Sequence[float]) -> tuple[float, float, float]:
    """Median, first and third quartile."""
    if len(samples) < 2:
        return samples[0], samples[0], samples[0]
    q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return median, q1, q3


class PeakMemory:
    """Bytes this process (CPU) or the device (CUDA) held at most since the object was made."""

    def __init__(self, device: str):
        self.device = device
        if device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats()
        else:
            with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # Linux: the peak starts again from what is resident now

    def bytes(self) -> int:
        if self.device.startswith("cuda"):
            return torch.cuda.max_memory_allocated()
        with contextlib.suppress(OSError), open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def load_average() -> float | None:
    """Runnable processes over the last minute, where the system tells."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


@contextlib.contextmanager
def replaced(changes: list[tuple[object, str, object]]) -> Iterator[None]:
    """Set attributes for a while: (owner, name, value)."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def calibrate(device: str) -> dict[str, object]:
    """The two parameters of the cost model and the machine's read bandwidth, in a few seconds.

    t0_us: one dispatched operator on a few bytes, the mean of the kinds the steps use. kinds_us: each kind alone.
    copy_gb_per_s: a large copy, bytes read plus bytes written. read_gb_per_s: bytes a sum over a large tensor reads.
    """
    row, pool = torch.zeros(64, device=device), torch.zeros(16, 64, device=device)
    index = torch.zeros(1, dtype=torch.long, device=device)
    small = {
        "view": lambda: pool[3],
        "add": lambda: row + row,
        "view and copy": lambda: row.copy_(pool[5]),
        "index": lambda: pool[index],
        "cat": lambda: torch.cat((row, row)),
        "arange": lambda: torch.arange(4, device=device),
    }
    with torch.inference_mode():
        kinds = {name: 1e3 * spread(sample(f, device, 0.2))[0] / count_ops(f).all for name, f in small.items()}
        large = torch.ones(64 * 2**20 if device == "cpu" else 2**28, device=device)
        target = torch.empty_like(large)
        copy = min(sample(lambda: target.copy_(large), device, 1.0))
        read = min(sample(lambda: large.sum(), device, 1.0))
    nbytes = large.numel() * large.element_size()
    return {
        "t0_us": statistics.mean(kinds.values()),
        "kinds_us": kinds,
        "copy_gb_per_s": 2 * nbytes / copy / 1e6,
        "read_gb_per_s": nbytes / read / 1e6,
    }

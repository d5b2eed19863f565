"""One subject, one workload, end to end: first the tokens are compared, then it is timed.

Times are defined as vLLM's serving benchmark defines them, with all requests arriving at time zero: TTFT is a request's
time to its first token, TPOT its time from first to last token over the tokens after the first, both as means over
the requests; tokens/s is all new tokens over the time until the last one. `decode_step_ms` is one engine step of decode
and nothing else, on histories as long as half-way through the generation.
"""

from __future__ import annotations

import statistics
import time

import torch

from shared.bench.measure import PeakMemory, synchronize, timed
from shared.bench.subjects import BASELINE, Subject, load_baseline_model
from shared.bench.workloads import Workload

# Rounding makes greedy decoding fork where two logits are about equal. In these dtypes a first difference is accepted
# where the fp32 model's two largest logits are closer than this.
MARGINS = {torch.float16: 0.1, torch.bfloat16: 0.5}


def generate_timed(subject: Subject, prompts: list[list[int]], new_tokens: int) -> dict:
    """One generate call: its token ids and its times."""
    stamps: list[list[float]] = [[] for _ in prompts]
    memory = PeakMemory(subject.device)
    synchronize(subject.device)
    start = time.perf_counter()
    ids = subject.generate(prompts, new_tokens, lambda index, token: stamps[index].append(time.perf_counter() - start))
    synchronize(subject.device)
    total = time.perf_counter() - start
    return {
        "token_ids": ids,
        "seconds": total,
        "tokens_per_s": sum(map(len, ids)) / total,
        "ttft_ms": 1e3 * statistics.mean(s[0] for s in stamps),
        "tpot_ms": 1e3 * statistics.mean((s[-1] - s[0]) / max(1, len(s) - 1) for s in stamps),
        "peak_kv_bytes": subject.kv_bytes(),
        "peak_memory_bytes": memory.bytes(),
    }


def decode_timed(
    subject: Subject, lengths: list[int], steps: int, slow: float = 1.0
) -> tuple[list[float], list[list[int]]]:
    """Milliseconds of each decode step behind random histories, and the tokens of all steps by request.

    One step warms up, then `steps` are timed, or two where one takes more than `slow` seconds.
    """
    tokens = [1 + request for request in range(len(lengths))]
    outputs: list[list[int]] = [[] for _ in lengths]
    times = []
    subject.start(lengths, 1 + steps)
    subject.fill_history()
    while len(times) < 1 + (steps if len(times) < 2 or times[1] < 1e3 * slow else 2):
        seconds, tokens = timed(lambda: subject.decode(tokens), subject.device)  # noqa: B023 (called at once)
        times.append(1e3 * seconds)
        for output, token in zip(outputs, tokens):
            output.append(token)
    return times[1:], outputs


def first_difference(ids: list[list[int]], expected: list[list[int]]) -> tuple[int, int] | None:
    """(request, position) of the earliest position at which the tokens differ, as far as both go."""
    found = [
        (next((p for p, (a, b) in enumerate(zip(row, want)) if a != b), None), request)
        for request, (row, want) in enumerate(zip(ids, expected))
    ]
    found = sorted((position, request) for position, request in found if position is not None)
    return (found[0][1], found[0][0]) if found else None


def margin_at(model: str, device: str, dtype: torch.dtype, ids: list[int]) -> float:
    """How far the two largest logits of the baseline's weights, computed in fp32, are apart after `ids`."""
    reference = load_baseline_model(model, device, dtype).float()
    top = reference(torch.tensor([ids], device=device), use_cache=False, logits_to_keep=1).logits[0, -1].topk(2).values
    return float(top[0] - top[1])


def compare(
    subject: Subject, model: str, prompts: list[list[int]], ids: list[list[int]], expected: list[list[int]]
) -> dict:
    """Whether the tokens are the baseline's; if not, where they part and whether this dtype's rounding explains it."""
    difference = first_difference(ids, expected)
    if difference is None:
        return {"tokens_equal": True}
    request, position = difference
    verdict = {"tokens_equal": False, "first_difference": {"request": request, "position": position}}
    if subject.dtype in MARGINS:
        verdict["margin"] = margin_at(
            model, subject.device, subject.dtype, prompts[request] + expected[request][:position]
        )
        verdict["margin_allowed"] = MARGINS[subject.dtype]
    verdict["accepted"] = verdict.get("margin", float("inf")) < verdict.get("margin_allowed", 0.0)
    return verdict


def measure(
    subject: Subject,
    model: str,
    workload: Workload,
    encoded: dict[str, list[list[int]]],
    expected: list[list[int]] | None,
    check_tokens: int,
    decode_steps: int,
) -> dict:
    """One sample of a workload. `expected`: the baseline's tokens, None for the baseline itself.

    Before anything is timed, the first `check_tokens` tokens are generated (which warms up, too) and compared; the
    timed run's own tokens are compared afterwards. Tokens that are neither equal nor accepted: no times.
    """
    lengths = workload.lengths(encoded)
    if workload.history is not None:
        return _history_sample(subject, workload, lengths, expected, decode_steps)
    prompts = workload.prompts(encoded)
    result: dict = {"tokens_equal": True}
    checked = subject.generate(prompts, min(check_tokens, workload.new_tokens), lambda index, token: None)
    if expected is not None:
        result = compare(subject, model, prompts, checked, expected)
        if not result.get("accepted", result["tokens_equal"]):
            return result
    sample = generate_timed(subject, prompts, workload.new_tokens)
    ids = sample.pop("token_ids")
    if expected is not None and result["tokens_equal"]:
        result = compare(subject, model, prompts, ids, expected)
        if not result.get("accepted", result["tokens_equal"]):
            return result
    times, _ = decode_timed(subject, lengths, decode_steps)
    sample |= {"decode_step_ms": statistics.median(times), "decode_steps_ms": times}
    return result | sample | ({"token_ids": ids} if subject.name == BASELINE else {})


def _history_sample(subject: Subject, workload: Workload, lengths, expected, decode_steps: int) -> dict:
    """Decode steps behind filled histories. Histories are random, so the tokens mean nothing, yet must be equal.

    Half-precision forks here have no prompt to compute a margin from: they are reported, and accepted.
    """
    memory = PeakMemory(subject.device)
    times, ids = decode_timed(subject, lengths, decode_steps)
    result: dict = {"tokens_equal": True}
    if expected is not None and (difference := first_difference(ids, expected)) is not None:
        request, position = difference
        accepted = subject.dtype in MARGINS
        result = {
            "tokens_equal": False,
            "first_difference": {"request": request, "position": position},
            "accepted": accepted,
        }
        if not accepted:
            return result
    step = statistics.median(times)
    return (
        result
        | {
            "decode_step_ms": step,
            "decode_steps_ms": times,
            "tpot_ms": step,
            "tokens_per_s": 1e3 * workload.batch / step,
            "peak_kv_bytes": subject.kv_bytes(),
            "peak_memory_bytes": memory.bytes(),
        }
        | ({"token_ids": ids} if subject.name == BASELINE else {})
    )

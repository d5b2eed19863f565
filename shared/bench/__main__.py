"""Measure the steps against transformers.generate: `python -m shared.bench quick`."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import sys
from pathlib import Path

from shared.errors import UserError, plain_errors
from shared.launch import ensure_dependencies
from shared.models import DEFAULT_MODEL

EPILOG = """\
Each variant runs in a fresh process. Its tokens are compared with transformers' before anything is timed.
What is finished is in results/local/ at once; interrupt when you like, the same command continues.

  python -m shared.bench quick                              a few minutes: eight chat prompts, 32 tokens each
  python -m shared.bench full                               everything, about an hour on two cores
  python -m shared.bench full --model shape:qwen2.5-7b --device cuda --dtype float16    random weights, no download
  python -m shared.bench quick --steps 03 04 --suites end_to_end gather                 only these
  python -m shared.bench peers                              the same prompts on other engines (opt-in, installs them)
  python -m shared.bench publish                            copy a complete full run to results/, for `make report`
"""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m shared.bench",
        description="Measure every step against transformers.generate: same weights, prompts, dtype and threads.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=("quick", "full", "peers", "publish"), help="see below")
    add = parser.add_argument
    add("--model", default=DEFAULT_MODEL, help=f"name, folder, hub id or shape:NAME (default {DEFAULT_MODEL})")
    add("--device", default="cpu", help="cpu or cuda")
    add("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    add(
        "--engine",
        choices=("own", "transformers"),
        default="own",
        help="whose decoder the steps drive: their own, or transformers' (end to end and decode steps only)",
    )
    add("--threads", type=int, default=None, help="CPU threads of torch and numba (default: all cores)")
    add("--steps", nargs="+", metavar="STEP", help="only these steps, by number or name (default: all)")
    add(
        "--suites",
        nargs="+",
        metavar="SUITE",
        help="only these of: end_to_end decode_step counts write gather attention matmul",
    )
    add("--new-tokens", type=int, default=32, help="quick only: new tokens of each request (default 32)")
    add(
        "--resume", action=argparse.BooleanOptionalAction, default=True, help="continue an earlier run of the same kind"
    )
    add("--peers", nargs="+", metavar="ENGINE", help="peers only: which engines (default: all)")
    add(
        "--output", type=Path, default=None, help="results file (default: by device, model and dtype in results/local/)"
    )
    return parser


def measure(options: argparse.Namespace) -> None:
    """Run the quick or the full plan and print its table."""
    import torch

    from shared.bench import plan as plans
    from shared.bench import record, table
    from shared.bench.conduct import code_hashes, conduct
    from shared.bench.subjects import why_no_flash_attention
    from shared.bench.workloads import encode_all
    from shared.engine import steps_with_cache_object
    from shared.steps import find_step, list_steps

    check(options)
    own = options.engine == "own"
    steps = [find_step(name) for name in options.steps or ()] or (list_steps() if own else steps_with_cache_object())
    plan = plans.full() if options.command == "full" else plans.quick(options.new_tokens)
    suites = tuple(options.suites or (plans.SUITES if own else ("end_to_end", "decode_step")))
    if unknown := set(suites) - set(plans.SUITES):
        raise UserError(f"no suite {sorted(unknown)[0]!r}: there are {', '.join(plans.SUITES)}")
    plan = dataclasses.replace(plan, steps=tuple(sorted(steps, key=lambda step: step.slug)), suites=suites)
    no_flash = why_no_flash_attention(options.device, getattr(torch, options.dtype))
    if no_flash is None:
        plan = dataclasses.replace(plan, baselines=(plans.BASELINE, plans.FLASH_BASELINE))
    prompts = encode_all(options.model)
    env = record.environment(plan.kind, options.model, options.device, options.dtype, options.threads)
    env |= {"model_argument": options.model, "prompts": record.digest(prompts)}
    env["not_measured"] = {} if no_flash is None else {plans.FLASH_BASELINE: no_flash}
    if not own:
        env["engine"] = options.engine
    if plan.kind == "quick":
        env["new_tokens"] = options.new_tokens
    results = record.Record(options.output or record.path_for(env), env, code_hashes(plan), options.resume)
    results.save()  # an unwritable place is found now, not after the first measurement
    if plan.left_out:
        print(f"Left out of this quick run: {plan.left_out}.")
    try:
        conduct(plan, results, prompts, progress)
    finally:
        progress("")
        results.environment["complete"] = not options.steps and not options.suites and missing(plan, results.rows) == []
        results.save()
        print(f"results: {_shown(results.path)}", file=sys.stderr)
    table.show(results.environment, list(results.rows.values()))


def missing(plan, rows: dict) -> list[tuple]:
    from shared.bench.plan import expected_keys

    return [key for key in expected_keys(plan) if key not in rows]


def publish(options: argparse.Namespace) -> None:
    """Copy a complete full run from results/local/ to results/, and a complete run of the other engines."""
    from shared.bench import record

    if options.engine != "own":
        raise UserError("the published results are those of the steps' own decoders: leave --engine out")
    source = options.output or record.path_for({"kind": "full"} | vars(options) | {"model": Path(options.model).name})
    peers = source.with_name(f"{source.stem}-peers.json")
    has_peers = peers.exists() and record.load(peers)["environment"].get("complete")
    if not source.exists() and not has_peers:
        raise UserError(f"{_shown(source)} does not exist: run `make bench-full` first")
    if source.exists():
        _publish_full(source)
    if has_peers:
        shutil.copyfile(peers, record.RESULTS / peers.name)
        print(f"{_shown(record.RESULTS / peers.name)}: the other engines' rows; now `make report`")


def _publish_full(source: Path) -> None:
    from shared.bench import plan as plans
    from shared.bench import record
    from shared.bench.conduct import code_hashes, hash_of
    from shared.steps import list_steps

    results = record.load(source)
    plan = dataclasses.replace(plans.full(), steps=tuple(list_steps()))
    hashes = code_hashes(plan)
    current = {record.key(row) for row in results["rows"] if row["code_hash"] == hash_of(row["variant"], hashes)}
    lacking = [key for key in plans.expected_keys(plan) if key not in current]
    if results["environment"]["kind"] != "full" or lacking:
        what = (
            f"{len(lacking)} rows are missing or of older code, the first is {' '.join(map(str, lacking[0]))}"
            if lacking
            else "it is a quick run"
        )
        raise UserError(
            f"{_shown(source)} is not a complete full run ({what}): run `make bench-full` again, it continues"
        )
    target = record.RESULTS / source.name
    results["environment"]["complete"] = True
    record.write_json(target, results)
    print(f"{_shown(target)}: {len(results['rows'])} rows; now `make report`")


def check(options: argparse.Namespace) -> None:
    """Mistakes that can be told before anything is loaded; also fills in the number of threads."""
    import torch

    if options.device not in ("cpu", "cuda") and not options.device.startswith("cuda:"):
        raise UserError(f"no device {options.device!r}: cpu or cuda")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError("this torch sees no CUDA device: use --device cpu, or install a CUDA build of torch")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    options.threads = cores if options.threads is None else options.threads
    if not 1 <= options.threads <= cores:
        raise UserError(f"--threads {options.threads}: this machine has {cores} cores")
    if not 2 <= options.new_tokens <= 1024:
        raise UserError(f"--new-tokens {options.new_tokens}: give 2 to 1024")


def progress(line: str) -> None:
    """What is being measured, on one line that is overwritten, and only for a terminal."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        print(
            f"\r{line[:width]:<{width}}\r" if not line else f"\r{line[:width]:<{width}}",
            end="",
            file=sys.stderr,
            flush=True,
        )


def _shown(path: Path) -> str:
    from shared.steps import ROOT

    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


@plain_errors()
def main(argv: list[str] | None = None) -> None:
    ensure_dependencies()
    arguments = sys.argv[1:] if argv is None else argv
    if arguments == ["child"]:  # started by the parent only: its specification comes on standard input
        from shared.bench import child

        child.main()
        return
    options = parser().parse_args(arguments)
    if options.command == "peers":
        from shared.bench import peers

        check(options)
        peers.measure(options)
    else:
        (publish if options.command == "publish" else measure)(options)


if __name__ == "__main__":
    main()

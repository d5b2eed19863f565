"""Where does the warning come from? The seed article's hunt, on any version: `python -m shared.compat.hunt 4.43.4`.

The functions below are the calls under study, as the page shows them; the others run them, each as in a fresh process.
"""

from __future__ import annotations

import argparse
import inspect
import linecache
import sys
import traceback
import warnings
from collections.abc import Callable

import torch
import transformers
from transformers import DynamicCache

from shared.compat.watch import log_handler, messages, place


def decode_is_fixed(model, prompt, token):
    """The history goes into the model as a DynamicCache. Prefill passes nothing, as it always did."""
    out = model(prompt, use_cache=True)
    cache = DynamicCache()
    for layer, (k, v, *_) in enumerate(out.past_key_values):
        cache.update(k, v, layer)
    return model(token, past_key_values=cache, use_cache=True).logits


def prefill_is_fixed(model, prompt, token):
    """Prefill passes an empty DynamicCache, and decode goes on with it."""
    cache = DynamicCache()
    model(prompt, past_key_values=cache, use_cache=True)
    return model(token, past_key_values=cache, use_cache=True).logits


def cache_is_ours(model, prompt, token):
    """The same under the name this version has for the argument, read back from our own reference, by iterating."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache = DynamicCache()
    model(prompt, use_cache=True, **{name: cache})
    logits = model(token, use_cache=True, **{name: cache}).logits
    assert [k.shape[2] for k, *_ in cache] == [prompt.shape[1] + 1] * len(list(cache))
    return logits


ATTEMPTS = (decode_is_fixed, prefill_is_fixed, cache_is_ours)


def listen(attempt: Callable, *arguments) -> list[str]:
    """What is said, through which channel, and by which line."""
    with messages() as found:
        attempt(*arguments)
    return [f"{message.where}: {message.channel}: {message.text}" for message in found] or ["(nothing)"]


def raise_warnings(attempt: Callable, *arguments) -> list[str]:
    """What `python -W error` shows: a traceback for a warning, and nothing for a message that was only logged."""
    with log_handler(lambda record: None), warnings.catch_warnings():
        warnings.simplefilter("error")
        return trace(attempt, *arguments)


def raise_logged(attempt: Callable, *arguments) -> list[str]:
    """What a logging handler that raises shows: a traceback of the call that logged."""

    def handle(record) -> None:
        raise RuntimeError(record.getMessage())

    with log_handler(handle), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return trace(attempt, *arguments)


def trace(attempt: Callable, *arguments) -> list[str]:
    """The traceback's lines that lie in our function or in a model's code; without one, `(nothing)`."""
    try:
        attempt(*arguments)
    except (RuntimeError, Warning) as error:
        lines = []
        for frame in traceback.extract_tb(error.__traceback__):
            source = "    " + linecache.getline(frame.filename, frame.lineno).strip()
            if frame.filename == __file__ and frame.name == attempt.__name__:
                lines += [f"in {frame.name}", source]
            elif "/transformers/" in frame.filename and "logging" not in frame.filename:
                lines += [f"{place(frame.filename, frame.lineno)}, in {frame.name}", source]
        return [*lines, f"{type(error).__name__}: {error}"]
    return ["(nothing)"]


@torch.inference_mode()
def record(model, prompt: list[int], token: int) -> dict[str, dict[str, list[str]]]:
    """The lines of each way of looking, by attempt."""
    arguments = model, torch.tensor([prompt]), torch.tensor([[token]])
    return {
        attempt.__name__: {look.__name__: look(attempt, *arguments) for look in (listen, raise_warnings, raise_logged)}
        for attempt in ATTEMPTS
    }


def show(found: dict[str, dict[str, list[str]]]) -> None:
    headings = {
        "listen": "what is said",
        "raise_warnings": "with -W error",
        "raise_logged": "with a logging handler that raises",
    }
    for attempt in ATTEMPTS:
        print(f"\n{attempt.__name__}: {attempt.__doc__}")
        for look, lines in found[attempt.__name__].items():
            print(f"  {headings[look]}:")
            print("".join(f"    {line}\n" for line in lines), end="")


def main(argv: list[str] | None = None) -> None:
    from shared.compat import VERSIONS
    from shared.errors import plain_errors

    parser = argparse.ArgumentParser(prog="python -m shared.compat.hunt", description=__doc__)
    parser.add_argument(
        "version", nargs="?", choices=VERSIONS, help="of transformers (default: the one in this environment)"
    )
    version = parser.parse_args(argv).version
    with plain_errors():
        if version not in (None, transformers.__version__):
            from shared.compat.environments import run_in

            raise SystemExit(run_in(version, "shared.compat.hunt").returncode)
        from shared.compat.probe import PROMPT, TOKEN, random_model

        torch.set_num_threads(1)
        print(f"transformers {transformers.__version__}")
        show(record(random_model("llama"), PROMPT, TOKEN))
    sys.stdout.flush()


if __name__ == "__main__":
    main()

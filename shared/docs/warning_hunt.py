"""Which call makes transformers complain about its cache format, and through which channel?

Runs under any transformers from 4.43 on, needs no other module of this repository and prints one JSON document:

    PYTHON shared/docs/warning_hunt.py
"""

import json
import logging
import warnings

import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM


class Recorder(logging.Handler):
    """Keeps what is logged; with `fatal` it raises instead, so that a traceback names the call."""

    def __init__(self, fatal=False):
        super().__init__()
        self.fatal, self.messages = fatal, []

    def emit(self, record):
        self.messages.append(record.getMessage())
        if self.fatal:
            raise RuntimeError(record.getMessage())


def attempt(call, warnings_are_errors=False, log_is_error=False):
    """Runs `call` once and says what came out of it and over which channel."""
    getattr(transformers.utils.logging.warning_once, "cache_clear", lambda: None)()
    recorder = Recorder(fatal=log_is_error)
    logger = logging.getLogger("transformers")
    logger.addHandler(recorder)
    result = {}
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("error" if warnings_are_errors else "always")
            result["returns"] = type(call().past_key_values).__name__
    except Exception as error:
        result["raises"] = type(error).__name__
    finally:
        logger.removeHandler(recorder)
    result["logged"] = recorder.messages
    result["warned"] = [f"{w.category.__name__}: {w.message}" for w in caught]
    return result


def main():
    torch.manual_seed(0)
    transformers.utils.logging.set_verbosity_warning()
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).eval()
    ids, next_id = torch.tensor([[1, 2, 3]]), torch.tensor([[4]])
    dense = [(torch.randn(1, 4, 3, 8), torch.randn(1, 4, 3, 8)) for _ in range(2)]

    def filled():
        cache = DynamicCache()
        for layer, (k, v) in enumerate(dense):
            cache.update(k, v, layer)
        return cache

    def run(ids, *cache):
        with torch.no_grad():
            return model(ids, use_cache=True, **({"past_key_values": cache[0]} if cache else {}))

    calls = {
        "prefill, nothing passed": lambda: run(ids),
        "prefill, empty DynamicCache": lambda: run(ids, DynamicCache()),
        "decode, tuple": lambda: run(next_id, tuple(dense)),
        "decode, filled DynamicCache": lambda: run(next_id, filled()),
    }
    silent = "prefill, nothing passed"
    report = {
        "transformers": transformers.__version__,
        "calls": {name: attempt(call) for name, call in calls.items()},
        "prefill with -W error": attempt(calls[silent], warnings_are_errors=True),
        "prefill with a log handler that raises": attempt(calls[silent], log_is_error=True),
        "DynamicCache.key_cache": hasattr(filled(), "key_cache"),
        "DynamicCache.layers": hasattr(filled(), "layers"),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()

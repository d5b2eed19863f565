"""What is run: prompts and lengths by workload name. Nothing here measures."""

from __future__ import annotations

from dataclasses import dataclass

from shared.models import encode_prompts, load_tokenizer, resolve_model, shape_config
from shared.prompts import CHAT_PROMPTS, MIXED_PROMPTS

NEW_TOKENS = {"chat": 128, "mixed": 256}
SHAPE = "shape:"


@dataclass(frozen=True)
class Workload:
    """`history` workloads start from filled caches of that many tokens a request; the others from their prompts."""

    name: str
    batch: int
    new_tokens: int
    history: int | None = None

    def prompts(self, encoded: dict[str, list[list[int]]]) -> list[list[int]]:
        return encoded[self.name][: self.batch]

    def lengths(self, encoded: dict[str, list[list[int]]]) -> list[int]:
        """History of each request where the decode step is timed: half-way through the new tokens."""
        if self.history is not None:
            return [self.history] * self.batch
        return [len(prompt) + self.new_tokens // 2 for prompt in self.prompts(encoded)]


def chat(batch: int, new_tokens: int = NEW_TOKENS["chat"]) -> Workload:
    return Workload("chat", batch, new_tokens)


def mixed(new_tokens: int = NEW_TOKENS["mixed"]) -> Workload:
    return Workload("mixed", len(MIXED_PROMPTS), new_tokens)


def with_history(history: int, batch: int) -> Workload:
    return Workload(f"history-{history}", batch, 16, history)


def encode_all(model: str) -> dict[str, list[list[int]]]:
    """Token ids of all built-in prompts. A shape has no tokenizer: ids from every fourth byte, about as many."""
    texts = {"chat": CHAT_PROMPTS, "mixed": MIXED_PROMPTS}
    if model.startswith(SHAPE):
        vocab = shape_config(model.removeprefix(SHAPE)).vocab_size
        return {
            name: [[(i * 7919 + byte) % vocab for i, byte in enumerate(text.encode()[::4])] for text in prompts]
            for name, prompts in texts.items()
        }
    tokenizer = load_tokenizer(resolve_model(model))
    return {name: encode_prompts(tokenizer, prompts) for name, prompts in texts.items()}

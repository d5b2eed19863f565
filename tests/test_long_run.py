"""An engine that runs for long: thousands of requests through one runner."""

from __future__ import annotations

import gc
import random
import sys

import pytest
import torch

from tests.drive import assert_idle
from tests.reference import KINDS, VOCAB_SIZE, hf_model

NUM_REQUESTS = 2000
BATCH = 40
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory):
    """The tiny Llama without its second layer: (folder, hf_model)."""
    model = KINDS["llama"].model_class(KINDS["llama"].config(num_hidden_layers=1)).eval().requires_grad_(False)
    model.load_state_dict(hf_model("llama").state_dict(), strict=False)
    folder = tmp_path_factory.mktemp("one-layer")
    model.save_pretrained(folder)
    return folder, model


def calls():
    """The run's requests, call by call: prompts of 1 to 40 tokens, and 1 to 8 new tokens for each."""
    rng = random.Random(0)
    for _ in range(NUM_REQUESTS // BATCH):
        prompts = [rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 40)) for _ in range(BATCH)]
        yield prompts, [rng.randint(1, 8) for _ in range(BATCH)]


def worst_choice(model, prompts, answers):
    """By how much, at worst, a token is not the one that transformers' logits without any cache put first."""
    texts = [torch.tensor(prompt + answer) for prompt, answer in zip(prompts, answers)]
    # Padded on the right, where causal attention of what comes before does not see it.
    logits = model(torch.nn.utils.rnn.pad_sequence(texts, batch_first=True), use_cache=False).logits
    short = logits.amax(dim=-1, keepdim=True) - logits
    return max(
        float(short[row, len(prompt) - 1 + i, token])
        for row, (prompt, answer) in enumerate(zip(prompts, answers))
        for i, token in enumerate(answer)
    )


def allocated():
    """Memory blocks that Python holds, and bytes of all tensors it can reach."""
    gc.collect()
    return sys.getallocatedblocks(), sum(x.nbytes for x in gc.get_objects() if type(x) is torch.Tensor)


@pytest.mark.slow
def test_two_thousand_requests(step, one_layer):
    """Every answer is that of its prompt alone; blocks are all free at the end, and memory is what it was half-way."""
    folder, reference = one_layer
    model = step.load_model(folder)
    runner = step.ModelRunner(model, num_blocks=BATCH * 3, block_size=BLOCK_SIZE)
    half_way = None
    for number, (prompts, limits) in enumerate(calls(), start=1):
        answers = step.generate(model, prompts, limits, runner=runner)
        assert [len(answer) for answer in answers] == limits
        assert worst_choice(reference, prompts, answers) < 1e-4
        assert_idle(runner.cache)
        if number * BATCH == NUM_REQUESTS // 2:
            half_way = allocated()
    blocks, tensors = allocated()
    # A thousand requests that each left one object or one key behind would show. What a cache keeps of its last step,
    # and the libraries for themselves, does not.
    assert tensors - half_way[1] < 4096
    assert blocks - half_way[0] < 500

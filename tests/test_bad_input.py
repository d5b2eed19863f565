"""What a user can get wrong, and what can be wrong with the machine: one plain line, exit code 2, never a traceback.

What `load_model` refuses is tested for every step in test_load_model.py; here it is the way through the commands.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared import cli, diff, models
from shared.bench import __main__ as bench
from shared.bench import record
from shared.report import __main__ as report
from shared.steps import list_steps
from tests.zoo import __main__ as zoo

STEP = list_steps()[0]  # what is tested here is the same in all of them


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The model `tiny`, in a folder of models of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "MODELS_DIR", tmp_path_factory.mktemp("models"))
        yield models.resolve_model("tiny")


@pytest.fixture
def folder(tiny, tmp_path):
    """A copy of `tiny` for a test to damage."""
    return shutil.copytree(tiny, tmp_path / "model")


@pytest.fixture
def fails(capsys):
    """`fails(main, *arguments) -> message`: the command ends with exit code 2 and this one line.

    Nothing else is printed, but that it looks for a model on the hub.
    """

    def run(main, *arguments) -> str:
        with pytest.raises(SystemExit) as end:
            main(*arguments)
        captured = capsys.readouterr()
        assert end.value.code == 2, captured
        assert captured.out == ""
        lines = [line for line in captured.err.splitlines() if not line.startswith("looking for ")]
        assert len(lines) == 1, captured.err
        assert lines[0].startswith("error: ")
        return lines[0].removeprefix("error: ")

    return run


def answer(folder, *options):
    cli.main(STEP.path, ["--model", str(folder), "--max-new-tokens", "3", "--prompt", "hello", *options])


def test_the_undamaged_model_answers(folder, capsys):
    answer(folder)
    assert "> " in capsys.readouterr().out


# --- the model folder ---


def config(**changes):
    """Set keys of config.json; None removes one."""

    def damage(folder):
        path = folder / "config.json"
        settings = json.loads(path.read_text())
        for key, value in changes.items():
            settings.pop(key, None)
            if value is not None:
                settings[key] = value
        path.write_text(json.dumps(settings))

    return damage


def weights(change):
    """Let `change` alter the dictionary of tensors."""

    def damage(folder):
        path = folder / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    return damage


def bytes_of(name, change):
    """Replace a file's bytes by what `change` makes of them."""

    def damage(folder):
        path = folder / name
        path.write_bytes(change(path.read_bytes()))

    return damage


def remove(*names):
    return lambda folder: [(folder / name).unlink() for name in names]


def pickled(name):
    def damage(folder):
        (folder / "model.safetensors").unlink()
        torch.save({"x": torch.zeros(1)}, folder / name)

    return damage


def index(text):
    return lambda folder: (folder / "model.safetensors.index.json").write_text(text)


NORM, HEAD = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"
ROPE = {"rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 512}

FOLDERS = {
    "gone": (shutil.rmtree, "no model folder"),
    "empty": (lambda folder: [file.unlink() for file in folder.iterdir()], "no config.json"),
    "a file": (lambda folder: (shutil.rmtree(folder), folder.touch()), "is a file"),
    "no config": (remove("config.json"), "no config.json"),
    "config cut short": (bytes_of("config.json", lambda data: data[:40]), "config.json is damaged"),
    "config empty": (bytes_of("config.json", lambda data: b""), "config.json is damaged"),
    "config a list": (bytes_of("config.json", lambda data: b"[]"), "config.json is damaged"),
    "config no text": (bytes_of("config.json", lambda data: b"\xff\x00\xfe"), "config.json is damaged"),
    "no weights": (remove("model.safetensors"), "no weights"),
    "pickled weights": (pickled("pytorch_model.bin"), "pickled weights"),
    "pickled checkpoint": (pickled("model.pt"), "pickled weights"),
    "weights cut short": (bytes_of("model.safetensors", lambda data: data[:-100]), "is damaged"),
    "weights cut in the header": (bytes_of("model.safetensors", lambda data: data[:50]), "is damaged"),
    "weights empty": (bytes_of("model.safetensors", lambda data: b""), "is damaged"),
    "weights are noise": (bytes_of("model.safetensors", lambda data: bytes(range(256)) * 4), "is damaged"),
    "weights are a page": (bytes_of("model.safetensors", lambda data: b"<html>404</html>" * 20), "is damaged"),
    "weights of header only": (bytes_of("model.safetensors", lambda data: b"\xff" * 7 + b"\x7f{}"), "is damaged"),
    "tensor missing": (weights(lambda tensors: tensors.pop(NORM)), NORM),
    "tensor unknown": (weights(lambda tensors: tensors.update(extra=torch.zeros(2))), "extra"),
    "tensor misshapen": (weights(lambda tensors: tensors.update({HEAD: torch.zeros(3, 5)})), HEAD),
    "shard missing": (index('{"weight_map": {"a": "model-1-of-2.safetensors"}}'), "lacks 1 of its 1 weight files"),
    "index damaged": (index("{"), "index.json is damaged"),
    "index without map": (index("{}"), "index.json is damaged"),
    "no hidden size": (config(hidden_size=None), "model"),
    "no number of heads": (config(num_attention_heads=None), "model"),
    "no vocabulary": (config(vocab_size=None), "lm_head"),
    "hidden size a word": (config(hidden_size="large"), "hidden_size"),
    "layers below zero": (config(num_hidden_layers=-1), "model.layers"),
    "one layer too many": (config(num_hidden_layers=5), "model.layers.4"),
    "heads that do not divide": (config(num_key_value_heads=2), "model"),
    "no model type": (config(model_type=None, architectures=None), "model_type"),
    "model type unknown": (config(model_type="nonesuch"), "nonesuch"),
    "another architecture": (config(model_type="gpt2"), "gpt2"),
    "an encoder": (config(model_type="bert"), "bert"),
    "another activation": (config(hidden_act="gelu"), "gelu"),
    "RoPE yarn": (config(rope_parameters={**ROPE, "rope_type": "yarn"}), "yarn"),
    "RoPE linear": (config(rope_parameters={**ROPE, "rope_type": "linear"}), "linear"),
    "RoPE unknown": (config(rope_parameters={**ROPE, "rope_type": "spiral"}), "spiral"),
    "llama3 without factors": (config(rope_parameters={**ROPE, "rope_type": "llama3"}), "low_freq_factor"),
    "sliding window": (config(model_type="qwen2", use_sliding_window=True, sliding_window=8), "sliding"),
    "no tokenizer": (remove("tokenizer.json", "tokenizer_config.json"), "no tokenizer"),
    "tokenizer cut short": (bytes_of("tokenizer.json", lambda data: data[:200]), "no tokenizer that can be read"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_model_folder(folder, fails, case):
    damage, words = FOLDERS[case]
    damage(folder)
    assert words in fails(answer, folder)


def test_code_of_a_model_folder_is_not_run(folder, fails, tmp_path):
    """A folder that brings its own classes, and asks for them in every way there is: refused, and nothing executed."""
    witness = tmp_path / "witness"
    code = f"open({str(witness)!r}, 'w')\nclass Config: pass\nclass Model: pass\nclass Tokenizer: pass\n"
    (folder / "own.py").write_text(code)
    config(model_type="own", auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"})(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}}))
    assert "own" in fails(answer, folder)
    assert not witness.exists()


# --- what is asked for ---

OPTIONS = {
    **{
        f"{option} {value}": ([option, value], "whole number from 1")
        for option in ("--max-new-tokens", "--block-size", "--num-blocks", "--batch-size", "--threads")
        for value in ("0", "-3", "many", "2.5", "")
    },
    "more tokens than positions": (["--max-new-tokens", "99999999999999999999"], "--max-new-tokens"),
    "tokens beyond the positions": (["--max-new-tokens", "2147483647"], "prompt 1 is too long"),
    "a prompt too long": (["--prompt", "x" * 3000], "prompt 2 is too long"),
    "blocks without end": (["--num-blocks", "2147483647"], "--num-blocks"),
    "blocks beyond any number": (["--num-blocks", "9" * 30], "--num-blocks"),
    "a block without end": (["--block-size", "2147483647"], "lower"),
    "threads without end": (["--threads", "100000"], "--threads 100000 is more"),
    "empty prompt": (["--prompt", ""], "prompt 2 is empty"),
    "blank prompt": (["--prompt", " \n\t"], "prompt 2 is empty"),
    "prompt that is no text": (["--prompt", "\udcff"], "not valid UTF-8"),
    "unknown dtype": (["--dtype", "float8"], "float8"),
    "unknown device": (["--device", "tpu0"], "tpu0"),
    "device that computes nothing": (["--device", "meta"], "meta"),
    "device of another library": (["--device", "xla"], "xla"),
    "unknown engine": (["--engine", "vllm"], "vllm"),
    "unknown option": (["--temperature", "1"], "--temperature"),
    "option without value": (["--seed"], "--seed"),
    "shape without weights": (["--model", "shape:qwen2.5-7b"], "without weights"),
    "no such model": (["--model", "no-such-model"], "no model folder"),
    "a name too long": (["--model", "x" * 5000], "no model folder"),
    "empty name": (["--model", ""], "no model folder"),
    "hub out of reach": (["--model", "no-such-owner/no-such-model"], "no-such-owner/no-such-model"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options(tiny, fails, case):
    options, words = OPTIONS[case]
    assert words in fails(answer, tiny, *options)


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "mps"])
def test_device_that_is_not_here(tiny, fails, monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert "--device cpu" in fails(answer, tiny, "--device", device)


# --- the other commands ---

COMMANDS = {
    "diff of an unknown step": (diff.main, ["01", "77"], "there is no step '77'"),
    "diff of one step": (diff.main, ["01"], "which two steps"),
    "bench of an unknown step": (bench.main, ["quick", "--model", "tiny", "--steps", "77"], "there is no step '77'"),
    "bench of an unknown suite": (bench.main, ["quick", "--model", "tiny", "--suites", "speed"], "no suite 'speed'"),
    "bench on no device": (bench.main, ["quick", "--model", "tiny", "--device", "tpu"], "no device 'tpu'"),
    "bench with no threads": (bench.main, ["quick", "--model", "tiny", "--threads", "0"], "--threads 0"),
    "bench with one token": (bench.main, ["quick", "--model", "tiny", "--new-tokens", "1"], "--new-tokens 1"),
    "bench of no model": (bench.main, ["quick", "--model", "no-such-model", "--threads", "1"], "no model folder"),
    "bench of an unknown shape": (bench.main, ["quick", "--model", "shape:huge", "--threads", "1"], "no shape 'huge'"),
    "zoo without such a mutant": (zoo.main, ["no-such-mutant"], "--list"),
    "zoo without workers": (zoo.main, ["--jobs", "0"], "--jobs must be at least 1"),
    "zoo written in part": (zoo.main, ["--write", "--step", "01"], "--write needs the whole zoo"),
    "no such model to prepare": (models.main, ["no-such-model"], "no model folder"),
    "no such shape": (models.main, ["shape:huge"], "no shape 'huge'"),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_commands(tiny, fails, case):
    main, arguments, words = COMMANDS[case]
    assert words in fails(main, arguments)


# --- results, and the disk ---

QUICK = ["quick", "--model", "tiny", "--threads", "1", "--new-tokens", "2", "--suites", "counts", "--steps", "01"]

DAMAGED_RESULTS = {
    "empty": "",
    "cut short": '{"environment": {"kind": "quick"',
    "a list": "[]",
    "a number": "3",
    "no rows": '{"environment": {}}',
    "rows of nothing": '{"environment": {}, "rows": [{}]}',
    "no text": "\x00\x01",
}


@pytest.mark.parametrize("case", DAMAGED_RESULTS)
def test_damaged_results_file(tiny, fails, tmp_path, case):
    """It is named, and not overwritten: who knows what is in it."""
    path = tmp_path / "results.json"
    path.write_text(DAMAGED_RESULTS[case])
    assert "results.json" in fails(bench.main, [*QUICK, "--output", str(path)])
    assert path.read_text() == DAMAGED_RESULTS[case]


def test_results_into_a_folder(tiny, fails, tmp_path):
    assert str(tmp_path) in fails(bench.main, [*QUICK, "--output", str(tmp_path)])


def test_results_below_a_file(tiny, fails, tmp_path):
    (tmp_path / "file").touch()
    assert "file" in fails(bench.main, [*QUICK, "--output", str(tmp_path / "file" / "results.json")])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_results_folder_not_writable(tiny, fails, tmp_path):
    tmp_path.chmod(0o500)
    assert str(tmp_path) in fails(bench.main, [*QUICK, "--output", str(tmp_path / "results.json")])


def test_publish_without_results(fails, tmp_path):
    assert "does not exist" in fails(bench.main, ["publish", "--output", str(tmp_path / "none.json")])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT])
def test_results_cannot_be_written(fails, tmp_path, monkeypatch, number):
    """A full disk, or one that may not be written: said in one line; what was there stays."""
    path = tmp_path / "results.json"
    path.write_text("before")

    def refuse(*arguments, **options):
        raise OSError(number, os.strerror(number), str(arguments[0]))

    monkeypatch.setattr(os, "replace", refuse)
    message = fails(command_that(lambda: record.write_json(path, {"environment": {}, "rows": []})))
    assert os.strerror(number) in message
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def command_that(work):
    """A command in which only `work` happens."""
    from shared.errors import plain_errors

    return plain_errors()(work)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_model_cannot_be_written(fails, tmp_path, monkeypatch, number):
    """The disk is full when half of the model is there: nothing is left of it."""
    monkeypatch.setattr(models, "MODELS_DIR", tmp_path / "models")

    def half(work: Path, new: Path):
        new.mkdir()
        (new / "config.json").write_text("{}")
        raise OSError(number, os.strerror(number), str(new / "model.safetensors"))

    monkeypatch.setitem(models.PREPARED, "tiny", half)
    assert os.strerror(number) in fails(models.main, ["tiny"])
    assert [path.name for path in (tmp_path / "models").iterdir() if path.suffix != ".lock"] == []


def test_models_folder_cannot_be_made(fails, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(models, "MODELS_DIR", tmp_path / "file" / "models")
    assert "file" in fails(models.main, ["tiny"])


@pytest.mark.parametrize("case", DAMAGED_RESULTS)
def test_report_of_damaged_results(fails, tmp_path, case):
    """`make report` names the file that it cannot read."""
    (tmp_path / "cpu-x.json").write_text(DAMAGED_RESULTS[case])
    assert "cpu-x.json" in fails(report.main, ["--results", str(tmp_path), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()

"""Other engines beside the ladder: tokens are compared, what cannot run says why, ratios come from one run."""

from __future__ import annotations

import ast
import json

import pytest
import torch

from shared.bench import end_to_end, peers, record
from shared.bench.__main__ import main
from shared.bench.workloads import chat
from shared.steps import list_steps

CHAT = chat(2, 4)
HASHES = {"transformers": "t", "machine": "m"}


@pytest.fixture
def results(tmp_path):
    return record.Record(tmp_path / "peers.json", {}, HASHES)


def sample(seconds, **changes):
    return {"seconds": seconds, "token_ids": [[1] * 4] * 2, "tokens_equal": True} | changes


def test_ratios_are_taken_within_the_run(results):
    for seconds in (4.0, 2.0):  # the baseline's two runs: 2 and 4 tokens a second
        peers.fold(results, "transformers", CHAT, HASHES, sample(seconds))
    peers.fold(results, "vllm", CHAT, HASHES, sample(1.0, version="1"))
    row = results.rows["peers", "vllm", "chat", 2]
    assert row["tokens_per_s"] == 8.0 and row["x_transformers"] == pytest.approx(8 / 3) and row["version"] == "1"


def test_wrong_tokens_have_no_speed(results):
    peers.fold(results, "transformers", CHAT, HASHES, sample(4.0))
    wrong = {"tokens_equal": False, "wrong": True, "first_difference": {"request": 0, "position": 1}}
    peers.fold(results, "vllm", CHAT, HASHES, sample(1.0, **wrong))
    row = results.rows["peers", "vllm", "chat", 2]
    assert row["wrong"] and "tokens_per_s" not in row and "x_transformers" not in row
    peers.fold(results, "vllm", CHAT, HASHES, sample(1.0))
    assert results.rows["peers", "vllm", "chat", 2] == row, "a second run took the first one's mistake away"


@pytest.mark.parametrize(("margin", "wrong"), [(0.001, False), (3.0, True)])
def test_a_fork_is_accepted_only_where_two_tokens_are_about_equal(margin, wrong, monkeypatch):
    seen = []
    monkeypatch.setattr(peers, "margin_at", lambda *args: seen.append(args[-1]) or margin)
    env = {"dtype": "float32", "device": "cpu", "model_argument": "tiny"}
    found = peers.verdict([[1, 2], [3, 5]], [[1, 2], [3, 4]], [[7], [8, 9]], env)
    assert found["wrong"] is wrong and found["first_difference"] == {"request": 1, "position": 1}
    assert seen == [[8, 9, 3]], "the margin belongs to the prompt and the tokens before the fork"
    assert peers.verdict([[1]], [[1]], [[7]], env) == {"tokens_equal": True, "wrong": False}


def test_half_precision_is_allowed_as_much_as_in_the_benchmark():
    assert {k: v for k, v in peers.PEER_MARGINS.items() if k != torch.float32} == end_to_end.MARGINS


def test_an_engine_that_cannot_be_installed_says_why(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(peers, "FOLDER", tmp_path)
    monkeypatch.setenv("PIP_RETRIES", "0")
    engine = peers.Engine("vllm", ("kv-ladder-has-no-such-package==1",), own_torch=True)
    reason = peers.prepare(engine, "cpu")
    assert reason.startswith("could not be installed: ") and "kv-ladder-has-no-such-package" in reason
    assert "\n" not in reason and not peers.stamp(engine).exists()
    assert peers.prepare(peers.Engine("x", ("y",), cpu_only=True), "cuda") == "measured on the CPU only"


def test_scripts_stand_alone():
    """They run in environments that do not have this project's packages."""
    for engine in peers.engines("cpu").values():
        tree = ast.parse(engine.script.read_text(encoding="utf-8"))
        roots = {alias.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
        roots |= {(n.module or "").split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        assert not roots & {"shared", "steps", "tests"}, engine.name


def test_versions_are_fixed():
    for device in ("cpu", "cuda"):
        for engine in peers.engines(device).values():
            assert all("==" in package for package in engine.packages or ()), engine.name


def test_unknown_engine_and_shape_get_one_line(capsys):
    for arguments, message in (
        (["--peers", "speedy"], "no engine 'speedy': there are continuous_batching, ctranslate2"),
        (["--model", "shape:smollm2-135m"], "need a model folder"),
    ):
        with pytest.raises(SystemExit) as end:
            main(["peers", *arguments])
        error = capsys.readouterr().err
        assert end.value.code == 2 and message in error and error.count("\n") == 1


@pytest.mark.slow
def test_transformers_continuous_batching_beside_a_step(tmp_path, monkeypatch, capsys):
    """A whole run with the one engine that needs no installation: real processes, a real comparison."""
    monkeypatch.setattr(peers, "chat", lambda batch: chat(batch, 6))
    monkeypatch.setattr(peers, "FOLDER", tmp_path)
    slug, output = list_steps()[-1].slug, tmp_path / "peers.json"
    arguments = ["--peers", "continuous_batching", "--steps", slug, "--model", "tiny", "--threads", "1"]
    main(["peers", *arguments, "--output", str(output)])
    document = json.loads(output.read_text())
    rows = {(row["variant"], row["batch"]): row for row in document["rows"]}
    assert set(rows) == {(v, b) for v in ("transformers", slug, "continuous_batching") for b in (1, 8)}
    assert document["environment"]["complete"]
    for row in rows.values():
        assert row["tokens_equal"] and row["tokens_per_s"] > 0 and len(row["samples"]) == peers.REPEATS
    assert "continuous_batching" in capsys.readouterr().out

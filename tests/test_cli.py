"""The commands: run.py of every step, the diff, how steps are found, and how each kind of mistake ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from shared import cli, diff, launch, models
from shared.errors import UserError, plain_errors
from shared.prompts import CHAT_PROMPTS
from shared.steps import Step, code_hash, find_step, list_steps, load_step

ROOT = Path(__file__).resolve().parent.parent
STEPS = list_steps()
ONE = STEPS[:5][-1]  # where any step that runs prompts together will do
FAST = ["--model", "tiny", "--max-new-tokens", "5", "--prompt", "hi", "--prompt", "a longer prompt than the first"]

every_step = pytest.mark.parametrize("rung", STEPS, ids=lambda rung: rung.slug)


@pytest.fixture(autouse=True, scope="module")
def models_dir(tmp_path_factory):
    """`tiny` is made here, so that these tests neither need nor change the repository's models/."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "MODELS_DIR", tmp_path_factory.mktemp("models"))
        yield models.MODELS_DIR


@pytest.fixture
def run(capsys):
    """`run(step, *options) -> (exit code, stdout lines, stderr)` of the step's run.py, within this process."""

    def run(step: Step, *options: str):
        try:
            cli.main(step.path, [*FAST, *options])
            code = 0
        except SystemExit as end:
            code = end.code or 0
        captured = capsys.readouterr()
        return code, captured.out.splitlines(), captured.err

    return run


# --- run.py ---


def test_run_py_is_one_text():
    assert len({(step.path / "run.py").read_bytes() for step in STEPS}) == 1


@every_step
def test_answers_and_numbers(run, rung):
    code, out, err = run(rung, "--json", "--ignore-eos")
    assert (code, err) == (0, ""), "no progress where nobody watches"
    document = json.loads(out[-1])
    assert document["step"] == rung.slug
    assert document["prompts"] == ["hi", "a longer prompt than the first"]
    assert document["prompt_tokens"] == [2, 30]
    assert [len(ids) for ids in document["token_ids"]] == [5, 5]
    tokenizer = models.load_tokenizer(models.resolve_model("tiny"))
    assert document["texts"] == [tokenizer.decode(ids, skip_special_tokens=True) for ids in document["token_ids"]]
    # Blocks of 16 for 30 + 4 stored tokens, and for 2 + 4 where the step runs both at once.
    assert document["peak_blocks"] in (3, 4)
    # Keys and values, 4 layers, 3 heads of 16 numbers, float32.
    assert document["peak_bytes"] == document["peak_blocks"] * 2 * 4 * 16 * 3 * 16 * 4
    first, second = document["ttft_s"]
    assert 0 < first < second <= document["prefill_s"] + document["decode_s"]
    assert document["tokens_per_s"] == pytest.approx(10 / (document["prefill_s"] + document["decode_s"]))
    assert document["error"] is None
    assert out[0] == "[1] hi"
    assert {"prefill", "decode", "time to first token", "tokens per second", "cache at its peak"} <= {
        re.split(" {2,}", line)[0] for line in out
    }


def test_all_steps_give_the_same_tokens(run):
    answers = [json.loads(run(step, "--json", "--block-size", "3")[1][-1])["token_ids"] for step in STEPS]
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_batch_size_changes_no_answer(run, size):
    prompts = ["--prompt", "third", "--prompt", "the fourth one", "--json", "--ignore-eos"]
    together = json.loads(run(ONE, *prompts)[1][-1])
    code, out, _ = run(ONE, *prompts, "--batch-size", str(size))
    document = json.loads(out[-1])
    assert code == 0
    assert document["token_ids"] == together["token_ids"]
    assert document["peak_blocks"] < together["peak_blocks"], "fewer at once need fewer blocks"
    assert document["ttft_s"] == sorted(document["ttft_s"]), "who waits for the next batch waits for its first token"


def test_default_prompts(capsys):
    cli.main(ONE.path, ["--model", "tiny", "--max-new-tokens", "1", "--json"])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["prompts"] == CHAT_PROMPTS


def test_ends_where_the_model_ends(run, monkeypatch):
    whole = json.loads(run(ONE, "--json", "--ignore-eos")[1][-1])["token_ids"]
    monkeypatch.setattr(cli, "end_tokens", lambda folder, tokenizer: [whole[1][2]])
    assert json.loads(run(ONE, "--json")[1][-1])["token_ids"][1] == whole[1][:3]
    assert json.loads(run(ONE, "--json", "--ignore-eos")[1][-1])["token_ids"] == whole


def test_json_has_nothing_that_is_not_json(run):
    _, out, _ = run(ONE, "--json")
    json.loads(out[-1], parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_from_another_directory(tmp_path):
    """The one real process here: the file itself, started as a user would, elsewhere."""
    environment = os.environ | {"MODELS_DIR": str(models.MODELS_DIR)}
    command = [sys.executable, ONE.path / "run.py", *FAST, "--threads", "1", "--json"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    document = json.loads(result.stdout.splitlines()[-1])
    assert (document["step"], document["threads"]) == (ONE.slug, 1)


def test_help_needs_no_torch(tmp_path):
    """--help works before set-up, with any Python 3, and names every option."""
    command = [sys.executable, "-S", ONE.path / "run.py", "--help"]  # -S: nothing but the standard library
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    options = "model prompt batch-size max-new-tokens block-size num-blocks device dtype threads ignore-eos json"
    assert {f"--{name}" for name in options.split()} <= set(re.findall(r"--[a-z-]+", result.stdout))
    assert ONE.title in " ".join(result.stdout.split())


def test_terminal_escapes_are_not_passed_on():
    assert cli.printable("a\x1b[31mb\nc\x07") == "a\ufffd[31mb\nc\ufffd"


# --- mistakes ---


@pytest.mark.parametrize(
    "options, message",
    [
        (["--block-size", "0"], "'0' is not a whole number from 1"),
        (["--max-new-tokens", "many"], "'many' is not a whole number"),
        (["--batch-size", "-1"], "'-1' is not a whole number"),
        (["--num-blocks", "1.5"], "'1.5' is not a whole number"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--no-such-option"], "unrecognized arguments"),
        (["--attention", "fast"], "unrecognized arguments"),
        (["--threads", "100000"], "more than this machine's"),
        (["--prompt", " "], "prompt 3 is empty"),
        (["--prompt", "\udcff"], "prompt 3 is not valid UTF-8"),
        (
            ["--max-new-tokens", "2048"],
            "prompt 1 is too long: 2 tokens and 2048 new ones, but the model has 2048 positions",
        ),
        (["--device", "toaster"], "no device is called 'toaster'"),
        (["--model", "/no/such/model"], "no model folder '/no/such/model'"),
        (["--num-blocks", "9" * 10], "is not a whole number from 1 to 2147483647"),
        (["--num-blocks", "2147483647", "--block-size", "2000"], "does not fit into memory: lower --num-blocks"),
        (["--num-blocks", "2147483647", "--block-size", "2147483647"], "does not fit into memory: lower --num-blocks"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_end_in_one_line(run, options, message):
    code, out, err = run(STEPS[0], *options)
    assert (code, out) == (2, [])
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "mps"])
def test_missing_device(run, device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    code, _, err = run(ONE, "--device", device)
    assert code == 2 and "run with --device cpu" in err


def test_model_the_step_cannot_run(run, tmp_path):
    config = json.loads((models.resolve_model("tiny") / "config.json").read_text())
    for path in models.resolve_model("tiny").iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    code, _, err = run(ONE, "--model", str(tmp_path))
    assert code == 2 and "unsupported activation 'gelu'" in err and err.count("\n") == 1


@every_step
def test_out_of_blocks_keeps_what_was_produced(run, rung):
    """Room for both prompts, and for a few of their new tokens."""
    code, out, err = run(rung, "--ignore-eos", "--json", "--block-size", "1", "--num-blocks", "33")
    document = json.loads(out[-1])
    produced = [len(ids) for ids in document["token_ids"]]
    whole = json.loads(run(rung, "--ignore-eos", "--json")[1][-1])["token_ids"]
    assert code == 2
    assert sum(produced) >= 2 and min(produced) < 5
    assert document["token_ids"] == [ids[:n] for ids, n in zip(whole, produced)]
    assert document["peak_blocks"] <= 33
    assert err.count("\n") == 1 and "raise --num-blocks" in err and "of 33 free" in err
    assert document["error"] in err


def test_what_the_step_cannot_do(run, monkeypatch):
    def generate(*arguments, **options):
        raise ValueError("no such kernel here: take another\nmore")

    monkeypatch.setattr(load_step(ONE), "generate", generate)
    assert run(ONE) == (2, [], "error: no such kernel here: take another\n")


@pytest.mark.parametrize("stop, code", [(KeyboardInterrupt, 130), (SystemExit, 143)])
def test_interruption_keeps_what_was_produced(run, monkeypatch, stop, code):
    module = load_step(ONE)
    generate = module.generate

    def interrupted(*arguments, on_token=None, **options):
        def stop_at_the_second(index, token):
            on_token(index, token)
            if index == 1:
                raise stop(143)

        return generate(*arguments, on_token=on_token and stop_at_the_second, **options)

    monkeypatch.setattr(module, "generate", interrupted)
    got, out, _ = run(ONE, "--json", "--ignore-eos")
    assert got == code
    assert [len(ids) for ids in json.loads(out[-1])["token_ids"]] == [1, 1]


@pytest.mark.parametrize(
    "error, code, line",
    [
        (UserError("wrong: do this"), 2, "error: wrong: do this\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (SystemExit(7), 7, ""),
    ],
)
def test_plain_errors(capsys, error, code, line):
    with pytest.raises(SystemExit) as end, plain_errors():
        raise error
    assert (end.value.code, capsys.readouterr().err) == (code, line)


def test_sigterm_ends_like_an_error():
    """So that `finally` still cleans up; and the handler that was there before is there again."""
    before, cleaned = signal.getsignal(signal.SIGTERM), []
    with pytest.raises(SystemExit) as end, plain_errors():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            cleaned.append(True)
    assert (end.value.code, cleaned) == (143, [True])
    assert signal.getsignal(signal.SIGTERM) is before


def test_closed_pipe_is_quiet():
    code = "from shared.errors import plain_errors\nwith plain_errors():\n  for i in range(100000): print('line', i)"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError), plain_errors():
        raise ZeroDivisionError


# --- started with a Python that lacks torch ---


@pytest.fixture
def without_torch(monkeypatch, tmp_path):
    """A Python that has no torch, in a project without .venv; what is executed instead is recorded."""
    executed = []
    monkeypatch.setattr(launch, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(launch.os, "execv", lambda path, arguments: executed.append((path, arguments)))
    return executed


def test_without_venv(without_torch):
    with pytest.raises(UserError, match="run `make setup` first"):
        launch.ensure_dependencies()


def test_with_venv(without_torch, monkeypatch):
    python = launch.VENV / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    monkeypatch.setattr(sys, "argv", ["run.py", "--json"])
    monkeypatch.setitem(sys.modules, "__main__", type(sys)("__main__"))
    launch.ensure_dependencies()
    assert without_torch == [(python, [str(python), "run.py", "--json"])]


def test_with_a_venv_that_is_not_finished(without_torch, monkeypatch):
    (launch.VENV / "bin").mkdir(parents=True)
    (launch.VENV / "bin" / "python").touch()
    monkeypatch.setattr(sys, "prefix", str(launch.VENV))
    with pytest.raises(UserError, match="set-up was not finished: run `make setup`"):
        launch.ensure_dependencies()
    assert without_torch == [], "it would start itself again and again"


# --- steps ---


@pytest.fixture
def ladder(tmp_path):
    """Two small steps in a folder of their own."""
    text = '''"""The first one. More.\n\nKey."""

import math


def f(x):
    return x


class C:
    a = 1

    def g(self):
        return 1

    def h(self):
        return 1
'''
    changed = text.replace("first one. More.\n\nKey.", "second one.").replace("return x", "return x + 1")
    texts = {"01_first": text, "02_second": changed.replace("def h", "def k")}
    for slug, text in texts.items():
        (tmp_path / slug).mkdir()
        (tmp_path / slug / "model.py").write_text(text)
    return tmp_path


def test_steps_are_listed(ladder):
    (ladder / "03_no_model").mkdir()
    (ladder / "notes").mkdir()
    first, second = list_steps(ladder)
    assert (first.slug, first.number, first.title) == ("01_first", "01", "The first one")
    assert second.path == ladder / "02_second"


@pytest.mark.parametrize("name", ["2", "02", "02_second"])
def test_find_step(ladder, name):
    assert find_step(name, ladder).slug == "02_second"


@pytest.mark.parametrize("name", ["3", "second", "", "02_"])
def test_no_such_step(ladder, name):
    with pytest.raises(UserError, match="there are: 01_first, 02_second"):
        find_step(name, ladder)


def test_no_steps(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="no steps in"):
        list_steps(tmp_path)
    monkeypatch.setenv("STEPS_DIR", str(tmp_path))
    with pytest.raises(UserError, match="no steps in"):
        list_steps()


def test_copies_of_a_step_share_nothing(ladder, tmp_path_factory):
    other = shutil.copytree(ladder / "01_first", tmp_path_factory.mktemp("other") / "01_first")
    first, second = load_step(find_step("1", ladder)), load_step(Step(other))
    assert first is load_step(find_step("1", ladder))
    assert first.C is not second.C
    assert first.SLUG == second.SLUG == "01_first"


def test_a_step_that_fails_to_load_is_not_kept(ladder):
    (ladder / "02_second" / "model.py").write_text("raise ValueError('broken')")
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            load_step(find_step("2", ladder))


@pytest.mark.parametrize(
    "file, old, new, same",
    [
        ("model.py", "return x + 1", "return x + 2", False),
        ("model.py", "a = 1", "a = 1.0", False),
        ("model.py", "def k(self)", "def k(this)", False),
        ("model.py", "return x + 1", "return (x  +  1)  # why", True),
        ("model.py", "second one", "other one", True),
        ("model.py", "import math", "import math\n\ndef load_model():\n    pass", True),
        ("model.py", "import math", "import math\n\ndef self_check():\n    pass", True),
        ("kernels_fast.py", "", "x = 1", False),
        ("run.py", "", "x = 1", True),
    ],
)
def test_code_hash(ladder, file, old, new, same):
    step = find_step("2", ladder)
    before = code_hash(step)
    assert re.fullmatch("[0-9a-f]{16}", before)
    path = step.path / file
    text = path.read_text() if path.exists() else ""
    assert old in text
    path.write_text(text.replace(old, new, 1) if old else new)
    assert (code_hash(step) == before) is same


# --- the diff ---


def test_diff(ladder, monkeypatch, capsys):
    monkeypatch.setenv("STEPS_DIR", str(ladder))
    diff.main(["1", "02_second", "--context", "0"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["--- steps/01_first/model.py", "+++ steps/02_second/model.py"]
    assert [line.split("@@ ")[-1] for line in lines if line.startswith("@@")] == ["docstring", "f", "C.h"]
    assert "-    return x" in lines and "+    return x + 1" in lines
    assert "\x1b" not in "".join(lines), "colour is for terminals"


@pytest.mark.parametrize("context", [0, 1, 3, 50])
def test_diff_turns_one_file_into_the_other(tmp_path, context):
    """What `git apply` makes of the diff of two real steps is the second one."""
    for a, b in pairwise(STEPS):
        target = tmp_path / "steps" / a.slug / "model.py"
        target.parent.mkdir(parents=True)
        target.write_text(a.model_py.read_text())
        lines = diff.unified_diff(a, b, context)
        lines[1] = f"+++ b/steps/{a.slug}/model.py"
        lines[0] = f"--- a/steps/{a.slug}/model.py"
        patch = "\n".join(lines) + "\n"
        command = ["git", "apply", "--unidiff-zero", "-"]
        subprocess.run(command, input=patch, text=True, cwd=tmp_path, check=True)
        assert target.read_text() == b.model_py.read_text()


def test_diff_stat(ladder, monkeypatch, capsys):
    monkeypatch.setenv("STEPS_DIR", str(ladder))
    diff.main(["1", "2", "--stat"])
    assert capsys.readouterr().out.splitlines() == [
        "01_first -> 02_second: 3 lines added, 5 removed",
        "~ docstring",
        "~ f",
        "- C.h",
        "+ C.k",
    ]


@pytest.mark.parametrize("no_color, coloured", [("", True), ("1", False)])
def test_diff_is_coloured_on_a_terminal(ladder, monkeypatch, capsys, no_color, coloured):
    monkeypatch.setenv("STEPS_DIR", str(ladder))
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    diff.main(["1", "2"])
    assert ("\x1b[32m+    return x + 1\x1b[0m" in capsys.readouterr().out) is coloured


@pytest.mark.parametrize("arguments", [[], ["1"], ["1", "2", "3"], ["1", "9"]])
def test_diff_of_what(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        diff.main(arguments)
    err = capsys.readouterr().err
    assert end.value.code == 2 and err.count("\n") == 1 and STEPS[0].slug in err

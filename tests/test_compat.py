"""The compatibility matrix: what the newest and the oldest version do now is what results/compat/ says."""

from __future__ import annotations

import json
import logging
import platform
import subprocess
import warnings

import pytest
import transformers

from shared.compat import RESULTS, VERSIONS, __main__, cost, environments, hunt, probe, watch
from shared.docs import compat as tables
from shared.engine import steps_with_cache_object
from shared.errors import UserError
from shared.models import shape_config
from shared.steps import ROOT


def committed(version: str) -> dict:
    return json.loads((RESULTS / f"{version}.json").read_text(encoding="utf-8"))


def comparable(result: dict) -> dict:
    """A result without what may change with the machine: sizes of errors, lines of code, versions of Python, torch."""
    return {family: tables.outline(found, family) for family, found in result["families"].items()}


@pytest.fixture(scope="module")
def newest() -> dict:
    """The probe in the transformers that is installed here."""
    return json.loads(json.dumps(probe.everything()))


@pytest.fixture(scope="module")
def oldest() -> dict:
    """The probe in the oldest version, whose environment is made first if it is not there."""
    try:
        done = environments.run_in(VERSIONS[0], "shared.compat.probe", capture=True)
    except UserError as error:
        pytest.skip(f"transformers {VERSIONS[0]} cannot be installed here: {error}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_step_is_right_and_silent(result: dict) -> None:
    for family in result["families"].values():
        slug, found = list(family["steps"].items())[-1]
        assert slug == steps_with_cache_object()[0].slug
        assert found == {"messages": [], "tokens_equal": True}


def test_newest(newest):
    assert_step_is_right_and_silent(newest)
    assert newest["hunt"]["cache_is_ours"] == {look: ["(nothing)"] for look in tables.LOOKS}
    for family in newest["families"].values():
        for found in (family["prefill"]["empty_by_signature"], family["decode"]["filled_by_signature"]):
            assert (found["messages"], found["logits_equal"], found["cached"]) == ([], True, found["expected"])
    published = committed(VERSIONS[-1])
    if newest["transformers"] == published["transformers"]:
        assert comparable(newest) == comparable(published)
        if newest["torch"].split("+")[0] == published["torch"].split("+")[0]:  # a line of torch is in it
            assert newest["hunt"] == published["hunt"]


def test_oldest(oldest):
    assert oldest["transformers"] == VERSIONS[0]
    assert_step_is_right_and_silent(oldest)
    assert comparable(oldest) == comparable(committed(VERSIONS[0]))
    assert oldest["hunt"] == committed(VERSIONS[0])["hunt"]


def test_oldest_hunt_finds_prefill(oldest):
    """The call that logs is prefill's, -W error shows nothing, and an empty DynamicCache is the cure."""
    found = oldest["hunt"]["decode_is_fixed"]
    assert found["raise_warnings"] == ["(nothing)"]
    assert found["raise_logged"][:2] == ["in decode_is_fixed", "    out = model(prompt, use_cache=True)"]
    assert set(map(tuple, oldest["hunt"]["prefill_is_fixed"].values())) == {("(nothing)",)}


def test_oldest_shares_torch_and_nothing_else(oldest):
    python = environments.python_of(VERSIONS[0])
    names = "('torch', 'numpy', 'transformers')"
    code = f"from importlib.util import find_spec as find; print(*(find(name).origin for name in {names}))"
    torch_py, *others = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert torch_py.startswith(str(environments.TORCH))
    assert all(path.startswith(str(environments.FOLDER / VERSIONS[0])) for path in others)


@pytest.mark.parametrize("version", VERSIONS)
def test_published_results(version):
    result = committed(version)
    assert result["transformers"] == version
    assert_step_is_right_and_silent(result)
    text = json.dumps(result)
    assert str(ROOT) not in text
    assert "site-packages" not in text


def test_both_channels_are_heard_every_time():
    logger = transformers.logging.get_logger("transformers.models.llama")
    for _ in range(2):  # also what is logged only once
        with watch.messages() as found:
            logger.warning_once("said")
            warnings.warn("warned", FutureWarning, stacklevel=1)
        assert [(message.channel, message.text) for message in found] == [
            ("logger.warning", "said"),
            ("FutureWarning", "warned"),
        ]
        assert all(message.where.startswith("tests/test_compat.py:") for message in found)


def test_a_handler_that_raises_reaches_the_caller_and_is_taken_off_again():
    def handle(record):
        raise RuntimeError(record.getMessage())

    logger = transformers.logging.get_logger("transformers.models.llama")
    before = set(logging.getLogger("transformers").handlers)
    with pytest.raises(RuntimeError, match="said"), watch.log_handler(handle):
        logger.warning("said")
    assert set(logging.getLogger("transformers").handlers) == before


def test_torch_comes_with_what_it_needs_only():
    names = set(environments.torch_files())
    assert {"torch", "sympy", "networkx", "typing_extensions.py"} <= names
    assert not {"transformers", "numpy", "accelerate", "tokenizers"} & names


def test_other_pythons_are_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(platform, "python_version_tuple", lambda: ("3", "13", "1"))
    with pytest.raises(UserError, match=r"this is Python 3\.13; .* needs 3\.11 or 3\.12"):
        environments.check_python()


def test_unknown_version(capsys):
    with pytest.raises(SystemExit) as end:
        __main__.main(["4.0.0"])
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("error: transformers 4.0.0 is not one of those compared")


def test_one_failure_does_not_lose_the_others(monkeypatch, capsys):
    def measure(version):
        if version == "4.47.1":
            raise UserError("no network")
        return committed(version)

    monkeypatch.setattr(__main__, "measure", measure)
    with pytest.raises(SystemExit) as end:
        __main__.main(["4.43.4", "4.47.1", "5.0.0"])
    out, err = capsys.readouterr()
    assert end.value.code == 2
    assert [line.split()[1] for line in out.splitlines()] == ["4.43.4", "5.0.0"]
    assert err.splitlines()[-1].startswith("error: no result for 4.47.1")


def test_tables_name_what_was_measured(tmp_path, monkeypatch):
    files = tables.render()
    assert "**wrong**, no error" in files["compat/decode.md"]
    assert f"`{steps_with_cache_object()[0].slug}` | right, silent" in files["compat/steps.md"]
    assert all(version in files["compat/environment.md"] for version in VERSIONS)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(cost, "RESULTS", tmp_path / "cost.json")
    empty = tables.render()
    assert empty.keys() == files.keys()
    assert all(text.startswith("Not measured") for name, text in empty.items() if not name.endswith(tuple(SOURCES)))


SOURCES = [f"hunt/{attempt.__name__}.md" for attempt in hunt.ATTEMPTS]


def test_differences_between_families_are_named():
    result = committed(VERSIONS[-1])
    result["families"]["qwen2"]["decode"]["filled"]["logits_equal"] = False
    assert "different: qwen2 in 5.24.0" in tables.same_in_all_families({VERSIONS[-1]: result})


def test_cost_of_the_cache_object(monkeypatch, tmp_path):
    """The measurement runs, on a small shape, and its table has a row for each part."""
    small = shape_config("smollm2-135m")
    small.num_hidden_layers = 1
    monkeypatch.setattr("shared.models.shape_config", lambda name: small)
    monkeypatch.setattr(cost, "HISTORIES", (16, 32))
    monkeypatch.setattr(cost, "ROUNDS", 2)
    monkeypatch.setattr(cost, "RESULTS", tmp_path / "cost.json")
    result = cost.measure(threads=1)
    assert [len(row["samples_ms"]) for row in result["rows"]] == [2] * 2 * len(tables.COST)
    assert result["rows"][0]["bytes"] == 2 * cost.BATCH * 16 * 3 * 64 * 4
    cost.RESULTS.write_text(json.dumps(result))
    assert tables.cost().count("\n| ") == 1 + 1 + len(tables.COST) + 1


def test_hunt_command(capsys):
    """In the installed version it needs no environment of its own."""
    hunt.main([])
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith(f"transformers {transformers.__version__}\n")
    assert all(f"\n{attempt.__name__}: " in out for attempt in hunt.ATTEMPTS)

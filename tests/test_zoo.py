"""The zoo itself: every mutant fits the code, and the command says so when one is not noticed or no longer fits."""

from __future__ import annotations

import json

import pytest

from shared.docs import tolerance
from shared.docs import zoo as page
from shared.errors import UserError
from shared.steps import ROOT, list_steps
from tests.zoo import __main__ as zoo
from tests.zoo import worker
from tests.zoo.mutants import MUTANTS, DoesNotApply, Edit, Mutant, plant

# The zoo is about the repository's own steps, also where the suite runs on others.
SOURCES = {step.number: step.model_py.read_text(encoding="utf-8") for step in list_steps(ROOT / "steps")}

HARMLESS = Mutant(
    "harmless", "nothing", (Edit("01", "write_kv_to_pool", "position = start_pos + i", "position = i + start_pos"),)
)
FATAL = Mutant("fatal", "k is lost", (Edit("01", "write_kv_to_pool", "k_pool[block, slot] = k[i]", "pass"),))
ENDLESS = Mutant(
    "endless", "it never ends", (Edit("01", "write_kv_to_pool", "k_pool[block, slot] = k[i]", "while 1: pass"),)
)
DEADLY = Mutant(
    "deadly",
    "the process dies",
    (Edit("01", "write_kv_to_pool", "k_pool[block, slot] = k[i]", "__import__('os').abort()"),),
)
STALE = Mutant("stale", "old", (Edit("01", "write_kv_to_pool", "for j in", "for k in"),))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_fits(mutant):
    """In every step it names: found once, and something else than what was there."""
    assert mutant.steps
    assert set(mutant.steps) <= SOURCES.keys()
    for number in mutant.steps:
        assert plant(mutant, number, SOURCES[number]) != SOURCES[number]


def test_zoo_is_complete():
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names)) >= 25
    assert len({mutant.bug for mutant in MUTANTS}) == len(names)
    for number in SOURCES:
        assert sum(number in mutant.steps for mutant in MUTANTS) >= 25
    assert all(mutant.seen == "" or mutant.seen.startswith("https://github.com/") for mutant in MUTANTS)


def test_planting():
    source = "def f():\n    return 1\n\nclass A:\n    x = 'return'\n    def f(self):\n        return 1\n"
    assert plant(Mutant("m", "", (Edit("01", "A.f", "1", "2"),)), "01", source) == source.replace(
        "        return 1", "        return 2"
    )
    assert plant(Mutant("m", "", (Edit("02", "A.f", "1", "2"),)), "01", source) == source
    for where, old, words in (
        ("g", "1", "no g"),
        ("A.g", "1", "no A.g"),
        ("f", "2", "0 times"),
        ("A", "return", "2 times"),
    ):
        with pytest.raises(DoesNotApply, match=words):
            plant(Mutant("m", "", (Edit("01", where, old, "3"),)), "01", source)
    with pytest.raises(SyntaxError):
        plant(Mutant("m", "", (Edit("01", "f", "return 1", "return ("),)), "01", source)


def test_time_limit():
    with pytest.raises(worker.Stuck), worker.time_limit(0.05):
        while True:
            pass
    with worker.time_limit(60):
        pass


def test_one_line():
    assert worker.one_line(ValueError("first\nsecond")) == "ValueError: first"
    assert worker.one_line(RuntimeError("2 needed, 1 free; raise it")) == "RuntimeError: 2 needed, 1 free"
    assert worker.one_line(KeyError()) == "KeyError"


def test_names_and_steps_choose(monkeypatch, capsys):
    zoo.main(["--list", "--step", "01", "padded", "swapped"])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["floor-and-remainder-swapped"]


@pytest.mark.slow
def test_survivors_and_worse(monkeypatch, capsys):
    """What is not noticed, or no longer fits, makes the command fail; what hangs or dies is noticed like the rest."""
    monkeypatch.setattr(zoo, "MUTANTS", (FATAL, DEADLY, STALE, HARMLESS, ENDLESS))
    monkeypatch.setattr(zoo, "SILENCE", 300)
    with pytest.raises(SystemExit) as end:
        zoo.main(["--step", "01"])
    assert end.value.code == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "3 of 5 noticed" in out
    assert "SURVIVED" in out
    assert "no longer applies" in out
    assert "kills the process" in out
    assert "never ends" in out


@pytest.mark.slow
def test_every_bug_is_noticed(capsys):
    zoo.main([])
    assert f"{sum(len(mutant.steps) for mutant in MUTANTS)} noticed" in capsys.readouterr().out


def test_written_table_is_of_these_mutants():
    """results/zoo.json, which the page is made from, has every mutant and no other."""
    rows = json.loads(zoo.RESULTS.read_text(encoding="utf-8"))["rows"]
    numbers = {(row["mutant"], row["step"].split("_")[0]) for row in rows}
    assert numbers == {(mutant.name, number) for mutant in MUTANTS for number in mutant.steps}
    assert all(row["caught_by"] and row["symptom"] for row in rows)


# --- the page ---


def test_page(tmp_path):
    """Equal symptoms are said once, a crash is named by its type, and nothing in a cell is taken for markup."""
    slug = list_steps(ROOT / "steps")[0].slug
    rows = [
        {"mutant": "a", "step": f"0{n}_x", "code": "1", "caught_by": "test_a.py::test_b", "symptom": symptom}
        for n, symptom in enumerate(
            [
                "crashes at token 2: IndexError: 5",
                "crashes at token 2: IndexError: 6",
                "one | two",
                "crashes at token 2: KeyError",
            ],
            start=1,
        )
    ]
    rows[0] |= {"step": slug, "code": "not the code of today"}
    document = {"mutants": {"a": {"bug": "it breaks", "seen": "https://x", "diff": ["-    1", "+    2"]}}, "rows": rows}
    path = tmp_path / "zoo.json"
    path.write_text(json.dumps(document))
    pages = page.render(path)
    (row,) = [line for line in pages["bugs.md"].splitlines() if "It breaks" in line]
    _, bug, symptom, steps, notices, _ = (cell.strip() for cell in row.replace("\\|", "/").split("|"))
    assert bug == "It breaks ([seen](https://x))"
    assert symptom == "01, 02: Crashes at token 2: IndexError<br>03: One / two<br>04: Crashes at token 2: KeyError"
    assert (steps, notices) == ("01 to 04", "`test_b`")
    assert f"The code of {slug}, 02_x, 03_x, 04_x has changed since." in pages["bugs.md"]
    assert "    ```diff\n    -    1\n    +    2\n    ```" in pages["bugs-code.md"]


def test_page_without_results(tmp_path):
    assert "not been planted yet" in page.render(tmp_path / "none.json")["bugs.md"]
    (tmp_path / "zoo.json").write_text('{"rows": []}')
    with pytest.raises(UserError, match=r"zoo\.json is no result"):
        page.render(tmp_path / "zoo.json")


def test_tolerance_table(tmp_path):
    assert tolerance.render(tmp_path / "none.json") == {"tolerance.md": "Not measured yet.\n"}
    row = {"dtype": "float16", "way": "batch", "error": 0.0123, "equal": 63, "tokens": 64, "largest": 21.7}
    environment = {"model": "m", "torch": "1", "transformers": "2"}
    path = tmp_path / "tolerance.json"
    path.write_text(json.dumps({"environment": environment, "step": "05_x", "rows": [row]}))
    table = tolerance.render(path)["tolerance.md"]
    assert "| float16 | in a batch, against alone | 0.01 | 63 of 64 |" in table
    assert "m on the CPU, step 05, torch 1, transformers 2; the largest logit is 22." in table

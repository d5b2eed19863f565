"""The report: the same bytes from the same results; what is missing or old is named; README's table in place."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

from shared.bench import plan
from shared.errors import UserError
from shared.report import __main__ as report_command
from shared.report import data, plots, tables
from shared.report.__main__ import BEGIN, END, build, draw_all, main, with_table
from shared.steps import list_steps

STEPS = list_steps()
ENVIRONMENT = {
    "kind": "full",
    "model": "smollm2-135m-instruct",
    "random_weights": False,
    "device": "cpu",
    "dtype": "float32",
    "threads": 2,
    "cpu": "Test CPU",
    "cores": 2,
    "logical_cores": 2,
    "memory_gib": 8,
    "vector_units": "AVX2",
    "gpu": None,
    "system": "Linux x86_64",
    "python": "3.11.0",
    "versions": {"torch": "2.13.0", "transformers": "5.24.0"},
    "commit": "abc",
    "dirty": False,
    "load_before": 0.1,
    "load_after": 1.9,
}


def made_up_rows():
    """A row of every kind. The figures are arbitrary; what matters is which of them end up where."""
    hashes = {step.slug: data.code_hash(step) for step in STEPS}
    variants = [plan.BASELINE, *hashes]
    rows = []

    def add(suite, variant, workload, batch, **more):
        key = {"suite": suite, "variant": variant, "workload": workload, "batch": batch}
        rows.append(key | {"code_hash": hashes.get(variant, "library")} | more)

    full = plan.full()
    for i, variant in enumerate(variants):
        for w in full.workloads:
            times = {}
            for j, name in enumerate(("tokens_per_s", "ttft_ms", "tpot_ms", "decode_step_ms")):
                value = 1000.0 + 100 * i + 10 * j + w.batch
                times |= {name: value, f"{name}_q1": value - 1, f"{name}_q3": value + 1}
            ratios = {"x_transformers": 0.5 + i, "x_transformers_decode": 0.25 + i}
            sizes = {"peak_kv_bytes": 7e6, "peak_memory_bytes": 9e8}
            add(
                "end_to_end",
                variant,
                w.name,
                w.batch,
                tokens_equal=True,
                wrong=False,
                repeats=2,
                **times,
                **ratios,
                **sizes,
            )
        for w in full.breakdowns:
            parts = {f"{part}_ms": 5.0 + i + n for n, part in enumerate(tables.PARTS)}
            add(
                "decode_step",
                variant,
                w.name,
                w.batch,
                total_ms=sum(parts.values()),
                predicted_ms=40.0,
                misfit=0.9,
                **parts,
            )
        for kind in ("write", "gather", "decode_step"):
            laws = {"law_all": f"{i} + 2·L·S", "law_non_view": "L"}
            add("counts", variant, kind, 8, ops_all=100 + i, ops_non_view=50 + i, **laws)
    for suite, size in (("write", "tokens"), ("gather", "history"), ("attention", "history")):
        for i, variant in enumerate([*variants[1:], "memcpy"]):
            for n in (1, 16, 256, 2048):
                ms = 0.1 * (i + 1) * n
                add(suite, variant, f"{size}-{n}", 8, ms=ms, gb_per_s=1.5, predicted_ms=ms / 2, misfit=0.5)
                add(suite, variant, f"{size}-{n}", 1, ms=ms, gb_per_s=1.5, predicted_ms=ms / 2, misfit=0.5)
    for i, variant in enumerate(("F.linear", "packed", "read")):
        for n in (1, 2, 4, 8, 16):
            add("matmul", variant, "weights", n, ms=10.0 + i, gb_per_s=4.0 + i + n)
    add("calibration", "machine", "machine", 1, t0_us=1.25, copy_gb_per_s=20.0, read_gb_per_s=17.0)
    add(
        "peers",
        "Engine A",
        "chat",
        8,
        tokens_per_s=300.0,
        x_transformers=1.4,
        tokens_equal=True,
        wrong=False,
        version="1.0",
    )
    add("peers", "Engine B", "chat", 8, not_measured="needs a GPU")
    return rows


def write_results(folder: Path, rows, name="cpu-smollm2-135m-instruct-float32.json", **environment) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps({"environment": ENVIRONMENT | environment, "rows": rows}))
    return folder


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    return write_results(tmp_path_factory.mktemp("results"), made_up_rows())


@pytest.fixture(scope="module")
def files(full):
    return build(full)


def text(files, name):
    return files[name].decode()


def test_without_results_everything_is_there_and_says_so(tmp_path, files):
    empty = build(tmp_path / "nowhere")
    assert empty.keys() == files.keys()
    of_their_own = {"bugs.md", "bugs-code.md", "tolerance.md"}  # results that are no benchmark's
    for name, content in empty.items():
        if name in of_their_own:
            continue
        if name.endswith((".bench.md", ".counts.md")) or ("/" not in name and name.endswith(".md")):
            assert b"ot measured" in content, name
        if name.endswith((".light.svg", ".dark.svg")):
            assert plots.NOTHING_YET.encode() in content, name


def test_the_same_results_give_the_same_bytes(full, files):
    report = data.load(full, STEPS)
    pictures = {name: content for name, content in files.items() if name.endswith((".light.svg", ".dark.svg"))}
    assert len(pictures) == 14 and draw_all(report) == pictures
    assert not any(re.search(rb"\d{4}-\d\d-\d\dT", svg) for name, svg in files.items() if name.endswith("light.svg"))


def test_numbers_come_from_the_rows(files):
    first = STEPS[0].slug
    assert f"| `{first}` | equal | 1108.0 | 1.50 | 1118 | 1128.0 | 1138.0 (1137.0 to 1139.0) | 1.25 | 2 |" in text(
        files, "end-to-end.md"
    )
    assert f"| `{first}` | 150 % | 150 % | 150 % |" in text(files, "seed-claim.md")
    assert "t0 = 1.25 µs" in text(files, "cost-model.md")
    assert "| Engine B | batch 8 | not measured |  |  | needs a GPU |" in text(files, "peers.md")
    assert "Test CPU, 2 threads; smollm2-135m-instruct float32" in text(files, "memory.md")
    bench = text(files, f"steps/{STEPS[1].slug}.bench.md")
    assert first in bench and STEPS[1].slug in bench and "| transformers |" in bench


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pictures_name_their_lines_and_bars(files, theme):
    ladder = text(files, f"ladder.{theme}.svg")
    assert all(step.slug in ladder for step in STEPS) and "1138 ms" in ladder and "1.25× transformers" in ladder
    bars = text(files, f"where-time-goes.{theme}.svg")
    assert all(label in bars for label in tables.PARTS.values())
    for name in ("write-sweep", "gather-sweep", "attention-sweep"):
        assert "memcpy" in text(files, f"{name}.{theme}.svg")
    assert "packed" in text(files, f"matmul-sweep.{theme}.svg")
    assert "http-equiv" not in ladder and not re.search(r'(href|src)="http', ladder)


def test_older_code_and_missing_rows_are_marked(tmp_path):
    rows = made_up_rows()
    slug, other = STEPS[0].slug, STEPS[1].slug
    for row in rows:
        if row["variant"] == slug:
            row["code_hash"] = "0" * 16
    rows = [row for row in rows if (row["suite"], row["variant"], row["batch"]) != ("end_to_end", other, 8)]
    table = tables.end_to_end(data.load(write_results(tmp_path, rows), STEPS)).split("chat, batch 8")[1]
    assert f"| `{slug}` † |" in table and tables.OLDER in table
    assert f"| `{other}` | not measured | not measured |" in table


def test_wrong_and_forked_tokens_are_told_apart(tmp_path):
    rows = made_up_rows()
    for row in rows:
        if (row["suite"], row["workload"], row["batch"]) == ("end_to_end", "chat", 8):
            where = {"request": 2, "position": 5}
            if row["variant"] == STEPS[0].slug:
                row |= {"tokens_equal": False, "wrong": True, "first_difference": where, "tokens_per_s": None}
            if row["variant"] == STEPS[1].slug:
                row |= {"tokens_equal": False, "wrong": False, "first_difference": where, "margin": 0.021}
    table = tables.end_to_end(data.load(write_results(tmp_path, rows), STEPS))
    assert f"| `{STEPS[0].slug}` | **wrong** (request 2, position 5) | not measured |" in table
    assert f"| `{STEPS[1].slug}` | differ from position 5, margin 0.021 |" in table


def test_cpu_and_gpu_stand_apart_and_random_weights_are_said(tmp_path):
    write_results(tmp_path, made_up_rows())
    gpu = {"device": "cuda", "gpu": "Test GPU", "dtype": "float16", "model": "shape:qwen2.5-7b", "random_weights": True}
    write_results(tmp_path, made_up_rows(), "cuda-shape-qwen2.5-7b-float16.json", **gpu)
    (tmp_path / "padding.json").write_text("[]")  # other measurements live beside the benchmark's
    report = data.load(tmp_path, STEPS)
    for make in (tables.end_to_end, tables.ladder, tables.environment):
        content = make(report)
        assert content.index("**Test CPU") < content.index("**Test GPU; shape:qwen2.5-7b float16, random weights")


def test_a_damaged_results_file_is_named(tmp_path):
    (tmp_path / "cpu-x-float32.json").write_text("{")
    with pytest.raises(UserError, match=r"cpu-x-float32\.json is no results file"):
        data.load(tmp_path, STEPS)


def test_diffs_are_those_of_the_files(files):
    for before, step in itertools.pairwise(STEPS):
        diff = text(files, f"steps/{step.slug}.diff.md")
        fence = diff.split("```diff\n")[1].split("\n```")[0].splitlines()
        added = [line[1:] for line in fence if line.startswith("+")]
        new = step.model_py.read_text().splitlines()
        assert added and all(line in new for line in added)
        assert fence[0].startswith("@@ ") and f"{len(added)} lines added" in diff
        assert len(new) - len(before.model_py.read_text().splitlines()) == len(added) - sum(
            line.startswith("-") for line in fence
        )


def test_readme_table_lies_between_its_markers(files):
    table = text(files, "readme.md")
    readme = f"# Title\n\n{BEGIN}\nold\n{END}\n\nMore.\n"
    new = with_table(readme, table)
    assert new == f"# Title\n\n{BEGIN}\n{table}{END}\n\nMore.\n" and with_table(new, table) == new
    assert with_table("no markers\n", table) == "no markers\n"
    for broken in (f"{BEGIN}\n", f"{END}\n{BEGIN}\n", f"{BEGIN}{BEGIN}{END}"):
        with pytest.raises(UserError, match=r"README\.md needs"):
            with_table(broken, table)


def test_check_names_what_is_stale(full, files, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(report_command, "build", lambda folder: dict(files))
    out = tmp_path / "out"
    monkeypatch.setattr(report_command, "GENERATED", out)
    monkeypatch.setattr(report_command, "README", tmp_path / "README.md")
    arguments = ["--results", str(full)]
    main(arguments)
    main([*arguments, "--check"])
    (out / "ladder.md").write_text("typed by hand")
    (out / "steps" / "00_gone.bench.md").write_text("left behind")
    (out / "laws.md").unlink()
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--check"])
    stale = capsys.readouterr().err
    assert end.value.code == 1 and stale.count("stale: ") == 3
    assert all(name in stale for name in ("ladder.md", "00_gone.bench.md", "laws.md"))
    assert (out / "ladder.md").read_text() == "typed by hand", "--check must not write"
    main(arguments)
    main([*arguments, "--check"])
    (tmp_path / "notes.txt").write_text("mine")
    main([*arguments, "--out", str(tmp_path)])
    assert (tmp_path / "notes.txt").exists() and (tmp_path / "ladder.md").exists()


@pytest.mark.parametrize(("theme", "page"), [(plots.LIGHT, "#ffffff"), (plots.DARK, "#1e2129")])
def test_colours_stand_out_from_the_page(theme, page):
    """WCAG: 4.5 to 1 for text, and names of lines are text in the line's colour."""

    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for colour in (theme.ink, *theme.series):
        low, high = sorted((luminance(colour), luminance(page)))
        assert (high + 0.05) / (low + 0.05) >= 4.5, colour

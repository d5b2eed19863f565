"""The benchmark: compares before it times, measures what it says it measures, keeps what is finished."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from shared.bench import breakdown, conduct, end_to_end, plan, record, subjects
from shared.bench.__main__ import main
from shared.bench.subjects import BaselineSubject, Sections, StepSubject
from shared.bench.workloads import Workload, encode_all
from shared.errors import UserError
from shared.steps import ROOT, find_step, list_steps

PROMPTS = {"chat": [[5, 9, 2], [7] * 17, list(range(1, 34))]}
CHAT = Workload("chat", 3, 12)


@pytest.fixture(scope="module")
def tiny(make_tiny):
    return make_tiny("llama")


@pytest.fixture(scope="module")
def baseline(tiny):
    return BaselineSubject(tiny[1])


def subject_of(step, folder):
    return StepSubject(find_step(step.SLUG), step.load_model(folder))


def measure(subject, expected, workload=CHAT):
    with torch.inference_mode():
        return end_to_end.measure(subject, "tiny", workload, PROMPTS, expected, check_tokens=4, decode_steps=3)


# What is measured is right


def test_steps_and_baseline_decode_the_same_behind_filled_histories(step, tiny, baseline):
    """fill_history gives every subject the same keys and values, whatever its pools and block tables look like."""
    lengths = [16, 1, 33]
    with torch.inference_mode():
        _, expected = end_to_end.decode_timed(baseline, lengths, 3)
        subject = subject_of(step, tiny[0])
        times, tokens = end_to_end.decode_timed(subject, lengths, 3)
    assert tokens == expected and len(times) == 3
    tables = [block for table in subject.runner.cache.block_tables.values() for block in table]
    assert tables != sorted(tables), "the block tables are not fragmented"


def test_end_to_end_sample(step, tiny, baseline):
    first = measure(baseline, None)
    sample = measure(subject_of(step, tiny[0]), first["token_ids"])
    assert sample["tokens_equal"] and "token_ids" not in sample and len(first["token_ids"][2]) == 12
    assert sample["tokens_per_s"] == pytest.approx(36 / sample["seconds"])
    assert 0 < sample["ttft_ms"] < 1e3 * sample["seconds"] and sample["tpot_ms"] > 0 and sample["decode_step_ms"] > 0
    config = tiny[1].config
    block = 2 * config.num_hidden_layers * 16 * config.num_key_value_heads * config.head_dim * 4
    # The last token of a request is not stored: 14, 28 and 44 tokens in blocks of 16. One by one, the longest counts.
    assert sample["peak_kv_bytes"] == block * (6 if hasattr(step.ModelRunner, "decode_batch") else 3)


def test_wrong_tokens_are_not_timed(tiny, baseline):
    class Wrong(BaselineSubject):
        def generate(self, prompts, new_tokens, on_token):
            ids = super().generate(prompts, new_tokens, on_token)
            ids[1][self.spoiled :] = [token ^ 1 for token in ids[1][self.spoiled :]]
            return ids

    expected = measure(baseline, None)["token_ids"]
    for position in (0, 11):  # seen before the timed run, and only in it
        subject = Wrong(tiny[1])
        subject.spoiled = position
        sample = measure(subject, expected)
        assert not sample["tokens_equal"] and not sample["accepted"]
        assert sample["first_difference"]["position"] == position
        assert not any(name.endswith(("_ms", "_per_s")) for name in sample)


def test_other_dtypes_are_accepted_where_the_margin_is_small(tiny, monkeypatch):
    half = BaselineSubject(tiny[1])
    half.dtype = torch.bfloat16
    for margin, accepted in ((0.01, True), (5.0, False)):
        monkeypatch.setattr(end_to_end, "margin_at", lambda *args, m=margin: m)
        verdict = end_to_end.compare(half, "tiny", [[1], [2]], [[3, 4], [5, 6]], [[3, 4], [5, 7]])
        assert verdict["first_difference"] == {"request": 1, "position": 1} and verdict["accepted"] is accepted


def test_first_difference_is_the_earliest_position():
    assert end_to_end.first_difference([[1, 2, 3], [4, 5]], [[1, 2, 9], [4, 0]]) == (1, 1)
    assert end_to_end.first_difference([[1, 2]], [[1, 2, 3]]) is None


def test_breakdown_names_every_part_that_a_step_has(step, tiny):
    with torch.inference_mode():
        row = breakdown.measure(subject_of(step, tiny[0]), [40, 40], 4)
    parts = [f"{part}_ms" for part in ("floor", "attention", "gather", "write", "cache", "rest")]
    assert row["total_ms"] == pytest.approx(sum(row[part] for part in parts))
    assert row["floor_ms"] > 0 and row["attention_ms"] > 0 and row["write_ms"] > 0
    assert hasattr(step, "write_slots") == (row["cache_ms"] == 0)  # from then on the pool is the cache
    assert row["gather_ms"] > 0


def test_every_byte_is_read_once_at_least(step, tiny, baseline):
    subject, config = subject_of(step, tiny[0]), tiny[1].config
    history = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    once = breakdown.bytes_once(subject, [10, 20])
    assert once == breakdown.bytes_once(baseline, [10, 20]) == breakdown.bytes_once(subject, [0, 0]) + 30 * history


def test_baseline_breakdown_shows_that_it_copies_its_history(baseline):
    with torch.inference_mode():
        row = breakdown.measure(baseline, [40, 40], 4)
    assert row["cache_ms"] > 0 and row["gather_ms"] == 0 and row["write_ms"] == 0


def test_operators_beyond_the_floor_follow_the_history(tiny):
    """Counts continued from short histories are those that a long one has."""
    step = find_step("03") if len(list_steps()) > 2 else list_steps()[-1]
    subject = StepSubject(step, load(step).load_model(tiny[0]))
    row = breakdown.count(subject, [160, 160])
    with torch.inference_mode():
        assert row["ops"] == breakdown._step_counts(subject, 2, 10)["all"]


def load(step):
    from shared.steps import load_step

    return load_step(step)


def test_sections_do_not_nest():
    ticks = iter(range(100))
    sections = Sections(lambda: next(ticks))
    inner = sections.wrap("inner", lambda: None)
    outer = sections.wrap("outer", inner)
    outer(), inner(), outer()
    assert sections.spent == {"outer": 2, "inner": 1}


# The plan and the record


def small_plan(**changes):
    steps = tuple(list_steps()[:2])
    defaults = {"steps": steps, "suites": ("end_to_end",), "repeats": {"chat": 2}}
    return dataclasses.replace(plan.quick(4), **defaults | changes)


def fake_child(log, wall_s=1.0, fail_after=None):
    """Stands in for run_child: reports a sample for each task at once."""

    def run(spec):
        for number, task in enumerate(spec["tasks"]):
            if fail_after is not None and len(log) >= fail_after:
                raise KeyboardInterrupt
            log.append((spec["variant"], task["repeat"]))
            speed = {"transformers": 100.0}.get(spec["variant"], 40.0)
            row = {"suite": "end_to_end", "variant": spec["variant"], "workload": "chat", "batch": 8, "new_tokens": 4}
            row |= {"tokens_equal": True, "tokens_per_s": speed, "decode_step_ms": 1e3 / speed, "wall_s": wall_s}
            row |= {"decode_steps_ms": [1e3 / speed]} | (
                {"token_ids": [[1]]} if spec["variant"] == "transformers" else {}
            )
            yield {"task": number, "row": row}

    return run


@pytest.fixture
def results(tmp_path):
    env = {"kind": "quick", "model_argument": "tiny", "device": "cpu", "dtype": "float32", "threads": 1}
    env |= {"commit": "a", "dirty": False}
    return lambda **changes: record.Record(tmp_path / "r.json", env | changes, conduct.code_hashes(small_plan()))


def test_variants_alternate_between_repeats(results, monkeypatch):
    log = []
    monkeypatch.setattr(conduct, "run_child", fake_child(log))
    conduct.conduct(small_plan(), results(), {}, lambda line: None)
    a, b = (step.slug for step in list_steps()[:2])
    assert log == [("transformers", 1), (a, 1), (b, 1), (b, 2), (a, 2), ("transformers", 2)]


def test_one_process_does_all_of_a_variant():
    """In the first round, behind what is timed end to end; a second round repeats only that."""
    steps = tuple(list_steps())
    everything = dataclasses.replace(plan.quick(4), steps=steps)
    rounds = list(plan._rounds(everything, {}))
    variants = [variant for variant, _ in rounds]
    assert variants == [plan.MACHINE, *everything.variants]
    for variant, tasks in rounds[1:]:
        suites = [task["suite"] for task in tasks]
        assert suites[:3] == ["end_to_end", "decode_step", "counts"], variant
    again = list(plan._rounds(dataclasses.replace(everything, repeats={"chat": 2}), {}))[len(rounds) :]
    assert [variant for variant, _ in again] == variants[:0:-1]
    assert all([task["suite"] for task in tasks] == ["end_to_end"] for _, tasks in again)


def test_transformers_with_another_attention_is_a_baseline_end_to_end_only():
    flash = dataclasses.replace(plan.full(), steps=(), baselines=(plan.BASELINE, plan.FLASH_BASELINE))
    tasks = {task["suite"] for variant, round_ in plan._rounds(flash, {}) for task in round_ if "/" in variant}
    suites = {suite for suite, variant, *_ in plan.expected_keys(flash) if variant == plan.FLASH_BASELINE}
    assert tasks == suites == {"end_to_end"}
    hashes = conduct.code_hashes(flash)
    assert conduct.hash_of(plan.FLASH_BASELINE, hashes) == hashes[plan.BASELINE]


def test_transformers_with_another_attention_gives_the_same_tokens(monkeypatch, tiny):
    """eager stands in for flash-attn, which needs a GPU: the same path, another name."""
    monkeypatch.setattr(subjects, "resolve_model", lambda name: tiny[0])
    plain, eager = (
        subjects.make_subject(name, "tiny", "cpu", torch.float32) for name in ("transformers", "transformers/eager")
    )
    assert eager.model.config._attn_implementation == "eager" and eager.name == "transformers/eager"
    assert plain.model.config._attn_implementation == "sdpa"
    expected = measure(plain, None)["token_ids"]
    sample = measure(eager, expected)
    assert sample["tokens_equal"] and "token_ids" not in sample


@pytest.mark.parametrize(
    ("device", "dtype", "installed", "reason"),
    [
        ("cpu", "float16", True, "needs a CUDA device"),
        ("cuda", "float32", True, "half precision only"),
        ("cuda", "float16", False, "not installed"),
        ("cuda:0", "bfloat16", True, None),
    ],
)
def test_why_there_is_no_flash_attention(device, dtype, installed, reason, monkeypatch):
    monkeypatch.setattr(subjects, "is_flash_attn_2_available", lambda: installed)
    found = subjects.why_no_flash_attention(device, getattr(torch, dtype))
    assert found is None if reason is None else reason in found


def test_interrupted_and_continued_measures_nothing_twice(results, monkeypatch):
    log = []
    monkeypatch.setattr(conduct, "run_child", fake_child(log, fail_after=2))
    with pytest.raises(KeyboardInterrupt):
        conduct.conduct(small_plan(), results(), {}, lambda line: None)
    assert len(json.loads(results().path.read_text())["rows"]) == 2
    monkeypatch.setattr(conduct, "run_child", fake_child(log))
    finished = results()
    conduct.conduct(small_plan(), finished, {}, lambda line: None)
    assert len(log) == len(set(log)) == 6 and all(row["repeats"] == 2 for row in finished.rows.values())
    ratio = finished.rows["end_to_end", list_steps()[0].slug, "chat", 8]
    assert ratio["x_transformers"] == pytest.approx(0.4) and ratio["x_transformers_decode"] == pytest.approx(0.4)


def test_slow_variants_are_repeated_less(results, monkeypatch):
    log = []
    monkeypatch.setattr(conduct, "run_child", fake_child(log, wall_s=plan.SLOW_SECONDS + 1))
    workloads = (Workload("chat", 8, 4), Workload("chat", 1, 4))
    three = small_plan(workloads=workloads, repeats={"chat": 3})
    rows = {}
    for batch in (8, 1):
        rows["end_to_end", "transformers", "chat", batch] = {"samples": [{"wall_s": plan.SLOW_SECONDS + 1}]}
    wanted = [plan.repeats_wanted(three, w, rows["end_to_end", "transformers", "chat", w.batch]) for w in workloads]
    assert wanted == [2, 1]  # the README's table is always measured twice


def test_changed_code_is_measured_again_and_another_environment_begins_anew(results, monkeypatch, tmp_path):
    monkeypatch.setattr(conduct, "run_child", fake_child([]))
    conduct.conduct(small_plan(), results(), {}, lambda line: None)
    document = json.loads((tmp_path / "r.json").read_text())
    document["rows"][1]["code_hash"] = "0" * 16
    (tmp_path / "r.json").write_text(json.dumps(document))
    assert len(results().rows) == 2 and len(results(commit="b").rows) == 2
    assert results(threads=2).rows == {}
    assert json.loads((tmp_path / "r.previous.json").read_text()) == document


def test_a_failed_sample_takes_the_times_out_of_its_row():
    base = {"suite": "end_to_end", "variant": "x", "workload": "chat", "batch": 8, "new_tokens": 4, "code_hash": "h"}
    good = base | {"tokens_equal": True, "tokens_per_s": 10.0, "wall_s": 1.0, "decode_steps_ms": [1.0, 3.0]}
    row = conduct.merged(None, good, 1)
    assert row["tokens_per_s"] == 10.0 and row["decode_step_ms"] == 2.0 and not row["wrong"]
    bad = base | {"tokens_equal": False, "first_difference": {"request": 0, "position": 3}, "accepted": False}
    row = conduct.merged(row, bad | {"wall_s": 1.0}, 2)
    assert row["wrong"] and "tokens_per_s" not in row and row["first_difference"]["position"] == 3
    assert len(row["samples"]) == 2


def test_sweeps_take_each_implementation_once():
    slugs = plan.introducing(tuple(list_steps()), plan.WRITERS)
    assert slugs[:2] == [step.slug for step in list_steps()[:2]]
    assert len(slugs) < len(list_steps()), "steps that share their write would be measured again"


def test_results_file_is_whole_or_absent(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    document = {"environment": {"a": 1}, "rows": [{"suite": "s", "value": 1.23456789}, {"suite": "t"}]}
    record.write_json(path, document)
    rounded = {"environment": {"a": 1}, "rows": [{"suite": "s", "value": 1.2346}, {"suite": "t"}]}
    assert json.loads(path.read_text()) == rounded
    monkeypatch.setattr(os, "replace", lambda *args: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        record.write_json(path, {"environment": {}, "rows": []})
    assert json.loads(path.read_text())["rows"] and list(tmp_path.iterdir()) == [path]


# The commands


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quick", "--steps", "99"], "there is no step '99'"),
        (["quick", "--suites", "speed"], "no suite 'speed'"),
        (["quick", "--threads", "4096"], "this machine has"),
        (["quick", "--new-tokens", "1"], "give 2 to 1024"),
        (["quick", "--device", "tpu"], "no device 'tpu'"),
        (["quick", "--model", "shape:gpt-5"], "no shape"),
        (["publish", "--output", "nothing.json"], "run `make bench-full` first"),
    ],
)
def test_mistakes_get_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    lines = capsys.readouterr().err.strip().splitlines()
    assert end.value.code == 2 and len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0]


def test_publish_takes_only_a_complete_full_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path / "published")
    full = dataclasses.replace(plan.full(), steps=tuple(list_steps()))
    hashes = conduct.code_hashes(full)
    rows = [
        dict(zip(record.KEY, key)) | {"code_hash": conduct.hash_of(key[1], hashes)} for key in plan.expected_keys(full)
    ]
    path = tmp_path / "cpu-tiny-float32.json"
    for kind, content in (("full", rows[1:]), ("quick", rows), ("full", [rows[0] | {"code_hash": "old"}, *rows[1:-1]])):
        record.write_json(path, {"environment": {"kind": kind}, "rows": content})
        with pytest.raises(SystemExit):
            main(["publish", "--output", str(path)])
        assert "is not a complete full run" in capsys.readouterr().err
    record.write_json(path, {"environment": {"kind": "full"}, "rows": rows})
    main(["publish", "--output", str(path)])
    assert len(record.load(tmp_path / "published" / path.name)["rows"]) == len(rows)


def test_publish_takes_the_other_engines_alone_too(tmp_path, monkeypatch, capsys):
    (tmp_path / "published").mkdir()
    monkeypatch.setattr(record, "RESULTS", tmp_path / "published")
    full, peers = tmp_path / "cpu-tiny-float32.json", tmp_path / "cpu-tiny-float32-peers.json"
    record.write_json(peers, {"environment": {"kind": "peers"}, "rows": []})  # interrupted: not complete
    with pytest.raises(SystemExit):
        main(["publish", "--output", str(full)])
    record.write_json(peers, {"environment": {"kind": "peers", "complete": True}, "rows": []})
    main(["publish", "--output", str(full)])
    assert [path.name for path in (tmp_path / "published").iterdir()] == [peers.name]


def test_a_child_in_a_fresh_process(tmp_path):
    """One real child: threads pinned, one JSON line a row; and its failure is one line for the user."""
    spec = {"variant": list_steps()[0].slug, "model": "tiny", "device": "cpu", "dtype": "float32", "threads": 1}
    task = {
        "suite": "end_to_end",
        "workload": dataclasses.asdict(Workload("chat", 2, 3)),
        "repeat": 1,
        "expected": None,
    }
    spec |= {"prompts": PROMPTS, "tasks": [task | {"check_tokens": 2, "steps": 1}, {"suite": "nonsense"}]}
    lines = []
    with pytest.raises(UserError, match=r"measuring .* failed: .*nonsense.*what was finished is kept"):
        lines.extend(conduct.run_child(spec))
    assert len(lines) == 1 and lines[0]["task"] == 0 and lines[0]["row"]["tokens_equal"]


@pytest.mark.slow
def test_killed_half_way_and_repeated(tmp_path):
    """The whole process group is killed after the first rows; the same command then measures only the rest."""
    output = tmp_path / "run.json"
    command = [sys.executable, "-m", "shared.bench", "quick", "--model", "tiny", "--threads", "1", "--new-tokens", "4"]
    command += ["--suites", "end_to_end", "--steps", "1", "2", "--output", str(output)]
    run = subprocess.Popen(command, cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL)
    while run.poll() is None and not (output.exists() and len(json.loads(output.read_text())["rows"]) >= 2):
        time.sleep(0.05)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    before = {record.key(row): row for row in record.load(output)["rows"]}
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    after = {record.key(row): row for row in record.load(output)["rows"]}
    assert len(before) == 2 and len(after) == 3 and "x transformers" in done.stdout
    for key, row in before.items():
        assert after[key]["samples"] == row["samples"]


def test_shapes_have_prompts_without_a_tokenizer():
    prompts = encode_all("shape:smollm2-135m")["chat"]
    assert len(prompts) == 8 and all(0 <= token < 49152 for prompt in prompts for token in prompt)

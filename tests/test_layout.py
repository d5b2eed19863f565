"""The diff is the lesson: what may change from one step to the next, and how a model.py is laid out.

Every model.py is a whole program, so most of it is copied from step to step. CHANGES is what keeps the copies equal:
a name that is not in a pair's row has the same text in both files, comments and all.
"""

from __future__ import annotations

import ast
import difflib
import re
import sys
from itertools import pairwise

import pytest

from shared.steps import Step, list_steps

# What differs between two consecutive steps: + added, - removed, ~ changed. Class.method is a name of its own and
# Class alone is the rest of the class. A row is exact: a name in it that does not change is as wrong as one missing.
CHANGES = {
    "01_naive_write -> 02_vectorized_write": [
        "~ write_kv_to_pool",
    ],
    "02_vectorized_write -> 03_naive_gather": [
        "- read_kv_from_pool",
        "+ gather_batch_kv",
        "- PagedKVCache.read",
        "+ PagedKVCache.gather",
        "- ModelRunner.decode",
        "+ ModelRunner.decode_batch",
        "~ generate",
    ],
    "03_naive_gather -> 04_vectorized_gather": [
        "~ gather_batch_kv",
    ],
    "04_vectorized_gather -> 05_dynamic_cache_fix": [
        "+ import inspect",
        "+ from transformers import DynamicCache",
        "~ Attention.forward",
        "~ Decoder.forward",
        "~ ModelRunner.__init__",
        "~ ModelRunner.prefill",
        "~ ModelRunner.decode_batch",
    ],
    "05_dynamic_cache_fix -> 06_slot_mapping": [
        "- from transformers import DynamicCache",
        "+ from transformers import Cache",
        "- write_kv_to_pool",
        "- gather_batch_kv",
        "+ write_slots",
        "+ read_slots",
        "~ PagedKVCache",
        "~ PagedKVCache.__init__",
        "- PagedKVCache.write",
        "- PagedKVCache.gather",
        "+ PagedKVCache.begin_step",
        "+ PagedKVCache.update",
        "+ PagedKVCache.end_step",
        "+ PagedKVCache.get_seq_length",
        "+ PagedKVCache.get_mask_sizes",
        "~ ModelRunner.prefill",
        "~ ModelRunner.decode_batch",
    ],
    "06_slot_mapping -> 07_block_table_attention": [
        "+ import functools",
        "+ import importlib.util",
        "+ import os",
        "+ import sys",
        "+ import numba",
        "+ import numpy as np",
        "+ from numba.core import event",
        "+ paged_attention",
        "+ reference_attention",
        "+ compiled",
        "+ CompileNotice",
        "+ CompileNotice.__init__",
        "+ CompileNotice.on_start",
        "+ CompileNotice.on_end",
        "+ TILE",
        "+ attend",
        "+ numba_attention",
        "+ attention_beside",
        "+ ATTENTION_KERNELS",
        "+ chosen_kernel",
        "+ obstacle",
        "+ kernel_for",
        "+ find_kernel",
        "+ use_attention",
        "~ PagedKVCache.__init__",
        "~ PagedKVCache.begin_step",
        "+ PagedKVCache.store",
        "+ PagedKVCache.attend",
        "~ PagedKVCache.update",
        "+ PagedKVCache.left_padded_slots",
        "~ Attention.forward",
        "~ ModelRunner.decode_batch",
    ],
    "07_block_table_attention -> 08_decode_matmul": [
        "+ THIN_ROWS",
        "+ multiply",
        "+ thin_matmul",
        "+ array",
        "+ inlined",
        "+ normalize",
        "+ rotate_heads",
        "+ add",
        "+ before_attention",
        "+ after_attention",
        "+ ThinLayer",
        "+ ThinLayer.__init__",
        "~ Decoder.__init__",
        "~ Decoder.forward",
        "+ Decoder.prepare_thin",
        "+ Decoder.thin_logits",
        "~ ModelRunner.__init__",
    ],
}

# Lines that `diff` marks, the first sentence of the docstring included, and lines of a whole model.py. A pair that
# needs more has its own number here, with the reason. About 320 lines are code; the rest of a part one file are
# docstrings and errors worth reading.
PART_ONE = {"changed lines": 40, "lines": 390}
PART_TWO = {"changed lines": 180, "lines": 650}
CHANGED_LINES = {
    # Single-request read and decode go, batched gather and decode come: both halves are needed to run at all.
    "02_vectorized_write -> 03_naive_gather": 80,
    # Almost all of it is new code in one place: the kernel, written twice (to be read, and to be fast), and its choice.
    "06_slot_mapping -> 07_block_table_attention": 320,
}
LINES = {
    # A decoder layer stands here twice: in torch, and as compiled code, which cannot call torch.
    "08_decode_matmul": 820,
}

ALLOWED = {"torch", "transformers", "safetensors"}
# Kernels that are compiled work on numpy arrays.
NUMBA_FROM, NUMBA = "07", {"numba", "numpy"}
# Kernels for hardware most readers lack: files of their own, imported where they are used.
OPTIONAL = {"triton", "flash_attn"}

STUDIED = {
    "write_kv_to_pool",
    "read_kv_from_pool",
    "gather_batch_kv",
    "write_slots",
    "read_slots",
    "paged_attention",
}


def pairs() -> list[tuple[Step, Step]]:
    steps = list_steps()
    return list(pairwise(steps))


def pair_name(pair: tuple[Step, Step]) -> str:
    return f"{pair[0].slug} -> {pair[1].slug}"


def source_of(step: Step) -> str:
    return step.model_py.read_text(encoding="utf-8")


def budget(step: Step) -> dict[str, int]:
    return PART_ONE if step.number <= "05" else PART_TWO


each_step = pytest.mark.parametrize("rung", list_steps(), ids=lambda step: step.slug)
each_pair = pytest.mark.parametrize("pair", pairs(), ids=pair_name)


def definitions(source: str) -> dict[str, str]:
    """A file cut into named pieces, in order; a comment belongs to what stands below it. The docstring is left out."""
    lines, pieces = source.splitlines(), {"imports": ""}
    start = 0

    def take(name: str, end: int) -> None:
        nonlocal start
        text = "\n".join(lines[start:end]).strip("\n")
        start = end
        assert name not in pieces or "." not in name, f"{name} is defined twice"
        pieces[name] = "\n".join(filter(None, (pieces.get(name), text)))

    for node in ast.parse(source).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            origin = f"from {'.' * node.level}{node.module or ''} " if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                pieces[f"{origin}import {ast.unparse(alias)}"] = ""
            comments = [line for line in lines[start : node.end_lineno] if "#" in line]
            pieces["imports"] += "".join(comments)
            start = node.end_lineno
        elif isinstance(node, ast.ClassDef):
            for member in node.body:
                is_method = isinstance(member, ast.FunctionDef)
                first = min([member.lineno, *(d.lineno for d in getattr(member, "decorator_list", []))])
                if is_method and node.name not in pieces:
                    take(node.name, first - 1)
                take(f"{node.name}.{member.name}" if is_method else node.name, member.end_lineno)
        elif isinstance(node, ast.FunctionDef):
            take(node.name, node.end_lineno)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            start = node.end_lineno
        else:
            take(ast.unparse(node).partition("\n")[0].partition(" = ")[0], node.end_lineno)
    take("end of file", len(lines))
    return pieces


def changes(old_source: str, new_source: str) -> set[str]:
    """The difference of two files as rows of CHANGES; names in another order count as changed too."""
    old, new = definitions(old_source), definitions(new_source)
    kept = [name for name in old if name in new]
    assert kept == [name for name in new if name in old], "what both files have stands in another order"
    return (
        {f"- {name}" for name in old.keys() - new.keys()}
        | {f"+ {name}" for name in new.keys() - old.keys()}
        | {f"~ {name}" for name in kept if old[name] != new[name]}
    )


def changed_lines(old_source: str, new_source: str) -> int:
    lines = difflib.unified_diff(old_source.splitlines(), new_source.splitlines(), n=0, lineterm="")
    return sum(line[0] in "+-" for line in lines) - 2 * (old_source != new_source)  # less the two lines of the header


@each_pair
def test_only_what_the_table_says_changes(pair):
    name = pair_name(pair)
    assert name in CHANGES, f"CHANGES has no row for {name}"
    actual, allowed = changes(*map(source_of, pair)), set(CHANGES[name])
    assert not actual - allowed, f"{name}: these differ and may not"
    assert not allowed - actual, f"{name}: these are in the table and do not differ"


@each_pair
def test_changed_lines_are_few(pair):
    allowed = CHANGED_LINES.get(pair_name(pair), budget(pair[1])["changed lines"])
    count = changed_lines(*map(source_of, pair))
    assert count <= allowed


@each_pair
def test_the_docstring_says_something_new(pair):
    assert pair[0].title != pair[1].title


SAMPLE = '''"""One."""

import os
from a import b


# Why.
def f(x):
    return x


class C:
    """D."""

    y = 1

    def g(self):
        return 2

    # Because.
    def h(self):
        return 3


if __name__ == "__main__":
    f(1)
'''


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("One.", "Two.", set()),
        ("# Why.", "# Why not.", {"~ f"}),
        ("return x", "return x  # here", {"~ f"}),
        ("return 2", "return 4", {"~ C.g"}),
        ("# Because.\n    def h", "def h", {"~ C.h"}),
        ("    def h", "    @property\n    def h", {"~ C.h"}),
        ("y = 1", "y = 2", {"~ C"}),
        ("D.", "E.", {"~ C"}),
        ("class C:", "class C(B):", {"~ C"}),
        ("import b", "import b, c", {"+ from a import c"}),
        ("import os\n", "", {"- import os"}),
        ("import os\n", "# Old.\nimport os\n", {"~ imports"}),
        ("f(1)", "f(2)", {"~ if __name__ == '__main__':"}),
        ("    f(1)\n", "    f(1)\n# End.\n", {"~ end of file"}),
        ("def g(self):\n        return 2", "def k(self):\n        return 2", {"- C.g", "+ C.k"}),
        ("class C:", "Z = 1\n\n\nclass C:", {"+ Z"}),
    ],
)
def test_every_kind_of_change_is_seen(old, new, expected):
    assert SAMPLE.count(old) == 1
    assert changes(SAMPLE, SAMPLE.replace(old, new)) == expected


def test_a_move_is_seen():
    first, second = "def f():\n    return 1\n", "def g():\n    return 2\n"
    with pytest.raises(AssertionError, match="order"):
        changes(first + second, second + first)


def test_changed_lines_counts_both_sides():
    assert changed_lines("a\nb\nc\n", "a\nx\ny\nc\n") == 3
    assert changed_lines("a\n", "a\n") == 0


# --- one file ---


@each_step
def test_file_is_short(rung):
    lines, allowed = len(source_of(rung).splitlines()), LINES.get(rung.slug, budget(rung)["lines"])
    assert lines <= allowed


@each_step
def test_order_of_definitions(rung):
    """The functions under study, the cache, the decoder, the runner, generate, the self-check: in every step."""
    top = [name for name in definitions(source_of(rung)) if "import" not in name and "." not in name]
    studied = [name for name in top if name in STUDIED]
    frame = ["OutOfBlocks", "PagedKVCache", "Attention", "load_model", "ModelRunner", "generate", "self_check"]
    assert studied
    assert [name for name in top if name in {*STUDIED, *frame}] == studied + frame
    between = top[top.index("PagedKVCache") + 1 : top.index("ModelRunner")]
    assert {"Attention", "DecoderLayer", "Decoder", "build_model", "load_model"} <= set(between)
    assert top[-2:] == ["if __name__ == '__main__':", "end of file"]
    assert top[-3] == "self_check"


def imported(tree: ast.AST) -> set[str]:
    """The top names of all modules imported anywhere below, inside functions too; a leading dot stays."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." * node.level + (node.module or "").partition(".")[0])
    return names


@each_step
def test_imports(rung):
    """Self-contained: nothing of this repository but the step's own kernels, and those only where they are used."""
    files = {path.stem: path for path in rung.path.glob("*.py") if path.stem != "run"}
    kernels = files.keys() - {"model"}
    assert all(name.startswith("kernels_") for name in kernels)
    assert not kernels or rung.number >= NUMBA_FROM
    allowed = ALLOWED | sys.stdlib_module_names | (NUMBA if rung.number >= NUMBA_FROM else set())
    for name, path in files.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        here = allowed | kernels | (OPTIONAL if name in kernels else set())
        assert imported(tree) <= here, path.name
        at_once = imported(ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]))
        assert not at_once & kernels, f"{path.name} imports a kernel before it is needed"


BANNED = [
    (r"(?i)\bsteps?[ _-]?0?\d", "a step's number"),
    (r"\b\d\d_[a-z]+_[a-z]", "a step's slug"),
    (r"#\s*(NEW|CHANGED|OLD)\b", "a banner"),
    (r"\b(TODO|FIXME|XXX|HACK)\b", "an open end"),
    (r"(?i)\b(previous|next|earlier|last) step\b", "another step"),
]


@each_step
def test_code_does_not_know_its_place(rung):
    """Renumbering must not touch a file, and a copy must read as if it were the only one."""
    for number, line in enumerate(source_of(rung).splitlines(), 1):
        for pattern, what in BANNED:
            assert not re.search(pattern, line), f"line {number} holds {what}: {line.strip()}"


@each_step
def test_no_code_in_comments(rung):
    for number, line in enumerate(source_of(rung).splitlines(), 1):
        comment = line.strip().removeprefix("#").strip() if line.strip().startswith("#") else ""
        try:
            statements = ast.parse(comment).body
        except SyntaxError:
            continue
        for statement in statements:
            is_prose = isinstance(statement, ast.Expr) and not isinstance(statement.value, ast.Call)
            assert is_prose, f"line {number} is code in a comment: {line.strip()}"


@each_step
def test_docstring(rung):
    """One sentence on what this step does, then the dimension key, which is the same in all steps of a part."""
    paragraphs = ast.get_docstring(ast.parse(source_of(rung))).split("\n\n")
    sentence = " ".join(paragraphs[0].split())
    assert re.fullmatch(r"[A-Z].*[^.]\.", sentence)
    assert ". " not in sentence
    assert paragraphs[1].startswith("Dimension key: ")
    assert len(paragraphs) == 2


def test_run_py_is_the_same_everywhere():
    texts = {(step.path / "run.py").read_bytes() for step in list_steps()}
    assert len(texts) == 1
    assert len(texts.pop().splitlines()) <= 20


def test_folders_hold_nothing_else():
    for step in list_steps():
        names = {path.name for path in step.path.iterdir()} - {"__pycache__"}
        assert {"model.py", "run.py"} <= names
        assert all(re.fullmatch(r"(model|run|kernels_\w+)\.py", name) for name in names), step.slug


def test_the_table_names_pairs_that_exist():
    """A row left behind after a step was renamed would check nothing."""
    steps = list_steps()
    if [step.number for step in steps] != [f"{i:02}" for i in range(1, len(steps) + 1)]:
        pytest.skip("only some of the steps are here")
    assert {*CHANGES, *CHANGED_LINES} <= {pair_name(pair) for pair in pairs()}

"""Fixtures for all tests: every step as a loaded module, and tiny models to run them on.

`pytest --steps-dir DIR` runs the suite on another copy of the steps.
"""

from __future__ import annotations

import ast
import os
from functools import cache
from pathlib import Path

import pytest

from shared.errors import UserError
from shared.steps import list_steps, load_step


def pytest_addoption(parser):
    parser.addoption("--steps-dir", type=Path, help="folder holding the steps (default: this repository's steps/)")


def pytest_configure(config):
    config.addinivalue_line("markers", "zoo: the fast part of the contract, run on every mutant of the bug zoo")
    config.addinivalue_line("markers", "having(name): only the steps whose model.py defines this function")
    # Before anything imports torch or transformers. One thread: the models are tiny, and the order of summation fixed.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if steps_dir := config.getoption("--steps-dir"):
        os.environ["STEPS_DIR"] = str(steps_dir.resolve())
    try:
        list_steps()
    except UserError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_generate_tests(metafunc):
    if "step" in metafunc.fixturenames:
        names = {name for marker in metafunc.definition.iter_markers("having") for name in marker.args}
        steps = [step for step in list_steps() if names <= functions_of(step)]
        metafunc.parametrize("step", steps, ids=[step.slug for step in steps], indirect=True, scope="session")


def pytest_collection_modifyitems(items):
    """The contract from the inside out: the first test that fails is then the one nearest to the fault."""
    contract = ["test_slots.py", "test_steps.py", "test_out_of_blocks.py"]
    items.sort(key=lambda item: contract.index(item.path.name) if item.path.name in contract else len(contract))


@cache
def functions_of(step) -> set[str]:
    tree = ast.parse(step.model_py.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.fixture(scope="session")
def step(request):
    """One step's model.py as a module; `step.SLUG` is its name. Tests that ask for it run once for every step."""
    import torch

    torch.set_num_threads(1)
    return load_step(request.param)


@pytest.fixture(scope="session")
def make_tiny(tmp_path_factory):
    """`make_tiny(kind) -> (folder, hf_model)`: a tiny random model on disk, and the same in transformers.

    Kinds: llama (9 heads, 3 kv heads, tied), llama3 (RoPE scaling, untied, sharded), qwen2 (bias, untied) and qwen3
    (q/k norm, tied, sharded). Made once per run.
    """
    from tests import reference

    folders: dict[str, Path] = {}

    def make(kind: str):
        if kind not in folders:
            folders[kind] = reference.save_model(kind, tmp_path_factory.mktemp(kind))
        return folders[kind], reference.hf_model(kind)

    return make


@pytest.fixture(scope="session")
def load_tiny(make_tiny):
    """`load_tiny(step, kind) -> model`: the tiny model in the step's own decoder, loaded once per step and kind."""
    models: dict = {}

    def load(step, kind: str = "llama"):
        key = step.SLUG, kind
        if key not in models:
            models[key] = step.load_model(make_tiny(kind)[0])
        return models[key]

    return load

"""Find the steps by listing their folders, and load one. Nothing here, or elsewhere in `shared`, names a step."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType

from shared.errors import UserError

ROOT = Path(__file__).resolve().parent.parent

# Not timed by the benchmark, so that changing one of them does not make a measured number old.
NOT_HASHED = {"load_model", "self_check"}


@dataclass(frozen=True)
class Step:
    """One rung of the ladder: the folder `steps/<slug>`."""

    path: Path

    @property
    def slug(self) -> str:
        return self.path.name

    @property
    def number(self) -> str:
        """The two digits the slug starts with. They order the steps and mean nothing else."""
        return self.slug.split("_")[0]

    @property
    def model_py(self) -> Path:
        return self.path / "model.py"

    @cached_property
    def title(self) -> str:
        """The first sentence of model.py's docstring, on one line."""
        docstring = ast.get_docstring(ast.parse(self.model_py.read_text(encoding="utf-8"))) or self.slug
        paragraph = " ".join(docstring.split("\n\n")[0].split())
        return paragraph.split(". ")[0].rstrip(".")


def list_steps(steps_dir: str | Path | None = None) -> list[Step]:
    """All steps in order. `steps_dir` defaults to the variable STEPS_DIR, then to this repository's own steps."""
    folder = Path(steps_dir or os.environ.get("STEPS_DIR") or ROOT / "steps").resolve()
    steps = [Step(path) for path in sorted(folder.glob("[0-9]*")) if (path / "model.py").is_file()]
    if not steps:
        raise UserError(f"no steps in {folder}: expected folders such as 01_name holding a model.py")
    return steps


def find_step(name: str, steps_dir: str | Path | None = None) -> Step:
    """The step called `name`: its slug, or its number with or without leading zeros."""
    steps = list_steps(steps_dir)
    for step in steps:
        if name == step.slug or (name.isdecimal() and int(name) == int(step.number)):
            return step
    raise UserError(f"there is no step {name!r}; there are: {', '.join(step.slug for step in steps)}")


def load_step(step: Step) -> ModuleType:
    """The step's model.py as a module of its own name: two steps, or two copies of one, never share anything."""
    name = f"{step.slug}_{hashlib.sha256(str(step.path).encode()).hexdigest()[:8]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, step.model_py)
        module = importlib.util.module_from_spec(spec)
        module.SLUG = step.slug
        sys.modules[name] = module  # dataclasses look their module up there
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def code_hash(step: Step) -> str:
    """16 hex digits that change when the step's code does, and not for comments, layout or docstrings.

    Covers every Python file in the step's folder except run.py, less the functions in NOT_HASHED.
    """
    digest = hashlib.sha256()
    for path in sorted(step.path.glob("*.py")):
        if path.name != "run.py":
            tree = ast.parse(path.read_text(encoding="utf-8"))
            digest.update(f"{path.name}:{_canonical(tree)}\n".encode())
    return digest.hexdigest()[:16]


def _canonical(node: object) -> str:
    """A syntax tree as text. Unlike ast.dump's it is the same in all Python versions: empty fields are left out."""
    if isinstance(node, list):
        return "[" + ",".join(_canonical(item) for item in node) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = []
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(value, list):
            value = [statement for statement in value if not _left_out(statement)]
        if value is not None and value != []:
            fields.append(f"{name}={_canonical(value)}")
    return f"{type(node).__name__}({','.join(fields)})"


def _left_out(statement: ast.stmt) -> bool:
    """Docstrings (any statement that is only a string) and the functions that are not timed."""
    if isinstance(statement, ast.FunctionDef):
        return statement.name in NOT_HASHED
    return isinstance(statement, ast.Expr) and isinstance(getattr(statement.value, "value", None), str)

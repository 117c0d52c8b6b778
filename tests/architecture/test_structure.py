"""The shape of the code base: imports go one way, references stand beside fast forms, files stay small."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from pydantic_core import PydanticUndefined

import bertsmith
from bertsmith.models.published import PRESETS
from bertsmith.settings import Record

SOURCE = Path(bertsmith.__file__).parent
ORDER = ["errors", "bundled", "settings", "toml", "text", "answers", "data", "ops", "layers", "models", "checkpoint"]
ORDER += ["engines", "runtime", "exporting", "objectives", "tasks", "training", "recipes", "shrinking", "report", "hf"]
ORDER += ["serving", "runs", "commands", "cli", "__main__"]
FILES = sorted(SOURCE.rglob("*.py"))


def _home(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("bertsmith."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {name.name.split(".")[1] for name in node.names if name.name.startswith("bertsmith.")}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_one_way(path: Path) -> None:
    home = _home(path)
    if home == "__init__":
        return
    for target in _imports(path):
        assert ORDER.index(target) <= ORDER.index(home), f"{home} must not import {target}"


def test_every_op_has_a_reference() -> None:
    shared = {"__pycache__"}
    folders = [path for path in (SOURCE / "ops").iterdir() if path.is_dir() and path.name not in shared]
    assert folders
    assert [folder.name for folder in folders if not (folder / "reference.py").exists()] == []


def test_architectures_stay_readable() -> None:
    tree = ast.parse((SOURCE / "models" / "presets.py").read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    used = {architecture.__name__ for architecture, _ in PRESETS.values()}
    assert {function.name for function in functions} == used
    for function in functions:
        assert function.end_lineno is not None
        assert function.end_lineno - function.lineno < 15, function.name


def test_import_is_light() -> None:
    code = "import sys, bertsmith; print(*[m for m in ('torch', 'transformers', 'accelerate') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def test_loading_waits_for_nothing_it_does_not_use() -> None:
    """The first load of a process took three times as long with these: they bring sympy and torch.compile along."""
    heavy = ("torch.distributed.tensor", "torch.nn.attention.varlen")
    code = f"import sys, bertsmith; bertsmith.load; print(*[name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def test_loading_never_needs_transformers() -> None:
    code = "import sys, bertsmith; bertsmith.load, bertsmith.pretrain; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_exist_and_are_explained() -> None:
    for name in bertsmith.__all__:
        assert getattr(bertsmith, name).__doc__, name
    assert set(bertsmith.__all__) == set(bertsmith._HOMES)


def _records(kind: type[Record]) -> list[type[Record]]:
    return [kind, *(found for child in kind.__subclasses__() for found in _records(child))]


def test_none_is_only_ever_a_default() -> None:
    """TOML cannot say None, so a field that may be None and defaults to something else could not be written."""
    import bertsmith.cli
    import bertsmith.training.pretraining  # noqa: F401

    for record in _records(Record):
        for name, field in record.model_fields.items():
            if type(None) in get_args(field.annotation):
                assert field.default in (None, PydanticUndefined), f"{record.__name__}.{name}"

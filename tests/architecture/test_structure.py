"""Structure of the code base: import direction, no re-exports, a reference for every op, lazy imports."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest
from layers import DOCUMENTS, LAYERS, ROOT, updated
from pydantic_core import PydanticUndefined

import bertsmith
from bertsmith.models.published import PRESETS
from bertsmith.settings import Record

SOURCE = Path(bertsmith.__file__).parent
ORDER = list(LAYERS)
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))}


def _folder(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def _imports(tree: ast.AST) -> list[ast.ImportFrom]:
    """Return all imports of bertsmith modules, including those inside functions."""
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return [node for node in nodes if (node.module or "").startswith("bertsmith.")]


def test_imports_follow_the_layer_order() -> None:
    wrong = [
        f"{path.relative_to(SOURCE)} imports {node.module}"
        for path, tree in TREES.items()
        if _folder(path) != "__init__"
        for node in _imports(tree)
        if ORDER.index(str(node.module).split(".")[1]) > ORDER.index(_folder(path))
    ]
    assert wrong == []


def test_nothing_imports_the_runtime() -> None:
    users = {
        _folder(path)
        for path, tree in TREES.items()
        for node in _imports(tree)
        if str(node.module).startswith("bertsmith.runtime")
    }
    assert users <= {"runtime"}


def test_names_are_imported_from_the_module_that_defines_them() -> None:
    modules = {".".join(path.relative_to(SOURCE.parent).with_suffix("").parts): tree for path, tree in TREES.items()}
    imported = {
        (module, alias.asname or alias.name)
        for module, tree in modules.items()
        if not module.endswith("__init__")
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    wrong = [
        f"{module} imports {alias.name} from {node.module}"
        for module, tree in modules.items()
        for node in _imports(tree)
        for alias in node.names
        if (node.module, alias.name) in imported
    ]
    assert wrong == []


def test_public_class_names_are_unique() -> None:
    # the file in exported folders repeats classes, because it cannot import ours
    trees = [tree for path, tree in TREES.items() if path.name != "modeling_bertsmith.py"]
    names = [node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    public = Counter(name for name in names if not name.startswith("_"))
    assert [name for name, count in public.items() if count > 1] == []


def test_unit_tests_mirror_the_source() -> None:
    folders = {
        path.relative_to(ROOT / "tests" / "unit") for path in (ROOT / "tests" / "unit").rglob("*") if path.is_dir()
    }
    assert [str(path) for path in folders if path.name != "__pycache__" and not (SOURCE / path).is_dir()] == []


def test_bertsmith_modules_are_imported_at_the_top() -> None:
    """Exception: ops/ imports kernels inside functions, because Triton is optional."""
    inside = [
        f"{path.relative_to(SOURCE)}: {inner.module}"
        for path, tree in TREES.items()
        if _folder(path) != "ops"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in _imports(node)
    ]
    assert len(inside) <= 10, inside


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_show_the_layers(name: str) -> None:
    assert (ROOT / name).read_text(encoding="utf-8") == updated(name), "run python tests/architecture/layers.py"


def test_every_op_has_a_reference() -> None:
    shared = {"__pycache__"}
    folders = [path for path in (SOURCE / "ops").iterdir() if path.is_dir() and path.name not in shared]
    assert folders
    assert [folder.name for folder in folders if not (folder / "reference.py").exists()] == []


def test_preset_functions_are_short_and_used() -> None:
    tree = ast.parse((SOURCE / "models" / "presets.py").read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    used = {architecture.__name__ for architecture, _ in PRESETS.values()}
    assert {function.name for function in functions if not function.name.startswith("_")} == used
    for function in functions:
        assert function.end_lineno is not None
        assert function.end_lineno - function.lineno < 15, function.name


def test_import_does_not_load_torch() -> None:
    code = "import sys, bertsmith; print(*[m for m in ('torch', 'transformers', 'accelerate') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def test_load_does_not_import_heavy_modules() -> None:
    """DTensor and varlen attention import sympy and torch.compile, which makes the first load three times slower."""
    heavy = ("torch.distributed.tensor", "torch.nn.attention.varlen")
    code = (
        f"import sys, bertsmith; bertsmith.load; print(*[name for name in {heavy} if name in sys.modules]); "
        "bertsmith.pretrain; print('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\nFalse\n"


def test_public_names_exist_and_have_docstrings() -> None:
    for name in bertsmith.__all__:
        assert getattr(bertsmith, name).__doc__, name
    assert set(bertsmith.__all__) == set(bertsmith._MODULES)


def _records(kind: type[Record]) -> list[type[Record]]:
    return [kind, *(record for child in kind.__subclasses__() for record in _records(child))]


def test_optional_settings_default_to_none() -> None:
    """TOML has no null, so None could not be written for an optional field with another default."""
    import bertsmith.cli
    import bertsmith.training.pretraining  # noqa: F401

    for record in _records(Record):
        for name, field in record.model_fields.items():
            if type(None) in get_args(field.annotation):
                assert field.default in (None, PydanticUndefined), f"{record.__name__}.{name}"

"""The promises of SECURITY.md that the source itself shows: no pickle, no remote code, no network."""

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "bertsmith"
TREES = {path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")}
PICKLE = {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
NETWORK = {"requests", "urllib3", "httpx", "aiohttp", "ftplib", "huggingface_hub"}


def imported(tree: ast.AST) -> set[str]:
    """Return the top-level packages that a module imports."""
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


def calls(tree: ast.AST, name: str) -> list[ast.Call]:
    """Return the calls of a function or method by its last name."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in found if ast.unparse(call.func).rpartition(".")[2] == name]


def test_only_pipes_to_own_processes_carry_pickles() -> None:
    assert not [name for name, tree in TREES.items() if imported(tree) & PICKLE]
    pipes = [name for name, tree in TREES.items() if "multiprocessing" in imported(tree) and calls(tree, "Connection")]
    assert pipes == ["data/executor.py"]


def test_arrays_and_weights_are_not_pickles() -> None:
    for name, tree in TREES.items():
        for call in calls(tree, "load"):
            owner = ast.unparse(call.func).rpartition(".")[0]
            assert owner != "torch", f"{name} reads a pickle with torch.load"
            if owner == "np":
                assert "allow_pickle=False" in ast.unparse(call), f"{name} reads arrays that may be pickles"


def test_code_of_models_is_never_run() -> None:
    for name, tree in TREES.items():
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        assert not [call for call in calls if _is_code(call.func)], name
        assert not [call for call in calls if any(word.arg == "trust_remote_code" for word in call.keywords)], name
    # exported folders have it for transformers; nothing reads it
    assert [name for name in TREES if "auto_map" in (SOURCE / name).read_text()] == ["checkpoint/hf/wrapped.py"]


def _is_code(function: ast.expr) -> bool:
    return isinstance(function, ast.Name) and function.id in ("eval", "exec", "compile", "__import__")


def test_only_hub_names_and_push_use_the_network() -> None:
    users = sorted(name for name, tree in TREES.items() if imported(tree) & NETWORK)
    assert users == ["bundled/hub.py", "runs/push.py"]
    assert [name for name, tree in TREES.items() if "datasets" in imported(tree)] == ["text/hub.py"]

"""The runtime works in a process that cannot import PyTorch, pydantic or transformers."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import bertsmith
from bertsmith.layers.subnet import Subnet
from bertsmith.models.attach_heads import with_task_head
from bertsmith.tasks.classification import Classification
from bertsmith.tasks.predictor import TaskRecord, write_task_record
from bertsmith.text.learn import learn_tokenizer

TEXTS = ["a quiet, lovely film", "a loud and dull one"]
PROGRAM = """
import json, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "pydantic", "transformers"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
from bertsmith.runtime import load
print(json.dumps(load(sys.argv[1], threads=1).predict(json.loads(sys.argv[2]))))
"""


def test_predicts_without_torch(tmp_path: Path) -> None:
    tokenizer = learn_tokenizer(TEXTS * 4, "wordpiece", 60, progress=False)
    sizes = {"vocabulary": tokenizer.size, "width": 32, "heads": 4, "layers": 1, "max_length": 32}
    model = bertsmith.build(bertsmith.preset("bert-tiny", **sizes), seed=0)
    model.tokenizer = tokenizer
    task = Classification(labels=("bad", "good"))
    model = bertsmith.extract(with_task_head(model, task.head(model.config), seed=0).eval(), Subnet())
    bertsmith.save(model, tmp_path / "model")
    write_task_record(TaskRecord.parse({"task": task.plain(), "sequences": {"length": 16}}), tmp_path / "model")
    bertsmith.export(model, tmp_path / "onnx", to="onnx", task=tmp_path / "model")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "onnx"), json.dumps(TEXTS)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)) <= {"bad", "good"}


def test_runtime_imports_only_torch_free_modules() -> None:
    allowed = ("errors", "files", "text.tokenizer", "text.rows", "answers.", "engines.onnx_session", "runtime.")
    for path in (Path(bertsmith.__file__).parent / "runtime").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("bertsmith."):
                assert str(node.module).removeprefix("bertsmith.").startswith(allowed), (path.name, node.module)

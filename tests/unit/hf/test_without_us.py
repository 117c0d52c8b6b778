"""Native folders need nothing of ours, and nothing of ours but `bertsmith.hf` needs `transformers`."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hf_cases import inputs, ours, task_model
from safetensors.torch import load_file, save_file

import bertsmith

SOURCE = Path(bertsmith.__file__).parent
ALONE = """
import sys
sys.modules["bertsmith"] = None  # importing it fails from here on
import torch, transformers, warnings
from safetensors.torch import load_file, save_file
warnings.simplefilter("ignore")
given = load_file(sys.argv[1] + "/inputs.safetensors")
said = {}
for name, auto in (pair.split("=") for pair in sys.argv[2:]):
    model = getattr(transformers, auto).from_pretrained(f"{sys.argv[1]}/{name}", dtype=torch.float64).eval()
    with torch.inference_mode():
        said[name] = model(**given).logits.contiguous()
save_file(said, sys.argv[1] + "/said.safetensors")
"""


@pytest.mark.slow  # a process for each folder
def test_native_folders_open_without_bertsmith(tmp_path: Path) -> None:
    cases = {
        "bert-tiny": ("classification", "AutoModelForSequenceClassification"),
        "deberta-v3-xsmall": ("classification", "AutoModelForSequenceClassification"),
        "electra-small": ("tagging", "AutoModelForTokenClassification"),
        "albert-base": ("tagging", "AutoModelForTokenClassification"),
    }
    models = {name: task_model(name, task) for name, (task, _) in cases.items()}
    given = inputs("", has_pads=False)
    save_file(given, tmp_path / "inputs.safetensors")
    for name, model in models.items():
        bertsmith.export(model, tmp_path / name, native="always")
    pairs = [f"{name}={auto}" for name, (_, auto) in cases.items()]
    subprocess.run([sys.executable, "-c", ALONE, str(tmp_path), *pairs], check=True, capture_output=True)
    said = load_file(tmp_path / "said.safetensors")
    for name, model in models.items():
        torch.testing.assert_close(said[name], ours(model, given), rtol=0, atol=1e-5)


def test_nothing_else_imports_transformers() -> None:
    paths = [path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] != "hf"]
    assert len(paths) > 300
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [name.name for name in node.names] if isinstance(node, ast.Import) else []
            found = [name for name in names if name.split(".")[0] == "transformers" or name.startswith("bertsmith.hf")]
            assert not found, path


def test_import_error_names_transformers() -> None:
    code = "import sys; sys.modules['transformers'] = None; import bertsmith.hf"
    failed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = failed.stderr.strip().splitlines()[-1]
    assert last == "ImportError: bertsmith.hf needs transformers, which is not installed: pip install 'bertsmith[hf]'"

"""The package as people install it: the wheel in an environment of its own, outside of the clone."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_readme_runs_from_an_installed_wheel(tmp_path: Path) -> None:
    clone = tmp_path / "clone"  # a copy, because building leaves files behind
    shutil.copytree(ROOT / "src", clone / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", "dist", str(clone)], tmp_path)
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)], tmp_path)
    # dependencies from this environment; a path in a .pth file does not activate the editable install there
    packages = Path(
        run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], tmp_path).strip()
    )
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = run([str(python), "-c", "import bertsmith; print(bertsmith.__file__)"], tmp_path)
    assert str(tmp_path / "venv") in where
    assert "finetune/patient" in run([str(python), "-m", "bertsmith", "list", "recipes"], tmp_path)
    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    run([str(python), "-c", block], tmp_path)
    # what Python wrote, the command line runs and replaces
    assert "%" in run([str(python), "-m", "bertsmith", "predict", "onnx-model", "--text", "it works"], tmp_path)
    replace = ["export", "runs/mood", "--to", "onnx", "--out", "onnx-model", "--force"]
    run([str(python), "-m", "bertsmith", *replace], tmp_path)


def run(command: list[str], folder: Path) -> str:
    """Run a command in a folder, without this clone on its path; return its output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout

"""The wheel contains the bundled model: the lines of the README run from the wheel alone."""

import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

HOME = Path(__file__).parents[3]
LINES = """
import sys
sys.path.insert(0, {installed!r})
import bertsmith
model = bertsmith.load("small")
filled = model.fill_mask("The capital of France is [MASK].")
vectors = model.encode(["a text", "another one"])
assert bertsmith.__file__.startswith({installed!r}), bertsmith.__file__
assert len(filled) == 1 and len(filled[0]) == 5 and tuple(vectors.shape)[0] == 2
"""


@pytest.mark.slow
def test_readme_lines_run_from_a_wheel(tmp_path: Path) -> None:
    source, installed = tmp_path / "source", tmp_path / "installed"
    # build from a copy, because builds leave folders behind and pick up leftovers of earlier builds
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(HOME / "src", source / "src", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(HOME / name, source)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    build = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(tmp_path), str(source)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("bertsmith-*.whl")
    with ZipFile(wheel) as file:
        file.extractall(installed)
    code = LINES.format(installed=str(installed))
    # isolated mode: no PYTHONPATH, no working directory on the path
    run = subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr

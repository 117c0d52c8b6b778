"""Replace the bundled model by a tiny one, in a working directory with a folder of the same name."""

from pathlib import Path

import pytest

import bertsmith
from bertsmith import bundled
from bertsmith.models.generator import attach, generator_of
from bertsmith.text.learn import learn_tokenizer
from bertsmith.text.support_desk import messages


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a pre-norm ConvBERT with a generator of half its width, in half precision."""
    tokenizer = learn_tokenizer(messages(), "wordpiece", 300, lowercase=True, progress=False)
    sizes = {"width": 32, "embedding_width": 16, "layers": 2, "heads": 4, "max_length": 64}
    config = bertsmith.preset("convbert-small", vocabulary=tokenizer.size, placement="pre", **sizes)
    generator = bertsmith.build(generator_of(config, width=0.5, depth=0.5), seed=1)
    model = attach(bertsmith.build(config, seed=0), generator, "full").eval()
    model.tokenizer = tokenizer
    folder = tmp_path_factory.mktemp("bundled") / "small"
    bertsmith.save(model, folder, precision="float16")
    return folder


@pytest.fixture
def tiny_bundled(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the tiny model that "small" refers to; the working directory has another folder "small"."""
    monkeypatch.setitem(bundled.FOLDERS, "small", tiny_folder)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small").mkdir()
    return tiny_folder

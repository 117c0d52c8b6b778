"""Models of the Hugging Face hub, with a stand-in for the download."""

from pathlib import Path

import huggingface_hub
import pytest

import bertsmith
from bertsmith.bundled import hub
from bertsmith.checkpoint.source import check_name
from bertsmith.errors import InputError
from bertsmith.serving.model import ServedModel


@pytest.fixture(autouse=True)
def empty_cache() -> None:
    hub._download.cache_clear()


def test_hub_names_are_downloaded_once(corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = bertsmith.Tokenizer.load(corpus_folder)
    model = bertsmith.build(bertsmith.preset("bert-tiny", vocabulary=tokenizer.size, width=24, heads=2), seed=0)
    model.tokenizer = tokenizer
    model.save_pretrained(tmp_path / "snapshots" / "0a1b2c")
    calls = []

    def download(name: str, *, allow_patterns: list[str], local_files_only: bool = False) -> str:
        calls.append((name, local_files_only))
        assert not any(pattern.endswith((".bin", ".py")) for pattern in allow_patterns)
        if local_files_only:
            raise FileNotFoundError("not cached")
        return str(tmp_path / "snapshots" / "0a1b2c")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert bertsmith.load("someone/tiny-bert").config.encoder == model.config.encoder
    assert ServedModel.open("someone/tiny-bert", threads=1).name == "tiny-bert"
    assert calls == [("someone/tiny-bert", True), ("someone/tiny-bert", False)]


def test_unavailable_models_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, **_: object) -> str:
        raise ConnectionError("no network\nmore lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(InputError, match=r"'someone/model' does not exist; .* available from the .* hub: no network$"):
        bertsmith.load("someone/model")


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("bert-base-uncased", "google-bert/bert-base-uncased"),
        ("roberta-base", "FacebookAI/roberta-base"),
        ("xlm-roberta-large", "FacebookAI/xlm-roberta-large"),
        ("distilbert-base-cased", "distilbert/distilbert-base-cased"),
        ("all-mpnet-base-v2", "sentence-transformers/all-mpnet-base-v2"),
    ],
)
def test_well_known_names_without_owner_are_completed(name: str, whole: str) -> None:
    with pytest.raises(InputError, match=f"did you mean '{whole}', the model of the Hugging Face hub"):
        check_name(name)


def test_paths_in_local_folders_are_not_hub_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert hub.hub_folder("runs/missing") is None
    assert hub.hub_folder("small") is None
    assert hub.hub_folder(Path("someone/model")) is None
    with pytest.raises(InputError, match="model folder 'runs/missing' does not exist"):
        bertsmith.load("runs/missing")

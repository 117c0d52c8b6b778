"""`bertsmith verify`, and the checksums that loading compares: damage raises and is named, nothing changes silently."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import bertsmith
from bertsmith.answers.sequences import check_finite
from bertsmith.cli import main
from bertsmith.data.shards import TokenCorpus
from bertsmith.errors import InputError
from bertsmith.files import SEAL, hash_file, write_seal
from bertsmith.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def saved(corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model with a tokenizer."""
    tokenizer = Tokenizer.load(corpus_folder)
    sizes = {"width": 8, "layers": 1, "heads": 2, "max_length": 16}
    model = bertsmith.build(bertsmith.preset("bert-tiny", vocabulary=tokenizer.size, **sizes))
    model.tokenizer = tokenizer
    folder = tmp_path_factory.mktemp("saved") / "model"
    bertsmith.save(model, folder)
    return folder


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_changed_file_of_a_model_raises(saved: Path, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(saved, tmp_path / "model")
    flip(folder / name, -5)
    with pytest.raises(InputError, match=rf"{name}' has changed since it was written"):
        bertsmith.load(folder)
    assert bertsmith.verify(folder).damaged == [f"{folder}: {name} has changed since it was written"]
    if name == "model.safetensors":
        bertsmith.load(folder, verify=False)
        (folder / SEAL).unlink()
        bertsmith.load(folder)


def test_command_names_damage_and_fails(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = shutil.copytree(saved, tmp_path / "run" / "model")
    main(["verify", str(tmp_path / "run")])
    assert capsys.readouterr().out == "3 files compared, 0 damaged\n"
    (folder / "tokenizer.json").unlink()
    with pytest.raises(SystemExit) as caught:
        main(["verify", str(tmp_path / "run")])
    assert caught.value.code == 1
    assert "tokenizer.json' does not exist\n3 files compared, 1 damaged" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"has no seal.json and no corpus"):
        bertsmith.verify(tmp_path / "empty")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_raise(saved: Path, tmp_path: Path, value: float) -> None:
    folder = shutil.copytree(saved, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    name = sorted(tensors)[0]
    tensors[name].view(-1)[-1] = value
    save_file(tensors, folder / "model.safetensors")
    write_seal(folder)
    with pytest.raises(InputError, match=f"{name}' has values that are not finite"):
        bertsmith.load(folder)


def test_outputs_that_are_not_finite_raise() -> None:
    check_finite([np.array([1.0, -np.inf]), np.empty(0)])
    for value in (np.nan, np.inf):
        with pytest.raises(InputError, match="returned values that are not finite"):
            check_finite([np.ones(2), np.array([0, value])])


def test_changed_shard_raises_before_it_is_read(corpus_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(corpus_folder, tmp_path / "corpus")
    assert bertsmith.verify(folder).damaged == []
    shard = sorted(folder.glob("train-*.shard"))[-1]
    flip(shard, -1)
    with pytest.raises(InputError, match=rf"{shard.name}' is damaged: its checksum differs"):
        TokenCorpus(folder).lengths  # noqa: B018
    assert len(TokenCorpus(folder, verify=False).lengths)
    assert len(bertsmith.verify(folder).damaged) == 1


def edit_shard(folder: Path, edit: Callable[[bytearray], None]) -> None:
    """Change the last training shard and its checksum in the manifest."""
    manifest = json.loads((folder / "manifest.json").read_text())
    record = manifest["shards"]["train"][-1]
    content = bytearray((folder / record["file"]).read_bytes())
    edit(content)
    (folder / record["file"]).write_bytes(content)
    record["sha256"] = hash_file(folder / record["file"])
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_shards_with_invalid_content_raise(corpus_folder: Path, tmp_path: Path) -> None:
    """A manifest with a matching checksum does not make invalid offsets or token ids usable."""

    def large_offset(content: bytearray) -> None:
        content[8:16] = (1 << 40).to_bytes(8, "little")

    def large_id(content: bytearray) -> None:
        content[-2:] = b"\xff\xff"

    for number, (edit, message) in enumerate(((large_offset, "invalid offsets"), (large_id, "token ids outside"))):
        folder = shutil.copytree(corpus_folder, tmp_path / str(number))
        edit_shard(folder, edit)
        with pytest.raises(InputError, match=message):
            TokenCorpus(folder).lengths  # noqa: B018


def test_manifest_names_only_files_of_its_folder(corpus_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(corpus_folder, tmp_path / "corpus")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["shards"]["train"][0]["file"] = "../outside"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=r"names '../outside'; allowed: a file in the same folder"):
        TokenCorpus(folder)


def test_pickled_corpus_is_not_verified_again(corpus_folder: Path) -> None:
    corpus = TokenCorpus(corpus_folder)
    function, arguments = corpus.__reduce__()
    assert function(*arguments)._unverified == set()
    assert torch.tensor(corpus.lengths).sum() == corpus.tokens


def test_failed_export_keeps_the_old_folder(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    main(["export", str(saved), "--out", str(out)])
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    monkeypatch.setattr("bertsmith.runs.exchange.write_card", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["export", str(saved), "--out", str(out), "--force"])
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_interrupt_that_a_library_swallows_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def interrupted(_: object) -> Path:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        except KeyboardInterrupt:
            raise ValueError("from a library") from None
        raise AssertionError

    monkeypatch.setattr("bertsmith.runs.verify.model_folder", interrupted)
    with pytest.raises(SystemExit) as caught:
        main(["verify", "model"])
    assert caught.value.code == 130
    assert capsys.readouterr().err == "bertsmith: interrupted\n"

"""A full disk, folders that cannot be written, a corpus that vanishes: one sentence each, and what was whole stays."""

import errno
import json
import os
import signal
from pathlib import Path

import pytest
from helpers_training import RECIPE, command
from safetensors import SafetensorError

import bertsmith
from bertsmith.cli import main
from bertsmith.data import shards
from bertsmith.data.shards import TokenCorpus
from bertsmith.errors import InputError
from bertsmith.training import checkpoint
from bertsmith.training.checkpoint import find_checkpoint
from bertsmith.training.log import RunLog
from bertsmith.training.trainer import Trainer


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "recipe.toml"
    path.write_text(RECIPE)
    return path


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_in_the_library(*_: object, **__: object) -> None:
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("refuse", [full, full_in_the_library])
def test_a_full_disk_at_a_checkpoint(
    refuse: object, recipe: Path, corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real = tmp_path / "run", checkpoint.write_tensors

    def write(path: Path, *arguments: object) -> None:
        (refuse if "step-00000010" in str(path) else real)(path, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_tensors", write)
        with pytest.raises(InputError) as caught:
            bertsmith.pretrain(recipe, data=corpus_folder, out=out, device="cpu")
    assert f"the run in {str(out)!r} had to stop: " in str(caught.value)
    assert "No space left on device" in str(caught.value)
    assert "; checkpoint step-00000005 is kept: put that right and go on with --resume" in str(caught.value)
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000005"]
    assert find_checkpoint(out / "checkpoints") == (out / "checkpoints" / "step-00000005", [])
    assert not (out / "result.json").exists()
    # with room again, the run goes on
    assert bertsmith.pretrain(out=out, resume=True, device="cpu")["is_finished"]


def test_a_full_disk_at_the_log_and_at_the_end(
    recipe: Path, corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real = tmp_path / "run", RunLog.write

    def write(self: RunLog, row: dict) -> None:
        (full if row["step"] == 8 else real)(self, row)

    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "write", write)
        with pytest.raises(InputError, match=r"No space left on device; checkpoint step-00000005 is kept"):
            bertsmith.pretrain(recipe, data=corpus_folder, out=out, device="cpu")
    with monkeypatch.context() as patch:
        patch.setattr("bertsmith.checkpoint.store.write_tensors", full_in_the_library)
        patch.setattr(checkpoint, "save_checkpoint", lambda *_, **__: None)
        patch.setattr("bertsmith.training.trainer.save_checkpoint", lambda *_, **__: None)
        with pytest.raises(InputError, match=r"No space left on device .*; checkpoint step-00000005 is kept"):
            bertsmith.pretrain(out=out, resume=True, device="cpu")
    assert bertsmith.pretrain(out=out, resume=True, device="cpu")["is_finished"]
    steps = [json.loads(line)["step"] for line in (out / "log.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)


def test_a_folder_that_cannot_be_written(
    recipe: Path, corpus_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file" / "run", Path("/proc/self/run")):
        with pytest.raises(SystemExit) as caught:
            main(command(recipe, corpus_folder, out)[3:])
        assert caught.value.code == 2
        assert f"--out {str(out)!r} cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("workers", [0, 1])
def test_a_shard_that_vanishes(
    workers: int, recipe: Path, corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard that is not open is opened when it is needed; reading processes tell of it, too."""
    monkeypatch.setattr(shards, "_SHARDS_OPEN", 1)
    real = TokenCorpus._open

    def vanish(self: TokenCorpus, index: int, document: int = 0) -> object:
        if (out / "checkpoints" / "step-00000005").exists() and index not in self._opened:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "shard-1")
        return real(self, index, document)

    out = tmp_path / "run"
    if workers:
        # what a reading process hands on: the whole report of its error as one text
        def hand_on(self: TokenCorpus, *arguments: object) -> object:
            try:
                return vanish(self, *arguments)
            except FileNotFoundError as error:
                text = f"Caught FileNotFoundError in DataLoader worker process 0.\nTraceback …\n  a line\n{error!r}\n"
                raise FileNotFoundError(text) from None

        monkeypatch.setattr(TokenCorpus, "_open", hand_on)
    else:
        monkeypatch.setattr(TokenCorpus, "_open", vanish)
    with pytest.raises(InputError) as caught:
        bertsmith.pretrain(recipe, data=corpus_folder, out=out, device="cpu")
    assert "No such file or directory" in str(caught.value)
    assert "; checkpoint step-00000005 is kept" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_asked_to_stop_while_measuring(
    recipe: Path, corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Trainer.rehearse

    def rehearse(self: Trainer, *arguments: object) -> None:
        real(self, *arguments)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Trainer, "rehearse", rehearse)
    with pytest.raises(InputError, match="asked to stop while the budget was being measured"):
        bertsmith.pretrain(recipe, data=corpus_folder, out=tmp_path / "run", budget="10h", device="cpu")
    assert list(tmp_path.iterdir()) == []

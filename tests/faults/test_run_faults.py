"""A full disk, a folder that cannot be written and a missing shard raise InputError; intact checkpoints stay."""

import errno
import json
import os
import signal
from pathlib import Path

import pytest
from helpers_training import RECIPE, command
from safetensors import SafetensorError
from torch.distributed import DistNetworkError

import bertsmith
from bertsmith.cli import main
from bertsmith.data import shards
from bertsmith.data.shards import TokenCorpus
from bertsmith.errors import InputError
from bertsmith.training import checkpoint
from bertsmith.training.checkpoint import find_checkpoint
from bertsmith.training.interrupts import explain_faults
from bertsmith.training.log import RunLog
from bertsmith.training.trainer import Trainer


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "recipe.toml"
    path.write_text(RECIPE)
    return path


def raise_disk_full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def raise_disk_full_in_safetensors(*_: object, **__: object) -> None:
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("fail", [raise_disk_full, raise_disk_full_in_safetensors])
def test_full_disk_during_a_checkpoint(
    fail: object, recipe: Path, corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real = tmp_path / "run", checkpoint.write_tensors

    def write(path: Path, *arguments: object) -> None:
        (fail if "step-00000010" in str(path) else real)(path, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_tensors", write)
        with pytest.raises(InputError) as caught:
            bertsmith.pretrain(recipe, data=corpus_folder, out=out, device="cpu")
    assert f"the run in {str(out)!r} stopped: " in str(caught.value)
    assert "No space left on device" in str(caught.value)
    assert "; checkpoint step-00000005 is kept: fix the cause and continue with --resume" in str(caught.value)
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000005"]
    assert find_checkpoint(out / "checkpoints") == (out / "checkpoints" / "step-00000005", [])
    assert not (out / "result.json").exists()
    # the run can be resumed once there is space
    assert bertsmith.pretrain(out=out, resume=True, device="cpu")["is_finished"]


def test_full_disk_during_logging_and_at_the_end(
    recipe: Path, corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real = tmp_path / "run", RunLog.write

    def write(self: RunLog, row: dict) -> None:
        (raise_disk_full if row["step"] == 8 else real)(self, row)

    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "write", write)
        with pytest.raises(InputError, match=r"No space left on device; checkpoint step-00000005 is kept"):
            bertsmith.pretrain(recipe, data=corpus_folder, out=out, device="cpu")
    with monkeypatch.context() as patch:
        patch.setattr("bertsmith.checkpoint.store.write_tensors", raise_disk_full_in_safetensors)
        patch.setattr(checkpoint, "save_checkpoint", lambda *_, **__: None)
        patch.setattr("bertsmith.training.trainer.save_checkpoint", lambda *_, **__: None)
        with pytest.raises(InputError, match=r"No space left on device .*; checkpoint step-00000005 is kept"):
            bertsmith.pretrain(out=out, resume=True, device="cpu")
    assert bertsmith.pretrain(out=out, resume=True, device="cpu")["is_finished"]
    steps = [json.loads(line)["step"] for line in (out / "log.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection closed by peer"),
        DistNetworkError("failed to recv, got 0 bytes"),
    ],
)
def test_broken_connection_between_processes_is_explained(error: RuntimeError, tmp_path: Path) -> None:
    """The real thing takes minutes: test_processes.py."""
    (tmp_path / "checkpoints" / "step-00000005").mkdir(parents=True)
    message = "the connection to another process of the run broke, .*; checkpoint step-00000005 is kept: .* --resume"
    with pytest.raises(InputError, match=message), explain_faults(tmp_path):
        raise error


def test_unwritable_output_folder_raises(
    recipe: Path, corpus_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file" / "run", Path("/proc/self/run")):
        with pytest.raises(SystemExit) as caught:
            main(command(recipe, corpus_folder, out)[3:])
        assert caught.value.code == 2
        assert f"--out {str(out)!r} cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("workers", [0, 1])
def test_missing_shard_raises(
    workers: int, recipe: Path, corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards are opened on demand; errors of data-loader workers are reported as well."""
    monkeypatch.setattr(shards, "_MAX_OPEN_SHARDS", 1)
    real = TokenCorpus._open

    def open_missing(self: TokenCorpus, index: int, document: int = 0) -> object:
        if (out / "checkpoints" / "step-00000005").exists() and index not in self._opened:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "shard-1")
        return real(self, index, document)

    out = tmp_path / "run"
    if workers:
        # a data-loader worker passes on the whole traceback as one string
        def open_in_worker(self: TokenCorpus, *arguments: object) -> object:
            try:
                return open_missing(self, *arguments)
            except FileNotFoundError as error:
                text = f"Caught FileNotFoundError in DataLoader worker process 0.\nTraceback …\n  a line\n{error!r}\n"
                raise FileNotFoundError(text) from None

        monkeypatch.setattr(TokenCorpus, "_open", open_in_worker)
    else:
        monkeypatch.setattr(TokenCorpus, "_open", open_missing)
    with pytest.raises(InputError) as caught:
        bertsmith.pretrain(recipe, data=corpus_folder, out=out, device="cpu")
    assert "No such file or directory" in str(caught.value)
    assert "; checkpoint step-00000005 is kept" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sigterm_while_measuring_the_budget_raises(
    recipe: Path, corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Trainer.rehearse

    def rehearse(self: Trainer, *arguments: object) -> None:
        real(self, *arguments)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Trainer, "rehearse", rehearse)
    with pytest.raises(InputError, match="interrupted while timing steps for the budget"):
        bertsmith.pretrain(recipe, data=corpus_folder, out=tmp_path / "run", budget="10h", device="cpu")
    assert list(tmp_path.iterdir()) == []


def interrupted_run(recipe: Path, corpus_folder: Path, out: Path, number: int = signal.SIGTERM) -> None:
    """Interrupt a run by a signal in its sixth step."""
    real = Trainer._step

    def step(self: Trainer, *arguments: object) -> None:
        real(self, *arguments)
        if self.progress.step == 6:
            os.kill(os.getpid(), number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_step", step)
        assert not bertsmith.pretrain(recipe, data=corpus_folder, out=out, device="cpu")["is_finished"]


def test_hangup_saves_a_checkpoint(recipe: Path, corpus_folder: Path, tmp_path: Path) -> None:
    interrupted_run(recipe, corpus_folder, tmp_path / "run", signal.SIGHUP)
    path, _ = find_checkpoint(tmp_path / "run" / "checkpoints")
    assert path is not None
    assert path.name == "step-00000006"


def test_changed_recipe_is_not_resumed(recipe: Path, corpus_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    interrupted_run(recipe, corpus_folder, out)
    lines = (out / "recipe.toml").read_text().splitlines(keepends=True)
    cut = [line for line in lines if not line.startswith("steps = ")]
    assert len(cut) == len(lines) - 1
    (out / "recipe.toml").write_text("".join(cut))
    with pytest.raises(InputError, match=r"run.steps is 1000, but the run was started with 20"):
        bertsmith.pretrain(out=out, resume=True, device="cpu")


def test_resuming_with_other_threads_warns(
    recipe: Path, corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "run"
    interrupted_run(recipe, corpus_folder, out)
    monkeypatch.setattr("torch.get_num_threads", lambda: 3)
    result = bertsmith.pretrain(out=out, resume=True, device="cpu")
    assert result["threads"] == 3
    printed = " ".join(capsys.readouterr().err.split())
    assert "used 1 CPU threads until now and uses 3 from here on" in printed
    assert "set OMP_NUM_THREADS=1 to avoid it" in printed

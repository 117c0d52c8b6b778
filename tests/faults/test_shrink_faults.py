"""Elastic training that is killed, stopped or run in two processes ends like an uninterrupted run."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from choosing import slow_unless
from helpers_shrinking import STEPS, assert_same, metrics, run_shrink, shrink_command, write_folders
from helpers_training import losses, run
from killing import Killed, kill_at

import bertsmith
from bertsmith.checkpoint.files import read_tensors
from bertsmith.errors import InputError
from bertsmith.runs import folder
from bertsmith.shrinking import context, elastic
from bertsmith.training import checkpoint
from bertsmith.training.trainer import Trainer

CONFIGS = Path(__file__).parents[2] / "configs" / "accelerate"
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]

Folders = tuple[Path, Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_folders(tmp_path_factory.mktemp("shrinking"))


@pytest.fixture(scope="module")
def uninterrupted(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an uninterrupted run."""
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    run_shrink(folders, out)
    return out


MOMENTS = {
    "after the importance scores": (context, "importance", 1, False),
    "while the rewired model is written": (elastic, "write_model", 1, False),
    "in the width stage": (Trainer, "_step", 4, False),
    "before checkpoints of the width stage are deleted": (shutil, "rmtree", 5, True),
    "between the stages": (elastic, "make_stage", 2, True),
    "in the depth stage": (Trainer, "_step", 8, False),
    "before the result": (folder, "write_result", 1, True),
}


QUICK = ("in the width stage", "between the stages", "before the result")


@pytest.mark.parametrize("moment", slow_unless(QUICK, MOMENTS))
def test_killed_at_any_moment(moment: str, folders: Folders, uninterrupted: Path, tmp_path: Path) -> None:
    owner, name, after, before_it = MOMENTS[moment]
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, owner, name, after=after, before_it=before_it)
        with pytest.raises(Killed):
            run_shrink(folders, out)
    assert not (out / "result.json").exists()
    bertsmith.shrink(out=out, resume=True, device="cpu")
    assert_same(out, uninterrupted)


def slow_environment() -> dict[str, str]:
    """Return an environment in which steps are slow, so that a signal arrives during the run."""
    paths = [str(Path(__file__).parent / "slow"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def wait_for_step(stage: Path, step: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while not (stage / "log.jsonl").exists() or (stage / "log.jsonl").read_text().count('"training"') < step:
        assert process.poll() is None, "the run ended before it could be interrupted"
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.01)


@pytest.mark.slow
def test_kill_signal_and_resume(folders: Folders, uninterrupted: Path, tmp_path: Path) -> None:
    """kill -9 during the first stage."""
    out = tmp_path / "run"
    process = subprocess.Popen(shrink_command(folders, out), env=slow_environment(), stdout=subprocess.DEVNULL)
    wait_for_step(out / "width", 2, process)
    process.kill()
    process.wait()
    assert not (out / "width" / "model").exists()
    bertsmith.shrink(out=out, resume=True, device="cpu")
    assert_same(out, uninterrupted)


@pytest.mark.parametrize(("step", "stage"), [(2, "width"), (STEPS + 3, "depth")])
def test_sigterm_saves_and_starts_no_further_stage(
    step: int, stage: str, folders: Folders, uninterrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGTERM saves a checkpoint after the current step."""
    out, real, calls = tmp_path / "run", Trainer._step, []

    def step_with_signal(*arguments: Any) -> None:
        calls.append(step)
        if len(calls) == step:
            os.kill(os.getpid(), signal.SIGTERM)
        real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_step", step_with_signal)
        stopped = run_shrink(folders, out)
    assert (stopped["is_finished"], stopped["stage"]) == (False, stage)
    assert len(calls) == step
    assert "continue with --resume" in capsys.readouterr().err
    assert not (out / "result.json").exists()
    bertsmith.shrink(out=out, resume=True, device="cpu")
    assert_same(out, uninterrupted)


def test_shrink_killed_after_the_result_is_finished(folders: Folders, uninterrupted: Path, tmp_path: Path) -> None:
    """Only the clean-up is missing, so there is nothing to resume."""
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, folder, "write_result", after=1, before_it=False)
        with pytest.raises(Killed):
            run_shrink(folders, out)
    assert metrics(out / "result.json") == metrics(uninterrupted / "result.json")
    with pytest.raises(InputError, match="is finished; there is nothing to resume"):
        bertsmith.shrink(out=out, resume=True, device="cpu")


def test_full_disk_keeps_the_last_checkpoint(folders: Folders, uninterrupted: Path, tmp_path: Path) -> None:
    out, real = tmp_path / "run", checkpoint.write_tensors

    def write(path: Path, *arguments: object) -> None:
        if "depth" in str(path) and "step-00000005" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, *arguments)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "write_tensors", write)
        with pytest.raises(InputError, match=r"run'? stopped: No space left .* step-0000000. is kept"):
            run_shrink(folders, out)
    bertsmith.shrink(out=out, resume=True, device="cpu")
    assert_same(out, uninterrupted)


def test_resume_rejects_other_settings(folders: Folders, uninterrupted: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, Trainer, "_step", after=2, before_it=True)
        with pytest.raises(Killed):
            run_shrink(folders, out)
    with pytest.raises(
        InputError, match=r"--resume: grid.widths is \[1.0, 0.25\], but the run was started with \[1.0, 0.5\]"
    ):
        bertsmith.shrink(out=out, resume=True, widths=[1.0, 0.25], device="cpu")
    with pytest.raises(InputError, match="is finished; there is nothing to resume"):
        bertsmith.shrink(out=uninterrupted, resume=True, device="cpu")
    with pytest.raises(InputError, match="contains no run to resume"):
        bertsmith.shrink(out=tmp_path, resume=True, device="cpu")


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path: Path) -> None:
    """Includes an incomplete last batch; without dropout, because its random numbers depend on the micro-batch.

    At full width the student equals its teacher, so gradients are rounding noise; a large epsilon keeps Adam from
    amplifying it.
    """
    folders = write_folders(tmp_path, dropout=0.0)
    one, two = tmp_path / "one", tmp_path / "two"
    run_shrink(folders, one, "optimizer.epsilon=1e-2")
    arguments = shrink_command(folders, two, "optimizer.epsilon=1e-2")
    run([*LAUNCH, str(CONFIGS / "cpu-two-processes.yaml"), *arguments[1:]])
    for stage in ("width", "depth"):
        ours, theirs = losses(two / stage), losses(one / stage)
        assert [row[:2] for row in ours] == [row[:2] for row in theirs]
        assert [row[2] for row in ours] == pytest.approx([row[2] for row in theirs], abs=1e-5)
    weights, others = (read_tensors(folder / "model.safetensors") for folder in (two, one))
    for name, weight in weights.items():
        assert (weight - others[name]).abs().max() < 1e-5, name
    assert metrics(two / "result.json") == metrics(one / "result.json")

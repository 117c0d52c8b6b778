"""Fine-tuning that is killed, stopped, out of disk space or run in two processes ends like an uninterrupted run."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest
from accelerate import PartialState
from choosing import slow_unless
from helpers_finetuning import RECIPE, STEPS, finetune_command, metrics, write_task
from helpers_training import losses, run
from killing import Killed, kill_at

import bertsmith
from bertsmith.checkpoint.files import read_tensors
from bertsmith.errors import InputError
from bertsmith.runs import folder as run_folder
from bertsmith.training import checkpoint, finetuning, trainer
from bertsmith.training.checkpoint import find_checkpoint
from bertsmith.training.evaluator import Evaluator
from bertsmith.training.trainer import Trainer

CONFIGS = Path(__file__).parents[2] / "configs" / "accelerate"
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "recipe.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("data") / "reviews")


@pytest.fixture(scope="module")
def uninterrupted(recipe: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an uninterrupted run."""
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    bertsmith.finetune(recipe=recipe, data=data, out=out, device="cpu")
    return out


def slow_environment() -> dict[str, str]:
    """Return an environment in which steps are slow, so that a signal arrives during the run."""
    paths = [str(Path(__file__).parent / "slow"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def steps_logged(out: Path) -> int:
    path = out / "log.jsonl"
    return path.read_text().count('"training"') if path.exists() else 0


def wait_for_step(out: Path, step: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while steps_logged(out) < step:
        assert process.poll() is None, "the run ended before it could be interrupted"
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.01)


def assert_same(out: Path, uninterrupted: Path) -> None:
    assert losses(out) == losses(uninterrupted)
    assert metrics(out) == metrics(uninterrupted)
    for name in ("model.safetensors", "dev.predictions.jsonl", "task.json"):
        assert (out / name).read_bytes() == (uninterrupted / name).read_bytes(), name
    assert not (out / "checkpoints").exists()


@pytest.mark.slow
def test_killed_repeatedly_and_resumed(recipe: Path, data: Path, uninterrupted: Path, tmp_path: Path) -> None:
    """kill -9 at two random steps, then resume to the end."""
    out, draws = tmp_path / "run", Random(5)
    arguments = finetune_command(recipe, data, out)
    for step in (draws.randint(1, 8), draws.randint(12, STEPS - 4)):
        process = subprocess.Popen(
            arguments, env=slow_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_for_step(out, step, process)
        time.sleep(draws.random() * 0.1)
        process.kill()
        process.wait()
        assert not (out / "result.json").exists()
        arguments = finetune_command(None, None, out, "--resume")
    bertsmith.finetune(out=out, resume=True, device="cpu")
    assert_same(out, uninterrupted)


@pytest.mark.slow  # the default tests stop a pre-training
def test_sigterm_saves_a_checkpoint(recipe: Path, data: Path, uninterrupted: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = subprocess.Popen(
        finetune_command(recipe, data, out), env=slow_environment(), stderr=subprocess.PIPE, text=True
    )
    wait_for_step(out, 6, process)
    process.send_signal(signal.SIGTERM)
    _, output = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "continue with --resume" in output
    assert not (out / "result.json").exists()
    bertsmith.finetune(out=out, resume=True, device="cpu")
    assert_same(out, uninterrupted)


MOMENTS = {
    "before the first step": (Trainer, "_step", 1, True),
    "between evaluation and checkpoint": (Evaluator, "__call__", 3, False),
    "while a checkpoint is written": (checkpoint, "write_tensors", 3, True),
    "after a checkpoint, before old ones are deleted": (checkpoint, "_prune", 3, True),
    "after old checkpoints are deleted": (checkpoint, "_prune", 4, False),
    "before the best weights are loaded": (trainer, "load_weights", 1, True),
    "before the result": (run_folder, "write_result", 1, True),
}


QUICK = ("while a checkpoint is written", "before the best weights are loaded", "before the result")


@pytest.mark.parametrize("moment", slow_unless(QUICK, MOMENTS))
def test_killed_at_any_moment(moment: str, recipe: Path, data: Path, uninterrupted: Path, tmp_path: Path) -> None:
    """The best checkpoint so far is always intact, and the resumed run gives the same result."""
    owner, name, after, before_it = MOMENTS[moment]
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, owner, name, after=after, before_it=before_it)
        with pytest.raises(Killed):
            bertsmith.finetune(recipe=recipe, data=data, out=out, device="cpu")
    newest, _ = find_checkpoint(out / "checkpoints")
    if newest is not None:
        best = json.loads((newest / "progress.json").read_text())["best_step"]
        checkpoint.check_complete(out / "checkpoints" / f"step-{best:08d}")
    bertsmith.finetune(out=out, resume=True, device="cpu")
    assert_same(out, uninterrupted)


def test_run_killed_after_the_result_is_finished(recipe: Path, data: Path, uninterrupted: Path, tmp_path: Path) -> None:
    """Only the clean-up is missing, so there is nothing to resume but to remove checkpoints."""
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, run_folder, "write_result", after=1, before_it=False)
        with pytest.raises(Killed):
            bertsmith.finetune(recipe=recipe, data=data, out=out, device="cpu")
    assert metrics(out) == metrics(uninterrupted)
    assert (out / "checkpoints").exists()
    with pytest.raises(InputError, match="nothing to resume"):
        bertsmith.finetune(out=out, resume=True, device="cpu")
    assert {path.name for path in out.iterdir()} == {path.name for path in uninterrupted.iterdir()}


def test_early_stopping_is_kept_on_resume(recipe: Path, data: Path, tmp_path: Path) -> None:
    """A run killed after early stopping adds no step when it is resumed."""
    changes = ["run.patience=1", "optimizer.learning_rate=1e-9"]
    bertsmith.finetune(recipe=recipe, data=data, out=tmp_path / "a", set=changes, device="cpu")
    assert metrics(tmp_path / "a")["steps"] < STEPS
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, trainer, "load_weights", after=1, before_it=True)
        with pytest.raises(Killed):
            bertsmith.finetune(recipe=recipe, data=data, out=tmp_path / "b", set=changes, device="cpu")
    bertsmith.finetune(out=tmp_path / "b", resume=True, device="cpu")
    assert_same(tmp_path / "b", tmp_path / "a")


def test_full_disk_keeps_the_last_checkpoint(recipe: Path, data: Path, uninterrupted: Path, tmp_path: Path) -> None:
    out, real = tmp_path / "run", checkpoint.write_tensors

    def write(path: Path, *arguments: object) -> None:
        if "step-00000008" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, *arguments)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "write_tensors", write)
        with pytest.raises(InputError, match=r"No space left on device; checkpoint step-00000004 is kept"):
            bertsmith.finetune(recipe=recipe, data=data, out=out, device="cpu")
    bertsmith.finetune(out=out, resume=True, device="cpu")
    assert_same(out, uninterrupted)


def test_resume_rejects_other_settings_and_data(recipe: Path, data: Path, uninterrupted: Path, tmp_path: Path) -> None:
    out, copy = tmp_path / "run", tmp_path / "reviews"
    shutil.copytree(data, copy)
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, Trainer, "_step", after=10, before_it=True)
        with pytest.raises(Killed):
            bertsmith.finetune(recipe=recipe, data=copy, out=out, device="cpu")
    with pytest.raises(
        InputError, match=r"--resume: optimizer.learning_rate is 0.5, but the run was started with 0.001"
    ):
        bertsmith.finetune(out=out, resume=True, learning_rate=0.5, device="cpu")
    with pytest.raises(InputError, match="is finished"):
        bertsmith.finetune(out=uninterrupted, resume=True, device="cpu")
    with pytest.raises(InputError, match="contains no run to resume"):
        bertsmith.finetune(out=tmp_path, resume=True, device="cpu")
    lines = (copy / "train.jsonl").read_text().splitlines(keepends=True)
    (copy / "train.jsonl").write_text("".join([*lines[1:], lines[0]]))
    with pytest.raises(InputError, match="was made with another corpus"):
        bertsmith.finetune(out=out, resume=True, device="cpu")


def assert_close(out: Path, expected: Path) -> None:
    """Assert equal evaluations and weights up to rounding: sums over processes are in another order."""
    ours, theirs = losses(out), losses(expected)
    assert [row[:2] for row in ours] == [row[:2] for row in theirs]
    assert [row[2] for row in ours] == pytest.approx([row[2] for row in theirs], abs=1e-5)
    weights, others = (read_tensors(folder / "model.safetensors") for folder in (out, expected))
    for name, weight in weights.items():
        assert (weight - others[name]).abs().max() < 1e-5, name
    assert metrics(out)["score"] == metrics(expected)["score"]


@pytest.mark.slow
def test_two_processes_equal_one(recipe: Path, tmp_path: Path) -> None:
    """Includes an incomplete last batch; without dropout, because its random numbers depend on the micro-batch."""
    data = write_task(tmp_path / "reviews", train=53)
    out, one = tmp_path / "two", tmp_path / "one"
    changes = ["model.overrides.dropout=0.0", "run.epochs=2"]
    bertsmith.finetune(recipe=recipe, data=data, out=one, set=changes, device="cpu")
    flags = [word for change in changes for word in ("--set", change)]
    run([*LAUNCH, str(CONFIGS / "cpu-two-processes.yaml"), *finetune_command(recipe, data, out, *flags)[1:]])
    assert metrics(out)["processes"] == 2
    assert_close(out, one)
    # two micro-batches in one process give the same run, even with dropout
    assert "micro_examples = 4" in (out / "recipe.toml").read_text()


def test_fsdp_raises_in_fine_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert finetuning.processes_of("cpu") == 1  # a single process is not sharded
    monkeypatch.setitem(PartialState._shared_state, "num_processes", 2)
    with pytest.raises(InputError, match=r"requests sharded weights \(FSDP\); allowed in fine-tuning: whole copies"):
        finetuning.processes_of("cpu")

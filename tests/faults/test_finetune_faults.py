"""Fine-tuning that is killed, asked to stop, out of disk or divided among processes ends as an undisturbed run does."""

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
from helpers_finetuning import RECIPE, STEPS, metrics, tuning, write_task
from helpers_training import losses, run
from killing import Killed, killed

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
def straight(recipe: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    out = tmp_path_factory.mktemp("straight") / "run"
    bertsmith.finetune(recipe=recipe, data=data, out=out, device="cpu")
    return out


def slowed() -> dict[str, str]:
    """An environment in which each step waits a little, so that a signal meets the run in the middle."""
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


def assert_same(out: Path, straight: Path) -> None:
    assert losses(out) == losses(straight)
    assert metrics(out) == metrics(straight)
    for name in ("model.safetensors", "dev.predictions.jsonl", "task.json"):
        assert (out / name).read_bytes() == (straight / name).read_bytes(), name
    assert not (out / "checkpoints").exists()


@pytest.mark.slow
def test_killed_again_and_again(recipe: Path, data: Path, straight: Path, tmp_path: Path) -> None:
    """kill -9 at random moments, each time a little further on, until nothing is left to do."""
    out, draws = tmp_path / "run", Random(5)
    words = tuning(recipe, data, out)
    for step in (draws.randint(1, 8), draws.randint(12, STEPS - 4)):
        process = subprocess.Popen(words, env=slowed(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for_step(out, step, process)
        time.sleep(draws.random() * 0.1)
        process.kill()
        process.wait()
        assert not (out / "result.json").exists()
        words = tuning(None, None, out, "--resume")
    bertsmith.finetune(out=out, resume=True, device="cpu")
    assert_same(out, straight)


@pytest.mark.slow  # pre-training is asked to stop in every run of the tests
def test_asked_to_stop(recipe: Path, data: Path, straight: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = subprocess.Popen(tuning(recipe, data, out), env=slowed(), stderr=subprocess.PIPE, text=True)
    wait_for_step(out, 6, process)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "go on with --resume" in said
    assert not (out / "result.json").exists()
    bertsmith.finetune(out=out, resume=True, device="cpu")
    assert_same(out, straight)


MOMENTS = {
    "before the first step": (Trainer, "_step", 1, True),
    "between evaluation and checkpoint": (Evaluator, "__call__", 3, False),
    "while a checkpoint is written": (checkpoint, "write_tensors", 3, True),
    "after a checkpoint, before old ones go": (checkpoint, "_prune", 3, True),
    "after old checkpoints went": (checkpoint, "_prune", 4, False),
    "before the best weights are taken": (trainer, "load_weights", 1, True),
    "before the result": (run_folder, "write_result", 1, True),
}


QUICK = ("while a checkpoint is written", "before the best weights are taken", "before the result")


@pytest.mark.parametrize("moment", slow_unless(QUICK, MOMENTS))
def test_killed_at_any_moment(moment: str, recipe: Path, data: Path, straight: Path, tmp_path: Path) -> None:
    """The best checkpoint so far is whole whenever the run ends, and the end is the same."""
    owner, name, after, before_it = MOMENTS[moment]
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        killed(patch, owner, name, after=after, before_it=before_it)
        with pytest.raises(Killed):
            bertsmith.finetune(recipe=recipe, data=data, out=out, device="cpu")
    newest, _ = find_checkpoint(out / "checkpoints")
    if newest is not None:
        best = json.loads((newest / "progress.json").read_text())["best_step"]
        checkpoint.check_whole(out / "checkpoints" / f"step-{best:08d}")
    bertsmith.finetune(out=out, resume=True, device="cpu")
    assert_same(out, straight)


def test_killed_after_the_result(recipe: Path, data: Path, straight: Path, tmp_path: Path) -> None:
    """All is there but the tidying up: the run is finished, and says so."""
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        killed(patch, run_folder, "write_result", after=1, before_it=False)
        with pytest.raises(Killed):
            bertsmith.finetune(recipe=recipe, data=data, out=out, device="cpu")
    assert metrics(out) == metrics(straight)
    with pytest.raises(InputError, match="nothing to resume"):
        bertsmith.finetune(out=out, resume=True, device="cpu")


def test_an_early_stop_is_resumed_as_one(recipe: Path, data: Path, tmp_path: Path) -> None:
    """Patience that ran out stays run out: the run is killed after its last checkpoint and adds no step."""
    changes = ["run.patience=1", "optimizer.learning_rate=1e-9"]
    bertsmith.finetune(recipe=recipe, data=data, out=tmp_path / "a", set=changes, device="cpu")
    assert metrics(tmp_path / "a")["steps"] < STEPS
    with pytest.MonkeyPatch.context() as patch:
        killed(patch, trainer, "load_weights", after=1, before_it=True)
        with pytest.raises(Killed):
            bertsmith.finetune(recipe=recipe, data=data, out=tmp_path / "b", set=changes, device="cpu")
    bertsmith.finetune(out=tmp_path / "b", resume=True, device="cpu")
    assert_same(tmp_path / "b", tmp_path / "a")


def test_a_full_disk(recipe: Path, data: Path, straight: Path, tmp_path: Path) -> None:
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
    assert_same(out, straight)


def test_what_resume_refuses(recipe: Path, data: Path, straight: Path, tmp_path: Path) -> None:
    out, own = tmp_path / "run", tmp_path / "reviews"
    shutil.copytree(data, own)
    with pytest.MonkeyPatch.context() as patch:
        killed(patch, Trainer, "_step", after=10, before_it=True)
        with pytest.raises(Killed):
            bertsmith.finetune(recipe=recipe, data=own, out=out, device="cpu")
    with pytest.raises(
        InputError, match=r"--resume: optimizer.learning_rate is 0.5, but the run was started with 0.001"
    ):
        bertsmith.finetune(out=out, resume=True, learning_rate=0.5, device="cpu")
    with pytest.raises(InputError, match="is finished"):
        bertsmith.finetune(out=straight, resume=True, device="cpu")
    with pytest.raises(InputError, match="contains no run to resume"):
        bertsmith.finetune(out=tmp_path, resume=True, device="cpu")
    lines = (own / "train.jsonl").read_text().splitlines(keepends=True)
    (own / "train.jsonl").write_text("".join([*lines[1:], lines[0]]))
    with pytest.raises(InputError, match="was made with another corpus"):
        bertsmith.finetune(out=out, resume=True, device="cpu")


def assert_like(out: Path, expected: Path) -> None:
    """The same evaluations and weights to within rounding: sums over processes have another order."""
    ours, theirs = losses(out), losses(expected)
    assert [row[:2] for row in ours] == [row[:2] for row in theirs]
    assert [row[2] for row in ours] == pytest.approx([row[2] for row in theirs], abs=1e-5)
    weights, others = (read_tensors(folder / "model.safetensors") for folder in (out, expected))
    for name, weight in weights.items():
        assert (weight - others[name]).abs().max() < 1e-5, name
    assert metrics(out)["score"] == metrics(expected)["score"]


@pytest.mark.slow
def test_two_processes_equal_one(recipe: Path, tmp_path: Path) -> None:
    """With a last batch of an epoch that is not full, and without dropout, whose draws belong to a micro-batch."""
    data = write_task(tmp_path / "reviews", train=53)
    out, one = tmp_path / "two", tmp_path / "one"
    changes = ["model.overrides.dropout=0.0", "run.epochs=2"]
    bertsmith.finetune(recipe=recipe, data=data, out=one, set=changes, device="cpu")
    flags = [word for change in changes for word in ("--set", change)]
    run([*LAUNCH, str(CONFIGS / "cpu-two-processes.yaml"), *tuning(recipe, data, out, *flags)[1:]])
    assert metrics(out)["processes"] == 2
    assert_like(out, one)
    # two micro-batches in one process are the same run, with dropout, too
    assert "micro_examples = 4" in (out / "recipe.toml").read_text()


def test_sharded_weights_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert finetuning.processes_of("cpu") == 1  # one process alone has nothing to share
    monkeypatch.setitem(PartialState._shared_state, "num_processes", 2)
    with pytest.raises(InputError, match=r"asks for sharded weights \(FSDP\); allowed in fine-tuning: whole copies"):
        finetuning.processes_of("cpu")

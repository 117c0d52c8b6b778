"""Interrupted, killed and damaged pre-training runs."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from helpers_training import command, losses, run

import bertsmith
from bertsmith.cli import main
from bertsmith.training.checkpoint import find_checkpoint


@pytest.fixture(scope="module")
def uninterrupted(recipe: Path, corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an uninterrupted run of 20 steps."""
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    run(command(recipe, corpus_folder, out))
    return out


def wait_for_checkpoint(out: Path, name: str, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if (out / "checkpoints" / name / "seal.json").exists():
            return
        assert process.poll() is None, "the run ended before it could be interrupted"
        time.sleep(0.02)
    process.kill()
    process.wait()
    raise AssertionError(f"{name} was not written")


@pytest.fixture(scope="module")
def killed(recipe: Path, corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run that was killed after its checkpoint of step 10; tests work on copies."""
    out = tmp_path_factory.mktemp("killed") / "run"
    process = subprocess.Popen(command(recipe, corpus_folder, out), env=slow_environment(), stderr=subprocess.DEVNULL)
    wait_for_checkpoint(out, "step-00000010", process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (out / "result.json").exists()
    return out


def error_output(arguments: list[str], capsys: pytest.CaptureFixture) -> str:
    """Run a command that fails and return its error output."""
    with pytest.raises(SystemExit) as exit_info:
        main(arguments[3:])
    assert exit_info.value.code == 2
    return capsys.readouterr().err


def slow_environment() -> dict[str, str]:
    """Return an environment in which steps are slow, so that a signal arrives during the run."""
    paths = [str(Path(__file__).parent / "slow"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def assert_same(out: Path, uninterrupted: Path) -> None:
    assert losses(out) == losses(uninterrupted)
    assert (out / "model.safetensors").read_bytes() == (uninterrupted / "model.safetensors").read_bytes()


def test_resume_after_kill_is_bitwise_equal(killed: Path, uninterrupted: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(killed, out)
    run(command(None, None, out, "--resume"))
    assert_same(out, uninterrupted)
    steps = {path.name for path in (out / "checkpoints").iterdir()}
    assert len(steps) <= 3


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_signal_saves_a_checkpoint_and_exits_with_0(
    number: signal.Signals, recipe: Path, corpus_folder: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    # Ctrl-C is sent to the whole process group, including data-loader workers; SIGTERM to the main process
    arguments = command(recipe, corpus_folder, out, *(["--set", "run.workers=2"] if number == signal.SIGINT else []))
    process = subprocess.Popen(
        arguments, env=slow_environment(), stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_for_checkpoint(out, "step-00000005", process)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    _, output = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "continue with --resume" in output
    newest, _ = find_checkpoint(out / "checkpoints")
    assert newest is not None
    assert 5 < json.loads((newest / "progress.json").read_text())["step"] < 20
    bertsmith.pretrain(out=out, resume=True, device="cpu")
    assert_same(out, uninterrupted)


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "seal"])
def test_damaged_checkpoint_is_skipped(
    damage: str, killed: Path, uninterrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "run"
    shutil.copytree(killed, out)
    for path in sorted((out / "checkpoints").glob("step-*"))[2:]:
        path.rename(tmp_path / path.name)
    newest = out / "checkpoints" / "step-00000010"
    weights = newest / "model.safetensors"
    content = weights.read_bytes()
    if damage == "truncate":
        weights.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "remove":
        (newest / "optimizer.safetensors").unlink()
    else:
        (newest / "seal.json").unlink()
    found, warnings = find_checkpoint(out / "checkpoints")
    assert found is not None
    assert found.name == "step-00000005"
    assert "step-00000010 is damaged" in warnings[0]
    if damage == "truncate":
        main(command(None, None, out, "--resume")[3:])
        assert "is damaged" in capsys.readouterr().err
        assert_same(out, uninterrupted)


@pytest.mark.slow  # starts processes; test_plan.py compares their batches
def test_data_loader_workers_do_not_change_the_run(
    recipe: Path, corpus_folder: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    bertsmith.pretrain(recipe, data=corpus_folder, out=out, set=["run.workers=2"], device="cpu")
    assert_same(out, uninterrupted)


def test_resume_rejects_another_corpus_and_damaged_checkpoints(
    corpus_folder: Path, uninterrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The error leaves the log unchanged."""
    out = tmp_path / "run"
    shutil.copytree(uninterrupted, out)
    (out / "result.json").unlink()
    corpus = tmp_path / "corpus"
    shutil.copytree(corpus_folder, corpus)
    manifest = corpus / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"seed": 0', '"seed": 0 '))
    text = (out / "recipe.toml").read_text().replace(str(corpus_folder), str(corpus))
    (out / "recipe.toml").write_text(text)
    (out / "seal.json").unlink()
    assert "was made with another corpus" in error_output(command(None, None, out, "--resume"), capsys)
    (out / "recipe.toml").write_text((uninterrupted / "recipe.toml").read_text())
    for seal in out.glob("checkpoints/*/seal.json"):
        seal.unlink()
    assert "has no complete checkpoint" in error_output(command(None, None, out, "--resume"), capsys)
    assert losses(out) == losses(uninterrupted)


def test_resume_rejects_other_settings_and_finished_runs(
    recipe: Path, corpus_folder: Path, uninterrupted: Path, killed: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    output = error_output(command(None, None, uninterrupted, "--resume"), capsys)
    assert "is finished (20 steps); there is nothing to resume" in output
    out = tmp_path / "run"
    shutil.copytree(killed, out)
    arguments = command(recipe, corpus_folder, out, "--resume", "--set", "optimizer.learning_rate=1e-4")
    # as a process, to check its exit code and output
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 2
    assert "optimizer.learning_rate is 0.0001, but the run was started with 0.0005" in done.stderr
    assert "Traceback" not in done.stderr

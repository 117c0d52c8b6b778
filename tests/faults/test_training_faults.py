"""Interrupted, killed and damaged runs."""

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
def straight(recipe: Path, corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 20 steps that nothing disturbed."""
    out = tmp_path_factory.mktemp("straight") / "run"
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
    """A run that got kill -9 once it had written its checkpoint of step 10; tests take copies."""
    out = tmp_path_factory.mktemp("killed") / "run"
    process = subprocess.Popen(command(recipe, corpus_folder, out), env=slowed(), stderr=subprocess.DEVNULL)
    wait_for_checkpoint(out, "step-00000010", process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (out / "result.json").exists()
    return out


def refused(words: list[str], capsys: pytest.CaptureFixture) -> str:
    """What a command that ends with an error says."""
    with pytest.raises(SystemExit) as ended:
        main(words[3:])
    assert ended.value.code == 2
    return capsys.readouterr().err


def slowed() -> dict[str, str]:
    """An environment in which each step waits a little, so that a signal meets the run in the middle."""
    paths = [str(Path(__file__).parent / "slow"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def assert_same(out: Path, straight: Path) -> None:
    assert losses(out) == losses(straight)
    assert (out / "model.safetensors").read_bytes() == (straight / "model.safetensors").read_bytes()


def test_killed_and_resumed_is_bitwise_the_same(killed: Path, straight: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(killed, out)
    run(command(None, None, out, "--resume"))
    assert_same(out, straight)
    steps = {path.name for path in (out / "checkpoints").iterdir()}
    assert len(steps) <= 3


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_asked_to_stop_saves_and_ends_well(
    number: signal.Signals, recipe: Path, corpus_folder: Path, straight: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    # Ctrl-C goes to the whole group, reading processes included; SIGTERM to the main process
    words = command(recipe, corpus_folder, out, *(["--set", "run.workers=2"] if number == signal.SIGINT else []))
    process = subprocess.Popen(words, env=slowed(), stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_for_checkpoint(out, "step-00000005", process)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "go on with --resume" in said
    newest, _ = find_checkpoint(out / "checkpoints")
    assert newest is not None
    assert 5 < json.loads((newest / "progress.json").read_text())["step"] < 20
    bertsmith.pretrain(out=out, resume=True, device="cpu")
    assert_same(out, straight)


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "seal"])
def test_a_torn_checkpoint_is_passed_over(
    damage: str, killed: Path, straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture
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
    found, complaints = find_checkpoint(out / "checkpoints")
    assert found is not None
    assert found.name == "step-00000005"
    assert "step-00000010 is not whole" in complaints[0]
    if damage == "truncate":
        main(command(None, None, out, "--resume")[3:])
        assert "is not whole" in capsys.readouterr().err
        assert_same(out, straight)


@pytest.mark.slow  # processes of its own; test_plan.py compares their batches
def test_reading_processes_do_not_change_the_run(
    recipe: Path, corpus_folder: Path, straight: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    bertsmith.pretrain(recipe, data=corpus_folder, out=out, set=["run.workers=2"], device="cpu")
    assert_same(out, straight)


def test_resume_refuses_what_it_cannot_continue(
    corpus_folder: Path, straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """All checkpoints torn, or another corpus in the old one's place: a sentence, and the log is left alone."""
    out = tmp_path / "run"
    shutil.copytree(straight, out)
    (out / "result.json").unlink()
    corpus = tmp_path / "corpus"
    shutil.copytree(corpus_folder, corpus)
    manifest = corpus / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"seed": 0', '"seed": 0 '))
    text = (out / "recipe.toml").read_text().replace(str(corpus_folder), str(corpus))
    (out / "recipe.toml").write_text(text)
    assert "was made with another corpus" in refused(command(None, None, out, "--resume"), capsys)
    (out / "recipe.toml").write_text((straight / "recipe.toml").read_text())
    for seal in out.glob("checkpoints/*/seal.json"):
        seal.unlink()
    assert "has no whole checkpoint" in refused(command(None, None, out, "--resume"), capsys)
    assert losses(out) == losses(straight)


def test_resume_refuses_other_settings_and_finished_runs(
    recipe: Path, corpus_folder: Path, straight: Path, killed: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    said = refused(command(None, None, straight, "--resume"), capsys)
    assert "is finished (20 steps); there is nothing to resume" in said
    out = tmp_path / "run"
    shutil.copytree(killed, out)
    words = command(recipe, corpus_folder, out, "--resume", "--set", "optimizer.learning_rate=1e-4")
    # as a command of its own: what the shell sees
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2
    assert "optimizer.learning_rate is 0.0001, but the run was started with 0.0005" in done.stderr
    assert "Traceback" not in done.stderr

"""Learning rate decays that branch off a long run at a checkpoint."""

import shutil
from pathlib import Path

import pytest
from helpers_runs import RECIPE, assert_same, run

import bertsmith
from bertsmith.errors import InputError
from bertsmith.toml import read_toml, to_toml
from bertsmith.training.branch import decay_steps
from bertsmith.training.pretraining import PretrainSettings

LONG = ["schedule={kind='wsd',warmup=0.1,decay=0.25}", "run.steps=20", "run.log_every=2", "run.evaluate_every=3"]
LONG += ["batch={tokens=1024,ramp_from=256,ramp=0.4}", "phases=[{begin=0.6,length=64},{begin=0.9,length=48}]"]
LONG += ["run.checkpoint_every=5", "run.keep=9"]


@pytest.fixture(scope="module")
def long(corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("long") / "run"
    run(corpus_folder, out, *LONG)
    return out


def test_run_keeps_checkpoints_to_branch_from(long: Path) -> None:
    names = {path.name for path in (long / "checkpoints").iterdir()}
    assert {f"step-{step:08d}" for step in (5, 10, 15, 20)} <= names


def test_branch_equals_uninterrupted_run(long: Path, corpus_folder: Path, tmp_path: Path) -> None:
    checkpoint = long / "checkpoints" / "step-00000010"
    branch = tmp_path / "branch"
    metrics = bertsmith.pretrain(branch=checkpoint, decay="4", out=branch, device="cpu")
    assert metrics["steps"] == 14
    recipe = read_toml(branch / "recipe.toml")
    assert recipe["schedule"]["decay"] == 4 / 14
    assert recipe["phases"] == [{"begin": 12 / 14, "length": 64}]
    assert recipe.pop("branch") == str(checkpoint)
    # the same recipe without the branch point is an uninterrupted run of fourteen steps
    uninterrupted = tmp_path / "uninterrupted.toml"
    uninterrupted.write_text(to_toml(recipe))
    bertsmith.pretrain(uninterrupted, out=tmp_path / "uninterrupted", device="cpu")
    assert_same(branch, tmp_path / "uninterrupted", after=10)
    # a branch is an ordinary run: its recipe reproduces it, and it can be resumed, even without its parent
    bertsmith.pretrain(branch / "recipe.toml", out=tmp_path / "again", device="cpu")
    assert_same(tmp_path / "again", branch)
    (branch / "result.json").unlink()
    for path in sorted((branch / "checkpoints").iterdir())[-1:]:
        shutil.rmtree(path)
    bertsmith.pretrain(out=branch, resume=True, device="cpu")
    assert_same(branch, tmp_path / "again")


def test_invalid_branch_raises(long: Path, corpus_folder: Path, tmp_path: Path) -> None:
    def assert_refused(message: str, **flags: object) -> None:
        with pytest.raises(InputError, match=message):
            bertsmith.pretrain(out=tmp_path / "new", device="cpu", **flags)
        assert not (tmp_path / "new").exists()

    at = {step: long / "checkpoints" / f"step-{step:08d}" for step in (5, 10, 20)}
    assert_refused("--branch and --decay must be given together", branch=at[10])
    assert_refused("--branch and --decay must be given together", recipe=RECIPE, decay="5")
    assert_refused("omit RECIPE", recipe=RECIPE, branch=at[10], decay="5")
    assert_refused("omit --budget", branch=at[10], decay="5", budget="10min")
    assert_refused("is not a checkpoint of a run", branch=tmp_path, decay="5")
    assert_refused("not in the constant part of the schedule; allowed: steps 2 to 15", branch=at[20], decay="5")
    assert_refused("the batch grows until step 8, and the branch ends at 6", branch=at[5], decay="1")
    assert_refused("--decay is 'soon'; allowed: steps, a share or tokens", branch=at[10], decay="soon")
    damaged = tmp_path / "copy"
    shutil.copytree(long, damaged)
    (damaged / "checkpoints" / "step-00000010" / "model.safetensors").write_bytes(b"")
    assert_refused("is not a complete checkpoint", branch=damaged / "checkpoints" / "step-00000010", decay="5")
    text = (damaged / "recipe.toml").read_text().replace('kind = "wsd"', 'kind = "linear"')
    (damaged / "recipe.toml").write_text(text)
    (damaged / "seal.json").unlink()
    assert_refused("schedule.kind is 'linear'", branch=damaged / "checkpoints" / "step-00000005", decay="5")


def test_decay_accepts_steps_shares_and_tokens() -> None:
    given = PretrainSettings.parse({"model": {"preset": "bert-tiny"}, "batch": {"tokens": 1000}})
    assert [decay_steps(given, text, 80) for text in ("500", "20%", "30k tokens")] == [500, 20, 30]

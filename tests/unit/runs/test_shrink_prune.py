"""`bertsmith shrink --method prune`: the written model has the recorded score, and interrupted runs are resumed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_finetune import tune, write_task

import bertsmith
from bertsmith.cli import main
from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.shrinking.pruned_units import KeptUnits, closed_gates, read_pruning_metadata
from bertsmith.toml import read_toml
from bertsmith.training.trainer import Trainer

LARGER = ["model.overrides={width=16,layers=2,heads=4,max_length=32,dropout=0.1}", "run.epochs=4"]
METHODS: dict[str, list[str]] = {
    "importance": [],
    "layer": ["prune.scope=layer", 'recovery.terms=[{kind="labels"}]'],
    "parameters": ["prune.counts=parameters", "prune.by=magnitude", "prune.step=1.0"],
    "between": ["prune.step=0.25", "recovery.between=1.0", "recovery.after=0.0"],
    "l0": ["prune.by=l0", "gates.epochs=3.0"],
    "l0 alone": ["prune.by=l0", "recovery.after=0.0"],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("data") / "reviews")


@pytest.fixture(scope="module")
def model(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model") / "model"
    tune(data, out, *LARGER)
    return out


def prune(model: Path | None, data: Path | None, out: Path, *changes: str, **more: Any) -> Any:
    settings = ["run.epochs=1.0", "run.log_every=1", "importance.examples=32", *changes]
    return bertsmith.shrink(model, data=data, out=out, method="prune", set=settings, device="cpu", **more)


def test_baselines_remove_other_heads_than_importance(model: Path, data: Path, tmp_path: Path) -> None:
    kept = {}
    for by in ("importance", "reversed"):
        prune(model, data, tmp_path / by, f"prune.by={by}", "prune.step=1.0", "recovery.after=0.0", keep=0.5)
        kept[by] = [set(heads) for heads in read_pruning_metadata(tmp_path / by).heads]
    whole = sum(map(len, kept["importance"]))
    assert sum(len(one & other) for one, other in zip(*kept.values(), strict=True)) < whole / 2


@pytest.mark.parametrize("method", METHODS)
def test_written_model_has_the_recorded_score(method: str, model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = prune(model, data, out, *METHODS[method], keep=0.5)
    assert json.loads((out / "result.json").read_text()) == result.to_json()
    again = bertsmith.evaluate(out, data=str(data), out=tmp_path / "again", device="cpu")
    assert again["score"] == result["score"]
    whole = bertsmith.evaluate(model, data=str(data), out=tmp_path / "whole", device="cpu")
    assert whole["score"] == result["teacher_score"]
    small, large = bertsmith.load(out), bertsmith.load(model)
    assert sum(parameter.numel() for parameter in small.parameters()) == result["parameters"]
    assert sum(parameter.numel() for parameter in large.parameters()) == result["parameters_before"]
    assert [layer.heads for layer in small.encoder.units] == result["heads"]
    assert [layer.neurons for layer in small.encoder.units] == result["neurons"]
    if method == "parameters":
        block = 8 * (2 * 16 + 1)
        assert 0 <= 0.5 * result["layer_parameters_before"] - result["layer_parameters"] < block
    else:
        assert sum(result["heads"]) == 4
        assert sum(result["neurons"]) == 64
    record = read_pruning_metadata(out)
    assert [len(own) for own in record.heads] == result["heads"]
    assert all(set(own) <= set(range(4)) and len(set(own)) == len(own) for own in record.heads)
    assert {path.name for path in out.iterdir()} >= {"config.json", "model.safetensors", "task.json", "recipe.toml"}
    assert not list(out.rglob("checkpoints")) + list(out.rglob("kept.json"))


def test_pruned_model_equals_model_with_closed_gates(model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = prune(model, data, out, "recovery.after=0.0", keep=0.4)
    assert len(result["cuts"]) == 6
    assert result["cut_score"] == result["score"] == result["cuts"][-1]["score"]
    record, whole, small = read_pruning_metadata(out), bertsmith.load(model), bertsmith.load(out)
    kept = KeptUnits(*(tuple(torch.tensor(own) for own in units) for units in (record.heads, record.neurons)))
    tokens, layout = torch.randint(5, 100, (3, 7)), SequenceLayout.full(3, 7)
    expected = whole.run(
        EncoderInputs(tokens, layout, gates=closed_gates(kept, whole.encoder.units)), Want(task=True)
    ).outputs
    torch.testing.assert_close(small.outputs(tokens, layout), expected, rtol=0, atol=1e-5)


def test_pruned_model_can_be_used_like_any_other(model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    main(["shrink", str(model), "--data", str(data), "--out", str(out), "--method", "prune", "--keep", "0.5"])
    assert read_toml(out / "recipe.toml")["prune"]["keep"] == 0.5
    tuned = bertsmith.finetune(out, data=data, set=["run.epochs=1"], out=tmp_path / "tuned", device="cpu")
    assert [layer.heads for layer in tuned.model.encoder.units] == json.loads((out / "result.json").read_text())[
        "heads"
    ]
    twice = prune(out, data, tmp_path / "twice", keep=0.5)
    assert sum(twice["neurons"]) == 32


class Killed(BaseException):
    """Stands for kill -9."""


# after the first cut, during gate training, and after it
@pytest.mark.parametrize(("method", "at"), [("between", 7), ("l0", 5), pytest.param("l0", 14, marks=pytest.mark.slow)])
def test_resumed_run_equals_uninterrupted_run(
    method: str, at: int, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = [*METHODS[method], "recovery.after=1.0"]
    straight = prune(model, data, tmp_path / "straight", *changes, keep=0.5)
    real, calls = Trainer._step, []

    def until(self: Trainer, *arguments: object) -> None:
        calls.append(self)
        if len(calls) == at:
            raise Killed
        real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", until)
        with pytest.raises(Killed):
            prune(model, data, tmp_path / "run", *changes, keep=0.5)
    resumed = bertsmith.shrink(out=tmp_path / "run", resume=True, device="cpu")
    assert {**resumed.to_json(), "seconds": 0} == {**straight.to_json(), "seconds": 0}
    for name in ("model.safetensors", "pruned.json", "config.json"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes(), name
    with pytest.raises(InputError, match="is finished; there is nothing to resume"):
        bertsmith.shrink(out=tmp_path / "run", resume=True, device="cpu")


@pytest.mark.slow
def test_same_seed_gives_the_same_model(model: Path, data: Path, tmp_path: Path) -> None:
    for name in ("one", "other"):
        prune(model, data, tmp_path / name, "prune.by=l0", keep=0.5, seed=3)
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "other"))
    assert one == other


@pytest.mark.parametrize(
    ("changes", "flags", "message"),
    [
        ([], {"keep": 1.5}, "prune.keep is 1.5"),
        (
            [],
            {"keep": 0.5, "widths": [1.0, 0.5]},
            "--widths is given with --method prune; allowed: with --method elast",
        ),
        (
            ["prune.by=weights"],
            {},
            "prune.by is 'weights': input should be 'importance', 'magnitude', 'l0', 'random' or 'reversed'",
        ),
        (["prune.counts=parameters"], {"keep": 0.01}, "prune.keep is 0.01 of the parameters; allowed: at least 0"),
        (["grid.sample=2"], {}, "grid is not a known setting"),
    ],
)
def test_invalid_settings_raise(
    changes: list[str], flags: dict[str, Any], message: str, model: Path, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as caught:
        prune(model, data, tmp_path / "run", *changes, **flags)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_unpruned_folder_raises(model: Path) -> None:
    with pytest.raises(
        InputError, match=r"has no pruned.json, so its model was not pruned; prune it with bertsmith shrink$"
    ):
        read_pruning_metadata(model)

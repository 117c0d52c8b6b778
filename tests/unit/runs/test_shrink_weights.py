"""`bertsmith shrink --method weights`: exact masks at every step, resumed runs, and masks in later training."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_finetune import tune, write_task

import bertsmith
from bertsmith.checkpoint.files import read_tensors
from bertsmith.checkpoint.masks import MASKS_FILE
from bertsmith.checkpoint.source import ModelSource
from bertsmith.cli import main
from bertsmith.errors import InputError
from bertsmith.models.masks import has_masks, kept_count, masked_weights, masks_of
from bertsmith.models.model import Model
from bertsmith.shrinking.weights import CubicSchedule
from bertsmith.training.starting_model import pretraining_model
from bertsmith.training.step import TrainStep
from bertsmith.training.trainer import Trainer

LARGER = ["model.overrides={width=16,layers=2,heads=4,max_length=32,dropout=0.1}", "run.epochs=4"]
GRADUAL = ["weights.every=2", "weights.epochs=2.0", "optimizer.weight_decay=0.1"]
METHODS: dict[str, list[str]] = {
    "gradual": GRADUAL,
    "one shot": ["weights.schedule=one_shot"],
    "global with the table": ["weights.scope=global", "weights.token_table=true", 'recovery.terms=[{kind="labels"}]'],
    "2:4": ["weights.schedule=one_shot", "weights.pattern='2:4'", "recovery.after=0.0"],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("data") / "reviews")


@pytest.fixture(scope="module")
def model(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model") / "model"
    tune(data, out, *LARGER)
    return out


@pytest.fixture(scope="module")
def pruned(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pruned") / "pruned"
    prune(model, data, out, "weights.schedule=one_shot", sparsity=0.5)
    return out


def prune(model: Path | None, data: Path | None, out: Path, *changes: str, **more: Any) -> Any:
    settings = ["run.epochs=1.0", "run.log_every=1", *changes]
    return bertsmith.shrink(model, data=data, out=out, method="weights", set=settings, device="cpu", **more)


def matrices(model: Model) -> list[Any]:
    return [matrix for masked in masked_weights(model) for matrix in masked.matrices]


@pytest.mark.parametrize("method", METHODS)
def test_written_model_has_the_recorded_score_and_masks(method: str, model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = prune(model, data, out, *METHODS[method], sparsity=0.5)
    assert json.loads((out / "result.json").read_text()) == result.to_json()
    again = bertsmith.evaluate(out, data=str(data), out=tmp_path / "again", device="cpu")
    assert again["score"] == result["score"]
    whole = bertsmith.evaluate(model, data=str(data), out=tmp_path / "whole", device="cpu")
    assert whole["score"] == result["teacher_score"]
    masked = matrices(bertsmith.load(out, keep_masks=True))
    assert [(one.name, one.kept) for one in masked] == [(one["name"], one["kept"]) for one in result["matrices"]]
    weights, kept = (sum(one[name] for one in result["matrices"]) for name in ("weights", "kept"))
    assert kept == kept_count(weights, 0.5)
    assert result["sparsity"] == 1 - kept / weights
    dense = bertsmith.load(out)
    assert not has_masks(dense)
    zeros = sum(int((parameter == 0).sum()) for name, parameter in dense.named_parameters() if parameter.dim() > 1)
    assert zeros == weights - kept
    assert result["dense_bytes"] == 4 * weights
    assert result["bitmask_bytes"] == 4 * kept + sum(-(-one["weights"] // 8) for one in result["matrices"])
    assert "not faster" in result["note"]
    assert not list(out.rglob("checkpoints")) + list(out.glob("*/model"))


@pytest.mark.parametrize(("begin", "end", "steps", "every"), [(0.0, 0.9, 100, 10), (0.3, 0.5, 7, 2), (0.0, 0.4, 3, 10)])
def test_schedule_rises_from_its_begin_to_its_end(begin: float, end: float, steps: int, every: int) -> None:
    schedule = CubicSchedule(begin, end, steps, every)
    values = [schedule.sparsity(step) for step in range(0, steps, every)]
    assert len(values) == schedule.updates
    assert values[-1] == end
    assert values[0] == (begin if len(values) > 1 else end)
    assert all(later > earlier for earlier, later in pairwise(values))
    if len(values) > 2:
        assert math.isclose(values[1], end + (begin - end) * (1 - 1 / (len(values) - 1)) ** 3)


def test_counts_are_exact_at_every_step_and_pruned_weights_stay_0(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[list[Any], dict[str, torch.Tensor]]] = []
    learn = TrainStep.learn

    def watch(self: TrainStep, *arguments: Any) -> None:
        learn(self, *arguments)
        for masked in self.masked_weights:
            assert not masked.weight[~masked.mask].any()
            assert masked.weight[masked.mask].all()
        counts = [(one.kept, one.mask.numel()) for one in matrices(self.model)]
        steps.append((counts, {name: mask.clone() for name, mask in masks_of(self.model).items()}))

    monkeypatch.setattr(TrainStep, "learn", watch)
    prune(model, data, tmp_path / "run", *GRADUAL, sparsity=0.8)
    schedule = CubicSchedule(0.0, 0.8, 8, 2)
    assert len(steps) == 8 + 4
    for step, (counts, _) in enumerate(steps):
        sparsity = schedule.sparsity(step) if step < 8 else 0.8
        assert all(kept == kept_count(total, sparsity) for kept, total in counts)
    for (_, earlier), (_, later) in pairwise(steps):
        assert not any((later[name] & ~earlier[name]).any() for name in later)
    assert any(not torch.equal(mask, steps[-1][1][name]) for name, mask in steps[0][1].items())


class Killed(BaseException):
    """Stands for kill -9."""


# during the pruning, and during the training with fixed masks
@pytest.mark.parametrize("at", [7, pytest.param(11, marks=pytest.mark.slow)])
def test_resumed_run_equals_uninterrupted_run(
    at: int, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = [*GRADUAL, "run.evaluations=2"]
    straight = prune(model, data, tmp_path / "straight", *changes, sparsity=0.7)
    real, calls = Trainer._step, []

    def until(self: Trainer, *arguments: object) -> None:
        calls.append(self)
        if len(calls) == at:
            raise Killed
        real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", until)
        with pytest.raises(Killed):
            prune(model, data, tmp_path / "resumed", *changes, sparsity=0.7)
    resumed = bertsmith.shrink(out=tmp_path / "resumed", resume=True, device="cpu")
    for name in ("model.safetensors", MASKS_FILE):
        assert (tmp_path / "resumed" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()
    assert resumed["score"] == straight["score"]
    assert resumed["pruned_score"] == straight["pruned_score"]


def test_later_fine_tuning_keeps_masks(pruned: Path, data: Path, tmp_path: Path) -> None:
    changes = ["run.epochs=1", "optimizer.weight_decay=0.1"]
    before = masks_of(bertsmith.load(pruned, keep_masks=True))
    tuned = bertsmith.finetune(pruned, data=data, set=changes, out=tmp_path / "tuned", device="cpu")
    after = masks_of(bertsmith.load(tmp_path / "tuned", keep_masks=True))
    assert after.keys() == before.keys()
    assert all(torch.equal(mask, before[name]) for name, mask in after.items())
    files = [read_tensors(folder / "model.safetensors") for folder in (pruned, tmp_path / "tuned")]
    assert all(torch.equal(files[1][name] != 0, mask) for name, mask in before.items())
    assert any(not torch.equal(files[0][name], files[1][name]) for name in before)
    assert has_masks(tuned.model)
    free = [*changes, "model.keep_masks=false"]
    bertsmith.finetune(pruned, data=data, set=free, out=tmp_path / "free", device="cpu")
    assert not (tmp_path / "free" / MASKS_FILE).exists()
    grown = read_tensors(tmp_path / "free" / "model.safetensors")
    assert all(grown[name][~mask].any() for name, mask in before.items())


def test_sub_network_of_a_pruned_model_keeps_its_masks(pruned: Path, data: Path, tmp_path: Path) -> None:
    changes = ["run.epochs=1", "model.subnet.width=0.5", "model.subnet.depth=0.5"]
    bertsmith.finetune(pruned, data=data, set=changes, out=tmp_path / "half", device="cpu")
    half = bertsmith.load(tmp_path / "half", keep_masks=True)
    assert len(half.encoder.units) == 1
    assert half.encoder.units[0].heads == 2
    for masked in masked_weights(half):
        assert torch.equal(masked.weight != 0, masked.mask)


def test_pruning_again_adds_to_the_masks(pruned: Path, data: Path, tmp_path: Path) -> None:
    result = prune(pruned, data, tmp_path / "more", *GRADUAL, sparsity=0.75)
    assert all(one["kept"] == kept_count(one["weights"], 0.75) for one in result["matrices"])
    before, after = (masks_of(bertsmith.load(folder, keep_masks=True)) for folder in (pruned, tmp_path / "more"))
    assert not any((mask & ~before[name]).any() for name, mask in after.items())
    with pytest.raises(InputError, match=r"weights.sparsity is 0.25, but 0.5 of the weights are pruned already"):
        prune(pruned, data, tmp_path / "less", sparsity=0.25)
    assert not (tmp_path / "less").exists()


@pytest.mark.parametrize("method", ["elastic", "prune", "vocabulary"])
def test_other_methods_refuse_masks(method: str, pruned: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"--method {method} does not keep at 0; set model.keep_masks=false"):
        bertsmith.shrink(pruned, data=data, out=tmp_path / "run", method=method, device="cpu")
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_quantisation_aware_training_refuses_masks(pruned: Path, data: Path, tmp_path: Path) -> None:
    changes = ["quantisation.weight_bits=8", "run.epochs=1"]
    with pytest.raises(InputError, match="quantisation-aware training does not keep at 0"):
        bertsmith.finetune(pruned, data=data, set=changes, out=tmp_path / "run", device="cpu")
    changes.append("model.keep_masks=false")
    quantised = bertsmith.finetune(pruned, data=data, set=changes, out=tmp_path / "quantised", device="cpu").model
    assert quantised.config.quantisation is not None
    with pytest.raises(InputError, match="the model is quantised; prune its weights first"):
        prune(tmp_path / "quantised", data, tmp_path / "again")


def test_early_exits_keep_masks(pruned: Path, data: Path, tmp_path: Path) -> None:
    changes = ["encoder=joint", "run.epochs=1.0"]
    bertsmith.shrink(pruned, data=data, out=tmp_path / "run", method="exits", set=changes, device="cpu")
    before, after = (masks_of(bertsmith.load(folder, keep_masks=True)) for folder in (pruned, tmp_path / "run"))
    assert all(torch.equal(mask, before[name]) for name, mask in after.items())
    assert after.keys() == before.keys()
    dense = read_tensors(tmp_path / "run" / "model.safetensors")
    assert not any(dense[name][~mask].any() for name, mask in after.items())


def test_continued_pretraining_refuses_masks(pruned: Path) -> None:
    source = ModelSource(folder=str(pruned))
    with pytest.raises(InputError, match=r"pre-training does not keep at 0; set model\.keep_masks=false"):
        pretraining_model(source, None, ("masked_tokens",), 0, None, seed=0)
    free, _ = pretraining_model(source.changed(keep_masks=False), None, ("masked_tokens",), 0, None, seed=0)
    assert not has_masks(free)


def test_exported_model_has_the_zeros(pruned: Path, tmp_path: Path) -> None:
    main(["export", str(pruned), "--to", "hf", "--out", str(tmp_path / "hf")])
    exported = read_tensors(tmp_path / "hf" / "model.safetensors")
    matrices_with_zeros = [name for name, tensor in exported.items() if tensor.dim() == 2 and (tensor == 0).any()]
    assert len(matrices_with_zeros) == 2 * 6  # query, key, value, output and two of the feed-forward in every layer
    assert all(int((exported[name] == 0).sum()) == exported[name].numel() // 2 for name in matrices_with_zeros)


def test_command_explains_and_prints_the_storage(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["shrink", str(model), "--data", str(data), "--out", str(tmp_path / "run"), "--method", "weights"]
    command += ["--sparsity", "0.9", "--epochs", "1"]
    main([*command, "--explain"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "90% of them pruned" in printed
    assert "the model is not faster" in printed
    main(command)
    printed = capsys.readouterr().out
    assert "bit mask and values" in printed
    assert "the model is not faster" in printed


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["weights.pattern='2:4'"], r"pattern is '2:4' and schedule is 'gradual'; allowed: 'one_shot'"),
        (["weights.pattern='2:4'", "weights.sparsity=0.7"], r"pattern is '2:4' and sparsity is 0.7; allowed: 0.5"),
        (["weights.sparsity=1.0"], r"weights.sparsity"),
    ],
)
def test_impossible_settings_are_refused(
    settings: list[str], message: str, model: Path, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        prune(model, data, tmp_path / "run", *settings)

"""`bertsmith shrink` with the elastic method: settings, selection, invalid input."""

import json
import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from helpers_finetune import ROWS, write_task

import bertsmith
from bertsmith import Subnet
from bertsmith.checkpoint.files import read_tensors
from bertsmith.errors import InputError
from bertsmith.models.attach_heads import with_task_head
from bertsmith.models.heads.base import FeaturesConfig
from bertsmith.runs.output import MARK
from bertsmith.shrinking import elastic
from bertsmith.shrinking.elastic_metadata import read_elastic_metadata
from bertsmith.tasks.predictor import TaskRecord, write_task_record
from bertsmith.text.learn import learn_tokenizer
from bertsmith.toml import read_toml

SMALL = ["grid.widths=[1.0, 0.5]", "grid.depths=[1.0, 0.5]", "batch.examples=16", "run.epochs=1", "run.log_every=1"]
SMALL += ["importance.examples=16", "optimizer.learning_rate=1e-3"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Write a model in the format of a fine-tuned one, and the data of its task."""
    folder = tmp_path_factory.mktemp("shrink")
    data = write_task(folder / "data")
    tokenizer = learn_tokenizer([text for text, _ in ROWS], "wordpiece", 120, progress=False)
    sizes = {"width": 16, "heads": 2, "layers": 2, "max_length": 32, "init_std": 0.3}
    model = bertsmith.build(bertsmith.preset("bert-tiny", vocabulary=tokenizer.size, **sizes), seed=0)
    model.tokenizer = tokenizer
    bertsmith.save(model, folder / "untuned")
    record = TaskRecord.parse(
        {"task": {"kind": "classification", "labels": ["bad", "good"]}, "sequences": {"length": 16}}
    )
    bertsmith.save(with_task_head(model, record.task.head(model.config), seed=0), folder / "model")
    write_task_record(record, folder / "model")
    return folder / "model", data


def shrink(folders: tuple[Path, Path], out: Path, *changes: str, **more: Any) -> Any:
    model, data = folders
    given = {"data": str(data), "set": [*SMALL, *changes], "device": "cpu", **more}
    return bertsmith.shrink(model, out=out, **given)


def rows(stage: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (stage / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def test_best_mean_score_over_the_grid_is_kept(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """The learning rate makes evaluations differ; the one with the highest mean score is kept."""
    result = shrink(folders, tmp_path / "out", "run.evaluations=4", "run.epochs=2", "optimizer.learning_rate=3e-2")
    evaluated = rows(tmp_path / "out" / "depth", "held_out")
    names = ["width 0.5 depth 0.5", "width 1 depth 0.5", "width 0.5 depth 1", "width 1 depth 1"]
    for row in evaluated:
        assert row["score"] == pytest.approx(fmean(row[name] for name in names))
    best = max(evaluated, key=lambda row: (row["score"], -row["loss"]))
    assert len({row["score"] for row in evaluated}) > 1
    assert result["score"] == pytest.approx(best["score"])
    assert [member["score"] for member in result["grid"]] == [best[name] for name in names]


def test_metadata_is_complete(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Units are sorted by score, and costs fall with the size of the cut."""
    out = tmp_path / "out"
    shrink(folders, out, "run.epochs=0.1")
    record = read_elastic_metadata(out)
    for scores, order in zip(record.head_scores, record.head_order, strict=True):
        assert sorted(order) == list(range(2))
        assert scores[order[0]] >= scores[order[1]] > 0
    for order in record.neuron_order:
        assert sorted(order) == list(range(64))
    smallest, *_, largest = record.grid
    assert smallest.parameters < largest.parameters
    assert smallest.flops < largest.flops
    for member, subnet in zip(record.grid, record.subnets, strict=True):
        small = bertsmith.load(out, subnet=subnet)
        assert member.parameters == sum(p.numel() for p in small.parameters())


@pytest.mark.parametrize("order", ["random", "reversed", "none"])
def test_other_orders_of_units(order: str, folders: tuple[Path, Path], tmp_path: Path) -> None:
    shrink(folders, tmp_path / "out", f"order={order}", "run.epochs=0.1", "stages=['width']")
    record = read_elastic_metadata(tmp_path / "out")
    for scores, found in zip(record.head_scores, record.head_order, strict=True):
        if order == "reversed":
            assert scores[found[0]] <= scores[found[1]]
        if order == "none":
            assert list(found) == [0, 1]
    assert (record.neuron_order[0] == tuple(range(64))) == (order == "none")


def test_width_stage_only(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Only trained sub-networks are in the metadata."""
    result = shrink(folders, tmp_path / "out", "stages=['width']")
    assert [(member["width"], member["depth"]) for member in result["grid"]] == [(0.5, 1.0), (1.0, 1.0)]
    assert not (tmp_path / "out" / "depth").exists()


@pytest.mark.parametrize(
    "changes", [pytest.param(["grid.sample=1"], marks=pytest.mark.slow), ["grid.sample=1", "grid.per_layer=true"]]
)
def test_sample_of_the_grid(changes: list[str], folders: tuple[Path, Path], tmp_path: Path) -> None:
    """The whole grid is evaluated, and the sampling is deterministic."""
    changes = [*changes, "grid.widths=[1.0, 0.5]", "grid.depths=[1.0, 0.5]"]
    result = shrink(folders, tmp_path / "a", *changes)
    shrink(folders, tmp_path / "b", *changes)
    assert len(result["grid"]) == 4
    first, second = (read_tensors(tmp_path / name / "model.safetensors") for name in "ab")
    assert all((weight == second[name]).all() for name, weight in first.items())


@pytest.mark.parametrize("is_better", [True, False])
def test_label_stage_is_kept_only_if_better(
    is_better: bool, folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The final weights are the better model's."""
    seen: list[dict[str, Any]] = []

    def mean_score(settings: Any, context: Any, model: Any) -> float:
        seen.append(model.state_dict())
        return float(len(seen) == (1 if is_better else 2))  # the trained model is scored first

    monkeypatch.setattr(elastic, "mean_score", mean_score)
    shrink(folders, tmp_path / "out", "stages=['width', 'depth', 'labels']", "labels.epochs=0.5")
    weights = read_tensors(tmp_path / "out" / "model.safetensors")
    expected, other = seen
    if not is_better:
        expected, other = other, expected
    assert all((weight == expected[name].cpu()).all() for name, weight in weights.items())
    assert any((weight != other[name].cpu()).any() for name, weight in weights.items())
    assert len(rows(tmp_path / "out" / "labels", "training")) == 2


def test_settings_override_those_of_the_model(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """A given setting leaves the others of its table unchanged."""
    model, data = tmp_path / "model", tmp_path / "data"
    shutil.copytree(folders[0], model)
    (model / "seal.json").unlink()
    task = json.loads((model / "task.json").read_text())
    task["sequences"] |= {"layout": "padded", "length": 16}
    (model / "task.json").write_text(json.dumps(task))
    data.mkdir()
    for part, some in (("train", ROWS[::2]), ("dev", ROWS[1::8])):
        lines = [json.dumps({"words": text, "label": label}) + "\n" for text, label in some]
        (data / f"{part}.jsonl").write_text("".join(lines))
    changes = ["sequences.length=12", "run.epochs=0.1", "stages=['width']"]
    shrink((model, data), tmp_path / "out", *changes, column=["text=words"])
    record = json.loads((tmp_path / "out" / "task.json").read_text())
    assert (record["sequences"]["length"], record["sequences"]["layout"]) == (12, "padded")
    assert record["task"]["labels"] == ["bad", "good"]
    recipe = tmp_path / "recipe.toml"
    shutil.copy(tmp_path / "out" / "recipe.toml", recipe)
    bertsmith.shrink(recipe=recipe, out=tmp_path / "again", device="cpu", column=["text=words"])
    for name in ("model.safetensors", "task.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_rate_and_batch_default_to_the_fine_tuning(folders: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(folders[0], tmp_path / "model")
    (tmp_path / "model" / "recipe.toml").write_text("[optimizer]\nlearning_rate = 3e-4\n[batch]\nexamples = 7\n")
    given = {"data": str(folders[1]), "out": tmp_path / "out", "explain": True}
    facts = bertsmith.shrink(tmp_path / "model", **given, set=["depth.epochs=1"])
    assert not (tmp_path / "out").exists()
    assert facts["stage width"] == "4 sub-networks per step (cost of 2.50 whole models), 30 steps"
    assert facts["stage depth"] == "12 sub-networks per step (cost of 5.62 whole models), 10 steps"


REFUSED: dict[str, tuple[list[str], dict[str, Any], str]] = {
    "widths without 1": (["grid.widths=[0.5, 0.25]"], {}, r"grid: widths is \[0.5, 0.25\]; allowed: distinct values"),
    "stages out of order": (["stages=['depth', 'width']"], {}, r"stages is \['depth', 'width'\]; allowed: width; "),
    "an unknown stage": (["stages=['heights']"], {}, "stages"),
    "no stage": (["stages=[]"], {}, r"stages is \[\]; allowed"),
    "a term that is none": (["width.terms=[{kind='wisdom'}]"], {}, "wisdom"),
    "no terms": (["depth.terms=[]"], {}, "terms"),
    "another kind of task": (["task.kind=regression"], {}, "task.kind is 'regression', but the model was"),
    "other labels than the model's": (
        ["task.labels=['no', 'yes']"],
        {},
        r"task.labels is \['no', 'yes'\], but the mod",
    ),
    "an unknown setting": (["grid.width=[1.0]"], {}, "grid.width"),
    "no data": ([], {"data": None}, "data is not given"),
    "another method": ([], {"method": "elastics"}, "--method is 'elastics'"),
    "per_layer without a sample": (["grid.per_layer=true"], {}, "per_layer is true, but sample is None"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_settings_raise(name: str, folders: tuple[Path, Path], tmp_path: Path) -> None:
    changes, more, match = REFUSED[name]
    with pytest.raises(InputError, match=match) as caught:
        shrink(folders, tmp_path / "out", *changes, **more)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_invalid_folders_raise(folders: tuple[Path, Path], tmp_path: Path) -> None:
    model, data = folders
    untuned, nowhere, other = model.parent / "untuned", tmp_path / "nowhere", tmp_path / "other"
    other.mkdir()
    (other / "dev.jsonl").write_text((data / "dev.jsonl").read_text())
    cases = [
        ((untuned, data), "has no task.json, so its model was not fine-tuned; use bertsmith finetune"),
        ((nowhere, data), "which is not a folder; give the folder of a fine-tuned model"),
        ((model, nowhere), "nowhere"),
        ((model, other), "train"),
    ]
    for given, match in cases:
        with pytest.raises(InputError, match=match):
            shrink(given, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    (other / "train.jsonl").write_text('{"text": "the fine day", "label": "excellent"}\n')
    with pytest.raises(InputError, match="excellent"):
        shrink((model, other), tmp_path / "out")
    for out in (model, data, model.parent):
        with pytest.raises(InputError, match=r"lie inside each other"):
            shrink(folders, out, force=True)
    made = tmp_path / "made"
    shutil.copytree(model, made)
    (made / MARK).touch()  # as in every folder that a command creates
    inside = made / "elastic"
    with pytest.raises(InputError, match="lie inside each other"):
        shrink((made, data), inside)
    assert not inside.exists()


@pytest.mark.parametrize(
    ("layers", "match"), [(2, "reads 2 layers, but the smallest of grid.depths keeps 1"), (0, "reads 0 layers")]
)
def test_head_that_reads_removed_layers_raises(
    layers: int, match: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """The error is raised immediately, not after the width stage, which could be trained."""
    model, data = bertsmith.load(folders[0]), folders[1]
    record = TaskRecord.parse(json.loads((folders[0] / "task.json").read_text()))
    head = record.task.head(model.config).changed(features=FeaturesConfig(layers=layers))
    bertsmith.save(with_task_head(model, head, seed=0), tmp_path / "model")
    write_task_record(record, tmp_path / "model")
    with pytest.raises(InputError, match=match):
        shrink((tmp_path / "model", data), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    if layers:
        shrink((tmp_path / "model", data), tmp_path / "out", "stages=['width']", "run.epochs=0.1")


def test_missing_or_invalid_metadata_raises(folders: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"has no elastic.json, so its model is not elastic; make it so with bertsmith shrink"
    ):
        read_elastic_metadata(folders[0])
    (tmp_path / "elastic.json").write_text('{"metric": "accuracy"}')
    with pytest.raises(InputError, match=r"elastic\.json"):
        read_elastic_metadata(tmp_path)


def test_random_features_do_not_change(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Teacher and student use the same random features, and the resulting model never redraws them."""
    record = TaskRecord.parse(json.loads((folders[0] / "task.json").read_text()))
    tokenizer = bertsmith.load(folders[0]).tokenizer
    assert tokenizer is not None
    sizes = {"width": 16, "heads": 2, "layers": 2, "max_length": 32, "features": 16, "init_std": 0.3}
    config = bertsmith.preset("performer-small", vocabulary=tokenizer.size, **sizes)
    model = bertsmith.build(config, seed=0)
    model.tokenizer = tokenizer
    model = with_task_head(model, record.task.head(model.config), seed=0)
    bertsmith.save(model, tmp_path / "model")
    write_task_record(record, tmp_path / "model")
    shrink((tmp_path / "model", folders[1]), tmp_path / "out", "stages=['width']", "run.choose=last")
    found = bertsmith.load(tmp_path / "out", subnet=Subnet())
    before = read_tensors(tmp_path / "model" / "model.safetensors")
    projections = {name: value for name, value in found.state_dict().items() if name.endswith("projection")}
    assert projections
    for name, value in projections.items():
        assert value.shape == before[name].shape
        assert (value.sort(0).values - before[name].sort(0).values).abs().max() == 0


def test_preset_raises(folders: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="preset has fresh weights; give folder with a fine-tuned model"):
        bertsmith.shrink("bert-tiny", data=str(folders[1]), out=tmp_path / "out")
    with pytest.raises(InputError, match="preset has fresh weights; give folder with a fine-tuned model"):
        bertsmith.fit("bert-tiny", data=str(folders[1]), out=tmp_path / "out", latency_ms=3)
    assert not (tmp_path / "out").exists()


def test_recipe_may_name_a_subnet(folders: tuple[Path, Path], tmp_path: Path) -> None:
    recipe, out = tmp_path / "recipe.toml", tmp_path / "out"
    recipe.write_text(f"model = {{ folder = '{folders[0]}', subnet = {{ layers = [1] }} }}\n", encoding="utf-8")
    changes = [*SMALL[2:], "run.epochs=0.1", "stages=['width']"]
    bertsmith.shrink(recipe=recipe, data=str(folders[1]), widths=[1.0, 0.5], out=out, set=changes, device="cpu")
    assert len(bertsmith.load(out).config.encoder.layers) == 1
    model = read_toml(out / "recipe.toml")["model"]
    assert (model["folder"], model["subnet"]["layers"]) == (str(folders[0]), [1])

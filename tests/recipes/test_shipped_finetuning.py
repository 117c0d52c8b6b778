"""Every shipped fine-tuning recipe parses, builds and takes two steps."""

import json
from pathlib import Path

import pytest
from helpers_finetuning import write_task

import bertsmith
from bertsmith.cli import main
from bertsmith.recipes import RECIPE_FILES
from bertsmith.toml import read_toml
from tables import finetuning_tables

ROOT = Path(__file__).parents[2]
RECIPES = sorted((RECIPE_FILES / "finetune").glob("*.toml"))
NETWORK = [
    "model.overrides={width=32,layers=4,heads=2,max_length=32}",
    "tokenizer.vocabulary=300",
    "sequences.length=16",
]


def write_data(folder: Path, recipe: Path, **rows: int) -> Path:
    """Write data of classification, or texts with vectors for a recipe that learns vectors."""
    data = write_task(folder, **rows)
    if read_toml(recipe).get("task", {}).get("loss") == "vector":
        for file in data.glob("*.jsonl"):
            texts = [json.loads(line)["text"] for line in file.read_text().splitlines()]
            file.write_text("".join(json.dumps({"text": text, "vector": [len(text), 1]}) + "\n" for text in texts))
    return data


def test_there_are_recipes() -> None:
    assert len(RECIPES) >= 3


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_takes_two_steps(path: Path, tmp_path: Path) -> None:
    data = write_data(tmp_path / "reviews", path, train=60)  # enough of both labels
    changes = [*NETWORK, "run.epochs=1", "batch.examples=32"]
    out = tmp_path / "run"
    metrics = bertsmith.finetune("bert-tiny", recipe=path, data=data, out=out, set=changes, device="cpu")
    assert metrics["steps"] == 2
    recorded, shipped = read_toml(out / "recipe.toml"), read_toml(path)
    here = {change.partition("=")[0] for change in changes}
    for group, settings in shipped.items():
        for name, value in settings.items():
            if f"{group}.{name}" not in here:
                own = recorded[group][name]
                assert own == value or own.items() >= value.items(), (group, name)
    # the recipe beside the result reproduces the run
    again = bertsmith.finetune(recipe=out / "recipe.toml", out=tmp_path / "again", device="cpu")
    assert again["training_loss"] == metrics["training_loss"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_explain_prints_the_costs(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    data = write_data(tmp_path / "reviews", path)
    flags = [word for change in NETWORK for word in ("--set", change)]
    main(["finetune", "bert-tiny", "--recipe", str(path), "--data", str(data), "--explain", *flags])
    printed = capsys.readouterr().out
    for text in ("defaults from", "steps", "training FLOPs in all"):
        assert text in printed


def test_documented_defaults_equal_the_tables() -> None:
    # python docs/hooks/tables.py finetuning
    assert finetuning_tables() in (ROOT / "docs" / "how-to" / "finetuning.md").read_text(encoding="utf-8")

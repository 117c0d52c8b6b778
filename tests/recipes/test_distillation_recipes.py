"""Every shipped distillation recipe takes two steps with a tiny teacher and has the paper's values."""

from pathlib import Path

import pytest
from choosing import slow_unless
from helpers_finetuning import write_task

import bertsmith
from bertsmith.recipes import RECIPE_FILES
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.toml import read_toml
from bertsmith.training.pretraining import PretrainSettings

FOLDER = RECIPE_FILES / "distillation"
RECIPES = {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}
GENERAL = [name for name, path in RECIPES.items() if "objective" in read_toml(path)]
TASK = [name for name in RECIPES if name not in GENERAL]
SMALL = ["sequences.length=32", "sequences.micro_tokens=256", "batch.tokens=512", "run.steps=2", "run.workers=0"]
SMALL += ["run.evaluate_batches=1", "run.log_every=1"]
NETWORK = {"width": 24, "layers": 12, "heads": 4, "max_length": 64}


def terms(name: str) -> dict[str, dict]:
    return {term["kind"]: term for term in read_toml(RECIPES[name])["distillation"]["terms"]}


def test_recipes_have_the_papers_values() -> None:
    assert set(GENERAL) == {"distilbert", "tinybert-general", "minilm"}
    weights = {kind: term["weight"] for kind, term in terms("distilbert").items()}
    assert weights == {"outputs": 5.0, "labels": 2.0, "cosine": 1.0}
    assert terms("distilbert")["outputs"]["temperature"] == 2.0
    patience = terms("bert-pkd")
    assert (patience["outputs"]["temperature"], patience["patience"]["weight"]) == (10.0, 100.0)
    assert patience["labels"]["weight"] + patience["outputs"]["weight"] == 1.0
    assert set(terms("tinybert-general")) == set(terms("tinybert-intermediate")) == {"attention", "hidden_states"}
    assert terms("tinybert-prediction") == {"outputs": {"kind": "outputs", "temperature": 1.0}}
    assert terms("minilm")["relations"]["relation_heads"] == 48
    first, second = (read_toml(RECIPES[f"tinybert-{stage}"]) for stage in ("intermediate", "prediction"))
    assert (first["optimizer"]["learning_rate"], first["schedule"]["kind"]) == (5e-5, "constant")
    assert (second["optimizer"]["learning_rate"], second["run"]["epochs"]) == (3e-5, 3.0)


@pytest.fixture(scope="module")
def general(corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pre-trained teacher of 12 layers."""
    tokenizer = Tokenizer.load(corpus_folder)
    model = bertsmith.build(bertsmith.preset("bert-tiny", vocabulary=tokenizer.size, **NETWORK), seed=0)
    model.tokenizer = tokenizer
    out = tmp_path_factory.mktemp("general") / "teacher"
    bertsmith.save(model, out)
    return out


@pytest.mark.parametrize("name", slow_unless(("tinybert-general",), GENERAL))
def test_general_stage_takes_two_steps(name: str, general: Path, corpus_folder: Path, tmp_path: Path) -> None:
    PretrainSettings.parse(read_toml(RECIPES[name]))
    changes = [*SMALL, f"distillation.teacher={general}"]
    if name == "distilbert":
        changes.append(f"model.folder={general}")
    else:
        changes += ["model.preset=bert-tiny", "model.overrides={layers=4,width=16,heads=4,max_length=64}"]
    changes += ['distillation.terms=[{kind="relations",relation_heads=8}]'] if name == "minilm" else []
    metrics = bertsmith.pretrain(RECIPES[name], data=corpus_folder, out=tmp_path / "run", set=changes, device="cpu")
    model = bertsmith.load(tmp_path / "run")
    assert metrics["steps"] == 2
    assert len(model.encoder.blocks) == (6 if name == "distilbert" else 4)
    assert [head.kind for head in model.config.heads] == ["masked_tokens"]
    assert metrics["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    # the recipe beside the result reproduces the run
    again = bertsmith.pretrain(tmp_path / "run" / "recipe.toml", out=tmp_path / "again", device="cpu")
    assert again["training_loss"] == metrics["training_loss"]


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A task and a teacher that was fine-tuned for it."""
    home = tmp_path_factory.mktemp("reviews")
    data = write_task(home / "data", train=64)
    changes = ["model.overrides={width=32,layers=12,heads=4,max_length=32,dropout=0.0}", "sequences.length=16"]
    changes += ["tokenizer.vocabulary=300", "run.epochs=5", "batch.examples=8", "optimizer.learning_rate=2e-3"]
    bertsmith.finetune("bert-tiny", data=data, out=home / "teacher", set=changes, device="cpu")
    return data, home / "teacher"


@pytest.mark.parametrize("name", slow_unless(("tinybert-prediction",), TASK))
def test_task_stage_takes_two_steps(name: str, reviews: tuple[Path, Path], tmp_path: Path) -> None:
    data, teacher = reviews
    changes = ["sequences.length=16", "run.epochs=1"]
    student: str | Path = teacher if name == "bert-pkd" else "bert-tiny"
    if student != teacher:
        changes.append("model.overrides={width=16,layers=4,heads=4,max_length=32}")
    options = {"recipe": RECIPES[name], "data": data, "teacher": teacher, "set": changes, "device": "cpu"}
    metrics = bertsmith.finetune(student, out=tmp_path / "run", **options)
    assert metrics["steps"] == 2
    assert len(bertsmith.load(tmp_path / "run").encoder.blocks) == (6 if name == "bert-pkd" else 4)
    recorded = read_toml(tmp_path / "run" / "recipe.toml")
    assert {term["kind"] for term in recorded["distillation"]["terms"]} == set(terms(name))
    assert recorded["optimizer"]["learning_rate"] == read_toml(RECIPES[name])["optimizer"]["learning_rate"]

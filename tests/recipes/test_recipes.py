"""Every shipped recipe parses, builds and takes two steps; command line equals Python; documented commands parse."""

import json
import re
import shlex
from pathlib import Path

import pytest
from task_cases import TASK_CASES

import bertsmith
from bertsmith.cli import app, main
from bertsmith.recipes import FILES, RECIPE_FILES, read_recipe
from bertsmith.toml import override, read_toml
from bertsmith.training.finetuning import TranslationSettings
from bertsmith.training.pretraining import PretrainSettings

ROOT = Path(__file__).parents[2]
ALL = sorted((RECIPE_FILES).rglob("*.toml"))
RECIPES = [
    path for path in ALL if path.parent.name not in ("finetune", "distillation")
]  # these have tests of their own
PARSING = FILES["transformer-treebank"]
TRANSLATION = [path for path in RECIPES if path.stem.startswith("transformer-") and path != PARSING]
CONTINUING = [path for path in RECIPES if "folder" in read_toml(path).get("model", {})]  # in test_continue_recipes.py
PRETRAINING = [path for path in RECIPES if path not in (*TRANSLATION, *CONTINUING, PARSING)]
SMALL = ["sequences.micro_tokens=256", "batch.tokens=512", "run.steps=2", "run.evaluate_batches=1", "run.workers=0"]
SMALL += ["run.compile=off", "run.log_every=1", "phases=[]"]


def test_there_are_recipes() -> None:
    assert len(PRETRAINING) >= 2
    assert len(TRANSLATION) >= 2


@pytest.mark.parametrize("path", TRANSLATION, ids=lambda path: path.stem)
def test_translation_recipe_takes_two_steps(path: Path, pairs_folder: Path, tmp_path: Path) -> None:
    plain = read_toml(path)
    model = None if "model" in plain else "transformer-tiny"
    TranslationSettings.parse({"model": {"preset": "transformer-tiny"}, **plain})
    changes = ["model.overrides={width=32,layers=1,heads=2,neurons=64}", "tokenizer.vocabulary=300", "run.steps=2"]
    changes += ["sequences.length=64", "sequences.micro_tokens=256", "batch.tokens=512", "run.log_every=1"]
    changes += ["task.generation={method='greedy',extra_length=2}"]
    metrics = bertsmith.finetune(model, recipe=path, data=pairs_folder, out=tmp_path / "run", set=changes, device="cpu")
    assert metrics["steps"] == 2
    assert len(bertsmith.load(tmp_path / "run").translate(["seven lanterns"])) == 1
    # the recipe beside the result reproduces the run
    again = bertsmith.finetune(recipe=tmp_path / "run" / "recipe.toml", out=tmp_path / "again", device="cpu")
    for name in ("training_loss", "loss", "exact_match", "bleu"):
        assert again[name] == metrics[name]


def test_parsing_recipe_takes_two_steps(tmp_path: Path) -> None:
    trees = [row["tree"] for row in TASK_CASES["parsing"].rows]
    for split in ("train", "dev"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps({"tree": tree}) + "\n" for tree in trees * 4))
    changes = ["model.overrides={width=32,layers=1,heads=2,neurons=64}", "tokenizer.vocabulary=300", *SMALL[:4]]
    changes += ["sequences.length=64", "run.log_every=1", "task.generation.beam=2", "task.generation.extra_length=4"]
    metrics = bertsmith.finetune(recipe=PARSING, data=str(tmp_path), out=tmp_path / "run", set=changes, device="cpu")
    assert (metrics["steps"], metrics.metric) == (2, "f1")
    assert read_toml(tmp_path / "run" / "recipe.toml")["task"]["leaves"] == "words"


@pytest.mark.parametrize("path", PRETRAINING, ids=lambda path: path.stem)
def test_recipe_takes_two_steps(path: Path, corpus_folder: Path, tmp_path: Path) -> None:
    plain = read_recipe(path)
    PretrainSettings.parse(plain)
    changes = list(SMALL)
    if "ramp_from" in plain["batch"]:
        changes.append("batch.ramp_from=256")
    if plain["sequences"]["length"] > 256:
        changes.append("sequences.length=128")
    if plain["model"]["preset"] != "bert-tiny":
        changes += ["model.overrides.layers=2", "model.overrides.width=48", "model.overrides.heads=4"]
    metrics = bertsmith.pretrain(path, data=corpus_folder, out=tmp_path / "run", set=changes, device="cpu")
    assert metrics["steps"] == 2
    model = bertsmith.load(tmp_path / "run")
    assert model.encode(["the smith forges"]).shape == (1, model.config.encoder.width)
    # the recipe beside the result reproduces the run
    again = bertsmith.pretrain(tmp_path / "run" / "recipe.toml", out=tmp_path / "again", device="cpu")
    assert again["training_loss"] == metrics["training_loss"]


@pytest.mark.parametrize("path", [*PRETRAINING, *TRANSLATION], ids=lambda path: path.stem)
def test_explain_prints_and_writes_nothing(
    path: Path, pairs_folder: Path, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    arguments = ["pretrain"] if path in PRETRAINING else ["finetune", "--data", str(pairs_folder), "--recipe"]
    if path in TRANSLATION and "model" not in read_toml(path):
        arguments.insert(1, "transformer-tiny")
    main([*arguments, str(path), "--explain", "--set", "run.seed=7"])
    printed = capsys.readouterr().out
    for word in ("seed = 7", "parameters", "training FLOPs per token"):
        assert word in printed
    assert ("GiB on each device" in printed) == (path in PRETRAINING)
    assert list(tmp_path.iterdir()) == []


def test_command_line_equals_python(corpus_folder: Path, tmp_path: Path) -> None:
    recipe = FILES["bert-tiny-cpu"]
    flags = [word for change in SMALL for word in ("--set", change)]
    main(
        ["pretrain", str(recipe), "--data", str(corpus_folder), "--out", str(tmp_path / "a"), "--device", "cpu", *flags]
    )
    bertsmith.pretrain(recipe, data=corpus_folder, out=tmp_path / "b", set=SMALL, device="cpu")
    first, second = (json.loads((tmp_path / name / "result.json").read_text()) for name in "ab")
    for name in ("training_loss", "held_out", "tokens", "parameters"):
        assert first[name] == second[name]
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()


def test_commands_from_text_to_export(texts: Path, tmp_path: Path) -> None:
    """Text → tokenizer → corpus → pretrain → inspect → export → import, each with its command."""
    main(["tokenizer", str(texts), "--out", str(tmp_path / "tokenizer"), "--vocabulary", "160"])
    tokenizer = str(tmp_path / "tokenizer")
    main(["corpus", str(texts), "--tokenizer", tokenizer, "--out", str(tmp_path / "corpus"), "--held-out", "0.1"])
    flags = [word for change in SMALL for word in ("--set", change)]
    run = ["--data", str(tmp_path / "corpus"), "--out", str(tmp_path / "run"), "--device", "cpu", *flags]
    main(["pretrain", str(FILES["bert-tiny-cpu"]), *run])
    main(["inspect", str(tmp_path / "run"), "--text", "The smith forges.", "--out", str(tmp_path / "maps")])
    assert {path.name for path in (tmp_path / "maps").iterdir()} >= {"attention.html", "attention.png", "result.json"}
    main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "hf")])
    main(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "back")])
    first, second = (bertsmith.load(tmp_path / name).encode(["the old clerk"]) for name in ("run", "back"))
    assert first.equal(second)
    assert "unigram" in (tmp_path / "run" / "report.html").read_text()


def documented_commands() -> list[str]:
    found = []
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *ALL):
        text = path.read_text(encoding="utf-8")
        found += re.findall(r"^[ \t#$]*(bertsmith [a-z]+ .*)$", text, flags=re.MULTILINE)
    return sorted(set(found))


def test_documented_commands_are_found() -> None:
    assert len(documented_commands()) >= 6


@pytest.mark.parametrize("line", documented_commands())
def test_documented_commands_parse(line: str) -> None:
    arguments = shlex.split(line.split(" #")[0])[1:]
    app.parse_args(arguments, exit_on_error=False, print_error=False)


def test_overrides_do_not_change_their_source() -> None:
    data = {"a": {"b": 1}}
    override(data, ["a.b=2"])
    assert data == {"a": {"b": 1}}

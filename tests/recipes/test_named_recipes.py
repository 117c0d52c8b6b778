"""Recipes by name: published values, building, files that extend a recipe, unknown names."""

import json
from pathlib import Path

import pytest
import torch

import bertsmith
from bertsmith.cli import main
from bertsmith.errors import InputError
from bertsmith.models.published import PRESETS
from bertsmith.recipes import (
    FILES,
    TIERS,
    expand_patterns,
    merge_settings,
    names,
    presets,
    read_recipe,
    recipe,
    recipe_path,
    resolve_base,
)
from bertsmith.toml import read_toml
from bertsmith.training.pretraining import PretrainSettings
from tables import recipe_tables

ROOT = Path(__file__).parents[2]

# preset: sequences per step, their length, steps, warm-up, peak rate; as published
PUBLISHED = {
    "bert-tiny": (256, 128, 1_000_000, 10_000, 1e-4),
    "bert-base": (256, 128, 1_000_000, 10_000, 1e-4),
    "bert-large": (256, 128, 1_000_000, 10_000, 1e-4),
    "electra-small": (128, 128, 1_000_000, 10_000, 5e-4),
    "electra-base": (256, 512, 766_000, 10_000, 2e-4),
    "electra-large": (2048, 512, 400_000, 10_000, 2e-4),
    "convbert-small": (128, 128, 1_000_000, 10_000, 3e-4),
    "convbert-medium-small": (128, 128, 1_000_000, 10_000, 5e-4),
    "convbert-base": (256, 128, 1_000_000, 10_000, 2e-4),
    "deberta-base": (2048, 512, 1_000_000, 10_000, 2e-4),
    "deberta-large": (2048, 512, 1_000_000, 10_000, 2e-4),
    "deberta-v2-xxlarge": (2048, 512, 1_000_000, 10_000, 1.5e-4),
    "deberta-v3-small": (8192, 512, 500_000, 10_000, 5e-4),
    "deberta-v3-large": (8192, 512, 500_000, 10_000, 3e-4),
}
# preset: the generator's width, layers and heads (of attention)
GENERATORS = {
    "electra-small": (64, 12, 1),
    "electra-base": (256, 12, 4),
    "electra-large": (256, 24, 4),
    "convbert-small": (64, 12, 1),
    "convbert-medium-small": (96, 12, 1),
    "convbert-base": (256, 12, 2),
    "deberta-v3-xsmall": (384, 6, 6),
    "deberta-v3-small": (768, 3, 12),
    "deberta-v3-base": (768, 6, 12),
    "deberta-v3-large": (1024, 12, 16),
}


def settings(name: str) -> PretrainSettings:
    return PretrainSettings.parse(recipe(name), source=name)


def test_every_encoder_has_paper_and_crammed_recipes() -> None:
    encoders = {name for name in PRESETS if "transformer-" not in name and not name.endswith("-generator")}
    others = {
        "paper": ("modern-", "disentangled-", "mpnet-"),
        "crammed": ("modern-", "disentangled-", "mpnet-", "performer-protein-"),
    }
    for tier, prefixes in others.items():
        assert {*TIERS[tier]} == {name for name in encoders if not name.startswith(prefixes)}
    sizes = {f"{family}-{size}" for family in ("bert", "modern") for size in ("small", "base", "large")}
    assert {*TIERS["modern"]} == sizes | {"disentangled-small"}


@pytest.mark.parametrize("name", names())
def test_every_recipe_fits_any_number_of_processes(name: str) -> None:
    assert settings(name).tier == name.split(":")[1]
    for processes in (1, 2, 4, 8):
        plain = recipe(name, processes)
        assert plain["batch"]["tokens"] % (processes * plain["sequences"]["micro_tokens"]) == 0


@pytest.mark.parametrize("name", names())
def test_every_recipe_has_the_published_network(name: str) -> None:
    """In every tier, the encoder is the preset's except for dropout and init_std."""
    plain = recipe(name)["model"]
    built = settings(name).network(None)
    changed = {key: value for key, value in plain.get("overrides", {}).items() if key in ("dropout", "init_std")}
    assert changed == plain.get("overrides", {})
    expected = bertsmith.preset(plain["preset"], vocabulary=30522, **changed).encoder
    embedding = built.encoder.embedding.changed(table="own")
    assert built.encoder.changed(embedding=embedding) == expected
    with torch.device("meta"):
        model = bertsmith.build(built)
    assert (model.generator is not None) == (built.generator is not None)


@pytest.mark.parametrize("preset", PUBLISHED)
def test_paper_recipes_have_the_published_values(preset: str) -> None:
    found = settings(f"{preset}:paper")
    length, steps = found.sequences.length, found.run.steps
    warmup = round(found.schedule.warmup * steps)
    assert (found.batch.tokens / length, length, steps, warmup, found.optimizer.learning_rate) == PUBLISHED[preset]
    assert found.optimizer.epsilon == 1e-6
    assert found.optimizer.weight_decay == 0.01
    assert found.optimizer.clip == 1.0
    assert found.optimizer.betas == ((0.9, 0.98) if "v3" in preset else (0.9, 0.999))
    assert found.optimizer.bias_correction == ("deberta" in preset)
    is_electra = preset.split("-")[0] in ("electra", "convbert")
    assert found.schedule.fall == ("throughout" if is_electra else "from_start")
    assert found.network(None).encoder.layers[0].dropout == 0.1


@pytest.mark.parametrize("preset", GENERATORS)
def test_paper_recipes_have_the_published_generators(preset: str) -> None:
    found = settings(f"{preset}:paper")
    generator = found.network(None).generator
    assert generator is not None
    encoder = generator.model.encoder
    assert (encoder.width, len(encoder.layers), encoder.layers[0].mixer.heads) == GENERATORS[preset]
    objective = recipe(f"{preset}:paper")["objective"]
    is_v3 = "v3" in preset
    assert objective["weight"] == 50
    assert objective.get("optimizers", "one") == ("two" if is_v3 else "one")
    assert objective["masking"]["mask"] == (1.0 if is_v3 else 0.85)
    assert objective["masking"]["rate"] == (0.25 if preset == "electra-large" else 0.15)
    assert generator.sharing == ("gradient_disentangled" if is_v3 else "full")
    assert ("mask_decoder" in {head.kind for head in generator.model.heads}) == is_v3


def test_settings_of_single_families() -> None:
    bert, deberta, performer = (recipe(f"{name}-base:paper") for name in ("bert", "deberta", "performer"))
    assert bert["objective"]["next_sentence"]
    assert bert["sequences"]["cut"] == "sentence_pairs"
    assert (deberta["objective"]["masking"]["unit"], deberta["objective"]["masking"]["max_ngram"]) == ("ngram", 3)
    optimizer = performer["optimizer"]
    assert (optimizer["learning_rate"], optimizer["epsilon"], optimizer["weight_decay"]) == (1e-3, 1e-9, 0.1)
    assert (optimizer["clip"], performer["schedule"]["kind"]) == (0.5, "constant")
    for name in TIERS["crammed"]:
        found = settings(f"{name}:crammed")
        assert found.sequences.layout == "packed"
        assert (found.schedule.kind, found.schedule.decay, found.run.compile) == ("wsd", 0.2, "auto")
        assert 0.2 <= found.objective.targets_per_token <= 0.3
        assert 5e-4 <= found.optimizer.learning_rate <= 1e-3
        assert found.batch.ramp_from is not None


RUNS = {
    "electra-small:paper": ["model.overrides={layers=1,width=32,heads=2,embedding_width=16}"],
    "convbert-small:crammed": [
        "model.overrides={layers=1,width=32,heads=4,embedding_width=16}",
        "batch.ramp_from=512",
    ],
    "deberta-v3-xsmall:paper": ["model.overrides={layers=2,width=32,heads=2}", "generator.depth=0.5"],
    "universal-base:paper": ["model.overrides={layers=2,width=32,heads=2}"],
    "performer-small:paper": ["model.overrides={layers=1,width=32,heads=2,features=8}", "sequences.length=128"],
}


@pytest.mark.parametrize("name", RUNS)
def test_named_recipe_takes_two_steps(name: str, corpus_folder: Path, tmp_path: Path) -> None:
    changes = [*RUNS[name], "sequences.micro_tokens=512", "batch.tokens=512", "run.steps=2", "run.workers=0"]
    changes += ["run.compile=off", "run.log_every=1", "run.evaluate_batches=1"]
    metrics = bertsmith.pretrain(Path(name), data=corpus_folder, out=tmp_path / "run", set=changes, device="cpu")
    assert metrics["steps"] == 2
    for tier in (
        json.loads((tmp_path / "run" / "result.json").read_text()),
        read_toml(tmp_path / "run" / "recipe.toml"),
    ):
        assert tier["tier"] == name.split(":")[1]
    again = bertsmith.pretrain(tmp_path / "run" / "recipe.toml", out=tmp_path / "again", device="cpu")
    assert again["training_loss"] == metrics["training_loss"]


def test_explain_prints_published_parameters(capsys: pytest.CaptureFixture) -> None:
    main(["pretrain", "bert-base:paper", "--explain"])
    printed = capsys.readouterr().out
    assert 'tier = "paper"' in printed
    assert "110,106,428" in printed  # with both heads, as published
    main(["pretrain", "bert-base", "--explain"])
    assert 'tier = "crammed"' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("electra-smal:paper", "recipe is 'electra-smal:paper'; did you mean 'electra-small'?"),
        ("convbert-base:modern", "allowed for convbert-base: paper, crammed; modern exists for bert-small, bert-base"),
        ("bert-base:papers", "recipe is 'bert-base:papers'; allowed for bert-base: paper, crammed, modern"),
        ("xyz", "recipe is 'xyz'; allowed: a .toml file, or a name that `bertsmith list recipes` prints"),
    ],
)
def test_unknown_name_prints_one_line(name: str, message: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["pretrain", name, "--explain"])
    assert ended.value.code == 2
    output = capsys.readouterr().err
    assert message in output
    assert len(output.strip().splitlines()) == 1


def test_file_overrides_the_recipe_it_names(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('recipe = "electra-small:crammed"\n[optimizer]\nlearning_rate = 2e-3\n[generator]\nwidth = 0.25\n')
    plain, base = read_recipe(path), recipe("electra-small:crammed")
    assert plain["optimizer"] == {**base["optimizer"], "learning_rate": 2e-3}
    assert plain["generator"] == {**base["generator"], "width": 0.25}
    assert {**plain, "optimizer": 0, "generator": 0} == {**base, "optimizer": 0, "generator": 0}
    assert base == recipe("electra-small:crammed")  # the tables are not changed
    with pytest.raises(bertsmith.InputError, match="recipe is 3; allowed: a name"):
        resolve_base({"recipe": 3})


def test_conflicting_settings_of_the_base_are_removed() -> None:
    base = recipe("deberta-v3-base:crammed")
    masked = merge_settings(base, {"objective": {"kind": "masked_lm"}})
    assert masked["objective"] == {"kind": "masked_lm"}
    assert "generator" not in masked
    assert merge_settings(base, {"model": {"folder": "x"}})["model"] == {"folder": "x"}
    narrow = merge_settings(base, {"generator": {"width": 0.5}})
    assert narrow["generator"] == {"width": 0.5, "sharing": "gradient_disentangled"}
    merged = merge_settings(base, {"model": {"preset": "deberta-v3-small"}})["model"]
    assert merged == {"preset": "deberta-v3-small", "overrides": base["model"]["overrides"]}
    for changed in (masked, narrow):
        PretrainSettings.parse(changed)


def test_list_and_documentation_name_every_recipe(capsys: pytest.CaptureFixture) -> None:
    main(["list", "recipes"])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [*presets(), *FILES]
    # python docs/hooks/tables.py recipes
    assert recipe_tables() in (ROOT / "docs" / "reference" / "recipes.md").read_text(encoding="utf-8")


def test_shipped_files_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "proteins").mkdir()  # a name means the same in every folder
    assert recipe_path("proteins") == FILES["proteins"]
    assert read_recipe("continue-small")["model"]["folder"] == "small"
    assert len(expand_patterns(["families/*", "own.toml"])) == 7
    with pytest.raises(InputError, match="did you mean 'finetune/patient', which comes with the package"):
        recipe_path("recipes/finetune/patient.toml")
    with pytest.raises(InputError, match="did you mean 'finetune/patient'"):
        recipe_path("finetune/patent")

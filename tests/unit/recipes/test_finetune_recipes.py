"""Defaults of fine-tuning: the papers' values, for every preset, overridden by given settings."""

import pytest

from bertsmith.models.published import PRESETS, preset
from bertsmith.recipes.finetune import (
    Completed,
    complete,
    finetune_recipe,
    size_of,
    task_name,
)
from bertsmith.recipes.finetune_tables import FAMILIES, FRESH, FROZEN, NAMES, OTHERS
from bertsmith.tasks import TASKS
from bertsmith.training.finetuning import FinetuneSettings

ENCODERS = [name for name in PRESETS if preset(name).decoder is None]
KINDS = ["classification", "regression", "multi_label", "tagging", "spans", "choice", "embedding"]


@pytest.mark.parametrize("name", ENCODERS)
def test_every_preset_has_settings_for_every_task(name: str) -> None:
    config = preset(name)
    for kind in KINDS:
        for data in (None, *NAMES):
            plain = finetune_recipe(config, kind, data, examples=1000).plain()
            plain["task"] = {"kind": "classification"}
            settings = FinetuneSettings.parse({"model": "folder", **plain})
            assert settings.sequences.length <= config.encoder.embedding.max_length
            assert 1e-6 <= settings.optimizer.learning_rate <= 1e-3


def test_every_row_can_apply() -> None:
    """A misspelt word would silently disable its row."""
    sizes = {size_of(preset(name)) for name in ENCODERS}
    assert sizes == {"tiny", "mini", "small", "medium", "base", "large", "huge"}
    known = {*sizes, *KINDS, *NAMES, "v3", "fresh", "frozen"}
    for rows in (*(family.rows for family in (*FAMILIES.values(), OTHERS)), FRESH, FROZEN):
        for selector in rows:
            assert set(selector.split()) <= known, selector


@pytest.mark.parametrize(
    ("name", "kind", "data", "expected"),
    [
        ("bert-large", "classification", "mnli", {"learning_rate": 2e-5, "epochs": 3, "batch": 32, "length": 128}),
        ("bert-base", "spans", "squad-v1.1", {"learning_rate": 3e-5, "epochs": 2, "length": 384}),
        ("bert-base", "spans", "squad-v2.0", {"learning_rate": 5e-5, "epochs": 2, "batch": 48}),
        ("bert-base", "choice", "swag", {"learning_rate": 2e-5, "batch": 16}),
        ("bert-mini", "classification", "sst-2", {"learning_rate": 3e-4}),
        ("electra-small", "classification", "rte", {"learning_rate": 3e-4, "epochs": 10, "decay": 0.8}),
        ("electra-base", "spans", "squad-v1.1", {"learning_rate": 1e-4, "epochs": 2, "length": 512, "decay": 0.8}),
        ("convbert-medium-small", "regression", "sts-b", {"learning_rate": 3e-4, "epochs": 10, "decay": 0.8}),
        ("convbert-base", "classification", "cola", {"learning_rate": 1e-4, "epochs": 3, "decay": 0.8}),
        (
            "deberta-base",
            "classification",
            "qnli",
            {"learning_rate": 2e-5, "epochs": 4, "length": 512, "dropout": 0.15},
        ),
        ("deberta-base", "classification", "rte", {"epochs": 6, "length": 320, "dropout": 0.2}),
        ("deberta-large", "regression", "sts-b", {"learning_rate": 7e-6, "epochs": 4, "dropout": 0.15}),
        ("deberta-large", "tagging", "conll2003", {"learning_rate": 1e-5, "epochs": 15, "batch": 16, "dropout": 0.0}),
        ("deberta-v3-large", "classification", "cola", {"learning_rate": 5.5e-6, "epochs": 10, "dropout": 0.1}),
        ("deberta-v3-small", "classification", "mnli", {"learning_rate": 4.5e-5, "batch": 64, "dropout": 0.2}),
        ("deberta-v3-base", "classification", "mrpc", {"learning_rate": 1.5e-5, "epochs": 6}),
        ("deberta-v2-xxlarge", "classification", "mnli", {"learning_rate": 3e-6, "dropout": 0.3}),
        ("modern-base", "classification", "mrpc", {"learning_rate": 8e-5, "epochs": 10, "batch": 32}),
        ("performer-base", "classification", "mnli", {"learning_rate": 3e-5, "epochs": 3, "batch": 32}),
        ("albert-base", "classification", "mnli", {"learning_rate": 3e-5}),
    ],
)
def test_defaults_are_the_papers_values(name: str, kind: str, data: str, expected: dict[str, float]) -> None:
    paths = {"learning_rate": "optimizer.learning_rate", "epochs": "run.epochs", "batch": "batch.examples"}
    paths |= {"length": "sequences.length", "decay": "encoder.layer_decay", "dropout": "head.dropout"}
    settings = finetune_recipe(preset(name), kind, data).settings
    assert {word: settings[paths[word]] for word in expected} == expected


def test_warm_up_steps_become_a_share() -> None:
    share = finetune_recipe(preset("deberta-base"), "classification", "mnli").settings["schedule.warmup"]
    assert round(share * 3 * 392702 / 64) == pytest.approx(1000, abs=2)


def test_family_without_a_paper_names_its_source() -> None:
    assert "none published" in finetune_recipe(preset("performer-base"), "classification").source
    assert "ELECTRA" in finetune_recipe(preset("convbert-base"), "classification").source


def test_fresh_weights_and_frozen_encoders_have_their_own_rates() -> None:
    config = preset("electra-small")
    usual, fresh, frozen = (
        finetune_recipe(config, "classification", None, **more).settings
        for more in ({}, {"is_fresh": True}, {"is_frozen": True})
    )
    for other in (fresh, frozen):
        assert other["optimizer.learning_rate"] > usual["optimizer.learning_rate"]
        assert other["run.epochs"] > usual["run.epochs"]
        assert other["encoder.layer_decay"] == 1.0


@pytest.mark.parametrize(
    ("examples", "batch", "epochs"), [(20, 8, 20.0), (200, 16, 20.0), (2000, 32, 5.0), (50_000, 32, 3.0)]
)
def test_small_data_gets_smaller_batches_and_more_epochs(examples: int, batch: int, epochs: float) -> None:
    settings = finetune_recipe(preset("bert-base"), "classification", examples=examples).settings
    assert (settings["batch.examples"], settings["run.epochs"]) == (batch, epochs)


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ("/data/glue/MRPC", "mrpc"),
        ("data/STS-B/", "sts-b"),
        ("data/squad/v2.0", "squad-v2.0"),
        ("CoLA/train.jsonl", "cola"),
        ("nyu-mll/glue:sst2", "sst-2"),
        ("conll2003", "conll2003"),
        ("reviews", None),
        (None, None),
    ],
)
def test_data_set_is_recognised(data: str | None, name: str | None) -> None:
    assert task_name(data) == name


def complete_settings(given: dict, name: str, examples: int = 3668) -> Completed:
    plain = {"model": "folder", "task": {"kind": "classification"}, **given}
    # the task is resolved before the settings are completed, and then has a value for each of its own settings
    settings = FinetuneSettings.parse(plain)
    return complete(settings.changed(task=settings.task.changed()), plain, preset(name), examples)


def test_given_settings_override_defaults() -> None:
    given = {
        "data": "glue/MRPC",
        "task": {"kind": "classification", "text": "a", "pair": "b"},
        "optimizer": {"weight_decay": 0.5},
    }
    whole = complete_settings(given, "electra-base")
    assert whole.settings.optimizer.weight_decay == 0.5
    assert whole.settings.optimizer.learning_rate == 1e-4
    assert whole.settings.encoder.layer_decay == 0.8
    assert whole.settings.task.plain()["both_orders"]
    assert "Clark" in whole.source
    assert "mrpc" in whole.source
    # recorded settings are complete: completing them again changes nothing, for any model
    assert complete_settings(whole.settings.plain(), "bert-tiny", 10).settings == whole.settings


def test_both_orders_is_a_default_for_pairs_only() -> None:
    assert not complete_settings({"data": "MRPC"}, "electra-base").settings.task.plain()["both_orders"]
    task = {"kind": "classification", "pair": "b", "both_orders": False}
    assert not complete_settings({"data": "MRPC", "task": task}, "electra-base").settings.task.plain()["both_orders"]


def test_preset_is_fresh_and_folder_is_not() -> None:
    rates = [
        complete_settings({"model": name}, "bert-base", 10_000).settings.optimizer.learning_rate
        for name in ("folder", "bert-base")
    ]
    assert rates == [3e-5, 1e-4]


def test_kinds_are_complete() -> None:
    assert set(TASKS) - {"translation"} <= set(KINDS)

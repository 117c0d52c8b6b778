"""Runs with LayerDrop: resumed, packed and padded runs are equal, in pre-training and fine-tuning."""

from pathlib import Path

import pytest
from helpers_runs import assert_same, interrupted, rows, run
from test_finetune_layouts import run as tune

import bertsmith

DROPPING = ["model.overrides={width=16,layers=3,heads=2,max_length=64,dropout=0.0,layer_drop=0.5}", "run.steps=6"]
DROPPING += ["run.log_every=1", "run.checkpoint_every=2", "run.evaluate_every=6"]


def test_resumed_run_drops_the_same_layers(
    corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(corpus_folder, tmp_path / "straight", *DROPPING)
    interrupted(monkeypatch, corpus_folder, tmp_path / "resumed", 3, *DROPPING)
    assert_same(tmp_path / "resumed", tmp_path / "straight")
    run(corpus_folder, tmp_path / "whole", *DROPPING, "model.overrides.layer_drop=0.0")
    losses, others = ([row["loss"] for row in rows(tmp_path / name)] for name in ("straight", "whole"))
    assert losses != pytest.approx(others, abs=1e-4)


@pytest.mark.slow
def test_fine_tuning_with_layer_drop_of_a_folder(tmp_path: Path) -> None:
    changes = ["model.overrides.layer_drop=0.5", "model.overrides.layers=3", "model.overrides.dropout=0.0"]
    packed, weights = tune("bert-tiny", "packed", tmp_path / "packed", *changes)
    padded, _ = tune("bert-tiny", "padded", tmp_path / "padded", *changes)
    assert packed == pytest.approx(padded, abs=1e-4)
    assert weights
    assert bertsmith.load(tmp_path / "packed").config.encoder.layer_drop == 0.5
    texts = [("w1 w2", "yes"), ("w7 w3", "no")] * 4
    more = ["model.overrides.layer_drop=0.0", "run.epochs=1"]
    result = bertsmith.finetune(tmp_path / "packed", train=texts, dev=texts, set=more, out=tmp_path / "more")
    assert result.model.config.encoder.layer_drop == 0.0

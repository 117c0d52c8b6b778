"""Small fine-tunings with adversarial training: its loss is logged, and resumed runs are bitwise equal."""

import json
import math
from pathlib import Path

import pytest
from helpers_runs import assert_same, rows

import bertsmith
from bertsmith.errors import InputError
from bertsmith.toml import read_toml
from bertsmith.training.trainer import Trainer

SMALL = [
    "model.overrides={width=16,layers=1,heads=2,max_length=32,dropout=0.1}",
    "tokenizer.vocabulary=300",
    "sequences.length=32",
]
SMALL += ["batch.examples=8", "batch.micro_examples=4", "run.epochs=2", "run.evaluations=2", "run.log_every=1"]


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a small classification task."""
    folder = tmp_path_factory.mktemp("labelled")
    for part, begin, end in (("train", 0, 32), ("dev", 32, 44)):
        with (folder / f"{part}.jsonl").open("w", encoding="utf-8") as file:
            for index in range(begin, end):
                verb = ("forges", "loses")[index % 2]
                text = (
                    f"the smith {verb} {('a gate', 'the letter', 'an old clock')[index % 3]} {'again ' * (index % 5)}"
                )
                file.write(json.dumps({"text": text.strip(), "label": ("made", "lost")[index % 2]}) + "\n")
    return folder


def run(data: Path, out: Path, **more: object) -> dict:
    return bertsmith.finetune("bert-tiny", data=str(data), out=out, set=SMALL, device="cpu", **more)


@pytest.mark.parametrize("kind", ["sift", "vat"])
def test_adversarial_term_is_logged(kind: str, labelled: Path, tmp_path: Path) -> None:
    run(labelled, tmp_path / "run", adversarial=kind)
    assert read_toml(tmp_path / "run" / "recipe.toml")["adversarial"]["kind"] == kind
    log = rows(tmp_path / "run")
    training = [row for row in log if row["kind"] == "training"]
    assert len(training) == 8
    for row in training:
        # upper limit for equal distributions: twice the entropy of two balanced classes
        assert 0 < row["adversarial_loss"] < 2 * math.log(2) + 0.2
        assert row["loss"] == pytest.approx(row["task_loss"] + 5 * row["adversarial_loss"])
    held_out = [row for row in log if row["kind"] == "held_out"]
    assert len(held_out) == 4
    assert all(row["loss"] < 1.0 and "adversarial_loss" not in row for row in held_out)


def test_resumed_run_equals_uninterrupted_run(labelled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(labelled, tmp_path / "straight", adversarial="sift")
    real = Trainer._step

    def until(self: Trainer, *arguments: object) -> None:
        if self.progress.step == 5:
            raise KeyboardInterrupt
        real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", until)
        with pytest.raises(KeyboardInterrupt):
            run(labelled, tmp_path / "resumed", adversarial="sift")
    bertsmith.finetune(out=tmp_path / "resumed", resume=True, device="cpu")
    assert_same(tmp_path / "straight", tmp_path / "resumed")


def test_unknown_kind_raises(labelled: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"adversarial\.kind"):
        run(labelled, tmp_path / "run", adversarial="fgsm")

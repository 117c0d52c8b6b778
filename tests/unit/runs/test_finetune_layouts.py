"""Packed and padded batches give the same fine-tuning, with dropout, in every family."""

import json
import random
from pathlib import Path

import pytest
import torch
from choosing import slow_unless

import bertsmith

WORDS = [f"w{index}" for index in range(12)]
SETTINGS = ["tokenizer.vocabulary=120", "tokenizer.kind=wordpiece", "sequences.length=48", "batch.examples=8"]
SETTINGS += ["run.epochs=2", "run.log_every=1", "run.choose=last", "optimizer.learning_rate=1e-3"]
SETTINGS += ["optimizer.epsilon=1e-3"]  # large, so that updates for gradients near 0 do not depend on rounding
FAMILIES = {
    "bert-tiny": "",
    "electra-small": ",embedding_width=16",
    "albert-base": "",
    "convbert-small": ",embedding_width=16",
    "deberta-base": "",
    "deberta-v3-base": "",
    "performer-base": "",
    "lightconv-base": "",
    "dynamicconv-base": "",
    "modern-base": "",
    "universal-base": "",
}


def rows(count: int, seed: int) -> list[tuple[str, str]]:
    """Return texts of 1 to 40 words, labelled by their first word."""
    draw = random.Random(seed)
    texts = [draw.choices(WORDS, k=draw.randint(1, 40)) for _ in range(count)]
    return [(" ".join(text), "yes" if int(text[0][1:]) < 6 else "no") for text in texts]


def run(family: str, layout: str, out: Path, *changes: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses of all steps and the final weights."""
    overrides = f"model.overrides={{width=16,layers=2,heads=2,dropout=0.1{FAMILIES[family]}}}"
    settings = [*SETTINGS, overrides, f"sequences.layout={layout}", *changes]
    data = {"train": rows(40, 1), "dev": rows(8, 2)}
    result = bertsmith.finetune(family, **data, out=out, set=settings, device="cpu", seed=3)
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [row["loss"] for row in log if row["kind"] == "training"], result.predictor.model.state_dict()


QUICK = ("bert-tiny",)


@pytest.mark.parametrize("family", slow_unless(QUICK, FAMILIES))
def test_packed_run_equals_padded_run(family: str, tmp_path: Path) -> None:
    packed, packed_weights = run(family, "packed", tmp_path / "packed")
    padded, padded_weights = run(family, "padded", tmp_path / "padded")
    assert len(packed) == 10
    assert packed == pytest.approx(padded, abs=1e-4)
    for name, weight in packed_weights.items():
        torch.testing.assert_close(weight, padded_weights[name], rtol=1e-3, atol=1e-4, msg=name)


def test_dropout_depends_on_the_seed(tmp_path: Path) -> None:
    losses, _ = run("bert-tiny", "packed", tmp_path / "dropped")
    again, _ = run("bert-tiny", "packed", tmp_path / "again")
    without, _ = run("bert-tiny", "packed", tmp_path / "without", "model.overrides.dropout=0.0", "head.dropout=0.0")
    assert losses == again
    assert losses != pytest.approx(without, abs=1e-3)

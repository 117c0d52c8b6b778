"""Short fine-tuning runs and small tokenizers for task tests."""

from collections.abc import Sequence
from typing import Any

import bertsmith
from bertsmith.runs.finetuning import FinetuneResult
from bertsmith.tasks.base import Encoding
from bertsmith.text.learn import learn_tokenizer

SMALL = (
    "model.overrides.width=16",
    "model.overrides.layers=1",
    "model.overrides.heads=2",
    "model.overrides.init_std=0.2",
    "model.overrides.dropout=0.0",
    "tokenizer.vocabulary=120",
    "tokenizer.kind=wordpiece",
    "batch.examples=8",
    "optimizer.learning_rate=0.01",
    "run.precision=float32",
)
WORDS = ("red", "green", "blue", "iron", "gold", "rain", "snow", "wind", "tree", "bird", "fish", "stone")


def finetune_small(
    rows: Sequence[Any], task: str | None = None, settings: Sequence[str] = (), epochs: int = 1, **arguments: Any
) -> FinetuneResult:
    overrides = [*SMALL, f"run.epochs={epochs}", *settings]
    arguments.setdefault("dev", rows)  # these tests check that the model fits its data
    result = bertsmith.finetune("bert-tiny", train=rows, task=task, set=overrides, device="cpu", **arguments)
    assert isinstance(result, FinetuneResult)
    return result


def encoding(texts: Sequence[str], length: int = 32, kind: str = "wordpiece") -> Encoding:
    return Encoding(learn_tokenizer(list(texts) * 9, kind, 400, progress=False), length, has_types=True)

"""Helpers for task objectives: small models with a head, a batch with all kinds of targets, gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bertsmith import SequenceLayout
from bertsmith.answers.sequences import IGNORED
from bertsmith.data.examples import TaskBatch
from bertsmith.models.attach_heads import with_task_head
from bertsmith.models.build import build
from bertsmith.models.heads import HeadConfig
from bertsmith.models.heads.task import ClassifierConfig
from bertsmith.models.model import Model
from bertsmith.models.published import overridable, preset

SIZES = {
    "width": 16,
    "layers": 2,
    "heads": 2,
    "max_length": 16,
    "dropout": 0.0,
    "init_std": 0.3,
    "vocabulary": 20,
    "embedding_width": 8,
    "features": 8,
    "span": 4,
    "max_distance": 8,
    "neurons": 32,
}
FAMILIES = [
    "bert-tiny",
    "electra-small",
    "deberta-v3-small",
    "convbert-small",
    "performer-small",
    "deberta-base",
    "albert-base",
    "modern-base",
    "universal-base",
]
LENGTHS = (7, 4, 6)
CLASSES = ClassifierConfig(labels=("a", "b", "c"))


def make(name: str = "bert-tiny", head: HeadConfig = CLASSES) -> Model:
    """Return a model in float64 with non-zero biases and distinct token vectors."""
    sizes = {key: value for key, value in SIZES.items() if key in overridable(name)}
    model = with_task_head(build(preset(name, **sizes), seed=0), head.changed(dropout=0.0), seed=0).double()
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draws).double() * 0.2)
    return model.train()


def make_batch(layout: str = "packed") -> TaskBatch:
    draws = torch.Generator().manual_seed(2)
    texts = [torch.randint(1, 20, (length,), generator=draws) for length in LENGTHS]
    tags = [torch.randint(-1, 3, (length,), generator=draws) for length in LENGTHS]
    tags = [torch.where(own < 0, IGNORED, own) for own in tags]
    whole = {
        "label": torch.tensor([2, 0, 1]),
        "value": torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64),
        "labels": torch.tensor([[1, 0, 1], [0, 0, 1], [1, 1, 0]]),
    }
    if layout == "packed":
        starts = torch.tensor([0, *LENGTHS]).cumsum(0).int()
        collate: Callable[[list[Tensor], int], Tensor] = lambda rows, padding: torch.cat(rows)  # noqa: E731
        sequence_layout = SequenceLayout.packed(starts, max(LENGTHS))
    else:
        max_length = max(LENGTHS) + 1

        def collate(rows: list[Tensor], padding: int) -> Tensor:
            return torch.stack([nn.functional.pad(row, (0, max_length - len(row)), value=padding) for row in rows])

        sequence_layout = SequenceLayout.padded(torch.arange(max_length) < torch.tensor(LENGTHS)[:, None])
    return TaskBatch(
        collate(texts, 0),
        sequence_layout,
        None,
        torch.arange(3),
        {**whole, "tags": collate(tags, IGNORED)},
        real_tokens=sum(LENGTHS),
    )


def gradients(model: Model, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
    return {name: gradient for name, gradient in zip(names, found, strict=True) if gradient is not None}


def losses(objective: Any, model: Model, batch: TaskBatch, seed: int = 7) -> dict[str, Tensor]:
    """Return the mean of each term."""
    torch.manual_seed(seed)
    counts, sums = objective.counts(batch), objective(model, batch)
    return {name: sums[name].loss / counts[name] for name in objective.terms}


def assert_same(model: Model, loss: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
    found, reference = gradients(model, loss), gradients(model, expected)
    assert found.keys() == reference.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, reference[name], rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")

"""Adversarial training of answer spans, choices and pairs of vectors."""

from dataclasses import replace

import pytest
import torch
from small_tasks import assert_same, gradients, losses, make, make_batch

from bertsmith.data.examples import TaskBatch
from bertsmith.models.heads.task import ClassifierConfig, EmbedderConfig, SpansConfig
from bertsmith.objectives.adversarial import Adversarial, AdversarialConfig, symmetric_kl
from bertsmith.objectives.embedding import Similarity
from bertsmith.objectives.supervised import Choices, Spans


def more_targets(layout: str) -> TaskBatch:
    """Return a batch with answer spans, and with an item of two choices and one of a single choice."""
    batch = make_batch(layout)
    positions = {"start": torch.tensor([1, 0, 2]), "end": torch.tensor([3, 0, 5])}
    return replace(batch, targets={**batch.targets, **positions})


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_spans(layout: str) -> None:
    """A softmax over the tokens of each window, for start and end."""
    model, batch = make(head=SpansConfig()), more_targets(layout)
    task = Spans()
    outputs = model.outputs(batch.tokens, batch.layout)
    rows, _ = batch.layout.pad(outputs)
    other = torch.randn_like(rows)
    given = (
        other
        if layout == "padded"
        else torch.cat([row[: len(o)] for row, o in zip(other, outputs.split([7, 4, 6]), strict=True)])
    )
    found = symmetric_kl(task.comparable_logits(outputs, batch), task.comparable_logits(given, batch))
    for index, length in enumerate((7, 4, 6)):
        parts = [symmetric_kl(rows[index, :length, side][None], other[index, :length, side][None]) for side in (0, 1)]
        torch.testing.assert_close(found[index], torch.cat(parts).mean())
    loss = losses(Adversarial(task, AdversarialConfig(kind="sift")), model, batch)["adversarial"]
    assert all(gradient.isfinite().all() for gradient in gradients(model, loss).values())


def test_spans_packed_and_padded_are_the_same() -> None:
    model, objective = make(head=SpansConfig()), Adversarial(Spans(), AdversarialConfig(kind="sift"))
    packed, padded = (losses(objective, model, more_targets(own))["adversarial"] for own in ("packed", "padded"))
    assert_same(model, packed, padded)


def test_choices() -> None:
    model, batch = make(head=ClassifierConfig(labels=("score",))), make_batch()
    is_choice = torch.tensor([[True, True], [True, False]])
    batch = replace(batch, item=torch.arange(2), targets={"label": torch.tensor([1, 0]), "is_choice": is_choice})
    loss = losses(Adversarial(Choices(), AdversarialConfig(kind="vat")), model, batch)["adversarial"]
    assert all(gradient.isfinite().all() for gradient in gradients(model, loss).values())
    first, second = torch.randn(3, 1), torch.randn(3, 1)
    found = symmetric_kl(Choices().comparable_logits(first, batch), Choices().comparable_logits(second, batch))
    torch.testing.assert_close(found[:1], symmetric_kl(first[:2].T, second[:2].T))
    assert found[1] == 0  # a single choice has probability 1


def test_cosine_tasks_are_regression() -> None:
    model, batch = make(head=EmbedderConfig()), make_batch()
    starts = batch.layout.starts
    layout = replace(batch.layout, batch=2, starts=starts[:3])
    batch = replace(
        batch, tokens=batch.tokens[:11], layout=layout, item=torch.arange(1), targets={"value": torch.tensor([0.3])}
    )
    loss = losses(Adversarial(Similarity(), AdversarialConfig(kind="sift")), model, batch)["adversarial"]
    assert loss > 0

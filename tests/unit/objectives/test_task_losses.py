"""Losses of choices and embeddings against plain float64 loops, for any layout and micro-batches."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

import bertsmith
from bertsmith.answers.sequences import Features, Ragged
from bertsmith.data.examples import ExampleConfig, ExampleReader, TaskBatch
from bertsmith.data.plan import Cursor, MicroBatchPlan
from bertsmith.models.heads import HeadConfig
from bertsmith.models.heads.task import ClassifierConfig, EmbedderConfig
from bertsmith.models.model import Model
from bertsmith.objectives.embedding import Contrastive, InBatch, Ranking, Similarity
from bertsmith.objectives.supervised import Choices, Labels, Supervised, Values

ITEMS = 6
SIZE = {"width": 12, "layers": 2, "heads": 2, "vocabulary": 30, "max_length": 16, "init_std": 0.4, "dropout": 0.0}
COUNTS = {"choice": (2, 4, 3, 2, 4, 4), "pair": (2,) * ITEMS, "triple": (3,) * ITEMS, "text": (1,) * ITEMS}
GIVEN = np.array([0.0, 0.4, 1.0, 0.4, 0.9, 0.2], dtype=np.float32)


def features(form: str) -> Features:
    """Return items of random sequences with the targets of every loss tested here."""
    draw = np.random.default_rng(3)
    counts = np.array(COUNTS[form])
    sequences = [draw.integers(3, 30, draw.integers(2, 9)) for _ in range(counts.sum())]
    texts = np.arange(ITEMS * counts.max()).reshape(ITEMS, -1)
    targets: dict[str, np.ndarray | Ragged] = {
        "label": np.array([1, 3, 0, 0, 2, 3]),
        "is_choice": np.arange(counts.max()) < counts[:, None],
        "value": GIVEN.copy(),
        "labels": (draw.random((ITEMS, 3)) < 0.5).astype(np.float32),
        "texts": texts,
    }
    starts = np.concatenate([[0], np.cumsum(counts)])
    return Features(Ragged.of(sequences), None, starts, np.arange(ITEMS), targets)


def batch_of(given: Features, items: Sequence[int], layout: str = "packed") -> TaskBatch:
    reader = ExampleReader(given, ExampleConfig(layout=layout), pad=0)
    batch = reader[MicroBatchPlan(np.array(items), Cursor())].batch
    assert isinstance(batch, TaskBatch)
    return batch


def model_with(head: HeadConfig, **changes: float) -> Model:
    config = bertsmith.preset("bert-tiny", **{**SIZE, **changes})
    return bertsmith.build(config.changed(heads=(head,)), seed=4).double()


CLASSIFIER = ClassifierConfig(labels=("choice",), dropout=0.0)
CASES: dict[str, tuple[Supervised, str, HeadConfig]] = {
    "choices": (Choices(), "choice", CLASSIFIER),
    "values": (Values(), "text", CLASSIFIER),
    "labels": (Labels(weights=(1.0, 3.0, 0.5)), "text", ClassifierConfig(labels=("a", "b", "c"), dropout=0.0)),
    "similarity": (Similarity(), "pair", EmbedderConfig()),
    "contrastive": (Contrastive(), "pair", EmbedderConfig()),
    "ranking": (Ranking(), "pair", EmbedderConfig()),
    "in_batch": (InBatch(is_symmetric=True), "triple", EmbedderConfig()),
}
DIVISIBLE = ("choices", "values", "labels", "similarity", "contrastive")


def loss_and_gradients(model: Model, objective: Supervised, batches: Sequence[TaskBatch]) -> list[Tensor]:
    """Return the mean loss of a step and every gradient, combined over micro-batches as in the trainer."""
    total = sum(float(objective.count(batch)) for batch in batches)
    loss = torch.stack([objective(model, batch)["task"].loss for batch in batches]).sum() / total
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [loss, *(gradient for gradient in found if gradient is not None)]


@pytest.mark.parametrize("name", CASES)
def test_packed_equals_padded(name: str) -> None:
    objective, form, head = CASES[name]
    model = model_with(head)
    packed, padded = (
        loss_and_gradients(model, objective, [batch_of(features(form), range(ITEMS), layout)])
        for layout in ("packed", "padded")
    )
    assert all(gradient.abs().max() > 0 for gradient in packed[-2:])
    torch.testing.assert_close(packed, padded, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_losses_are_computed_in_float32_under_autocast(name: str) -> None:
    objective, form, head = CASES[name]
    batch = batch_of(features(form), range(ITEMS))
    outputs = objective.outputs(model_with(head), batch).detach().float()
    with torch.autocast("cpu", torch.bfloat16):
        half = objective.sums(outputs, batch).loss
    torch.testing.assert_close(half, objective.sums(outputs, batch).loss, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("division", [((0, 1, 2), (3, 4, 5)), ((5,), (1, 0, 4, 2), (3,))])
@pytest.mark.parametrize("name", DIVISIBLE)
def test_loss_does_not_depend_on_micro_batches(name: str, division: tuple[tuple[int, ...], ...]) -> None:
    objective, form, head = CASES[name]
    model, given = model_with(head), features(form)
    whole = loss_and_gradients(model, objective, [batch_of(given, range(ITEMS))])
    parts = loss_and_gradients(model, objective, [batch_of(given, items) for items in division])
    torch.testing.assert_close(whole, parts, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["ranking", "in_batch"])
def test_items_are_compared_within_their_micro_batch(name: str) -> None:
    objective, form, head = CASES[name]
    model, given = model_with(head), features(form)
    given.targets["value"][:] = [0.6, 0.7, 0.8, 0.9, 1.0, 0.55]  # type: ignore[index]

    def loss(*division: tuple[int, ...]) -> float:
        return loss_and_gradients(model, objective, [batch_of(given, items) for items in division])[0].item()

    first, second = (0, 1, 2, 3), (4, 5)
    assert loss(first, second) == pytest.approx((4 * loss(first) + 2 * loss(second)) / 6)
    assert loss(first, second) < 0.95 * loss((*first, *second))  # fewer negatives


def vectors(form: str, texts: np.ndarray | None = None) -> tuple[Tensor, TaskBatch, np.ndarray]:
    """Return random outputs of an embedder, a batch, and the unit vectors of each item."""
    batch = batch_of(features(form), range(ITEMS))
    if texts is not None:
        batch.targets["texts"] = torch.from_numpy(texts)
    outputs = torch.randn(batch.layout.batch, 5, dtype=torch.float64, requires_grad=True)
    wide = outputs.detach().numpy()
    wide = wide / np.linalg.norm(wide, axis=1, keepdims=True)
    return outputs, batch, wide.reshape(ITEMS, -1, 5)


def test_choices_by_hand() -> None:
    batch = batch_of(features("choice"), range(ITEMS))
    outputs = torch.randn(sum(COUNTS["choice"]), 1, dtype=torch.float64)
    begin, expected, hits = 0, 0.0, 0
    for count, label in zip(COUNTS["choice"], batch.targets["label"].tolist(), strict=True):
        scores = [float(score) for score in outputs[begin : begin + count, 0]]
        expected -= scores[label] - math.log(sum(math.exp(score) for score in scores))
        hits += scores[label] == max(scores)
        begin += count
    sums = Choices().sums(outputs, batch)
    assert float(sums.loss) == pytest.approx(expected, rel=1e-12)
    assert int(sums.metrics["accuracy"].part) == hits
    assert int(Choices().count(batch)) == int(sums.metrics["accuracy"].whole) == ITEMS


def test_cosine_losses_by_hand() -> None:
    outputs, batch, wide = vectors("pair")
    cosines, values = [float(a @ b) for a, b in wide], [float(value) for value in GIVEN]
    squares = sum((c - v) ** 2 for c, v in zip(cosines, values, strict=True))
    assert Similarity().sums(outputs, batch).loss.item() == pytest.approx(squares, rel=1e-6)
    contrastive = 0.0
    for cosine, value in zip(cosines, values, strict=True):
        distance = 1 - cosine
        contrastive += distance**2 / 2 if value > 0.5 else max(0.0, 0.8 - distance) ** 2 / 2
    assert Contrastive(margin=0.8).sums(outputs, batch).loss.item() == pytest.approx(contrastive, rel=1e-12)
    order = [
        math.exp(7 * (cosines[j] - cosines[i])) for i in range(ITEMS) for j in range(ITEMS) if values[i] > values[j]
    ]
    expected = ITEMS * math.log(1 + sum(order))
    assert len(order) == 14  # of 15 pairs of pairs one has equal values
    assert Ranking(scale=7).sums(outputs, batch).loss.item() == pytest.approx(expected, rel=1e-12)


def test_ranking_of_equal_values_has_no_loss() -> None:
    outputs, batch, _ = vectors("pair")
    batch.targets["value"] = torch.ones(ITEMS)
    loss = Ranking().sums(outputs, batch).loss
    (gradient,) = torch.autograd.grad(loss, outputs)
    assert loss.item() == 0.0
    assert (gradient == 0).all()


def is_also_positive(texts: np.ndarray, item: int, other: int) -> bool:
    return bool({*texts[item, :2]} & {*texts[other, :2]})


@pytest.mark.parametrize("is_symmetric", [False, True])
@pytest.mark.parametrize("form", ["pair", "triple"])
@pytest.mark.parametrize("has_repeats", [False, True])
def test_in_batch_by_hand(form: str, is_symmetric: bool, has_repeats: bool) -> None:
    width = COUNTS[form][0]
    texts = np.arange(ITEMS * width).reshape(ITEMS, width)
    if has_repeats:
        texts[1, 0], texts[2, 1], texts[3, 0] = texts[0, 0], texts[4, 1], texts[5, 1]
        texts[4, -1] = texts[0, 1]  # a negative that equals the first item's positive
    outputs, batch, wide = vectors(form, texts)
    batch.targets["value"] = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    expected, masked = 0.0, 0
    for i in (0, 1, 3, 4, 5):
        own = 20 * wide[i, 0] @ wide[i, 1]
        forth, back = [own], [own]
        for j in range(ITEMS):
            if j != i and not is_also_positive(texts, i, j):
                forth.append(20 * wide[i, 0] @ wide[j, 1])
                back.append(20 * wide[j, 0] @ wide[i, 1])
            masked += j != i and is_also_positive(texts, i, j)
            if width == 3 and texts[j, 2] not in texts[i, :2]:
                forth.append(20 * wide[i, 0] @ wide[j, 2])
        losses = [math.log(sum(math.exp(score) for score in scores)) - own for scores in (forth, back)]
        expected += sum(losses) / 2 if is_symmetric else losses[0]
    objective = InBatch(is_symmetric=is_symmetric)
    assert bool(masked) == has_repeats
    assert objective.sums(outputs, batch).loss.item() == pytest.approx(expected, rel=1e-10)
    assert int(objective.count(batch)) == 5
    assert torch.autograd.gradcheck(lambda given: objective.sums(given, batch).loss, outputs)


@pytest.mark.parametrize("name", ["similarity", "contrastive", "ranking"])
def test_gradients_of_cosine_losses(name: str) -> None:
    objective, form, _ = CASES[name]
    outputs, batch, _ = vectors(form)
    assert torch.autograd.gradcheck(lambda given: objective.sums(given, batch).loss, outputs)


def test_single_text_is_its_own_positive() -> None:
    outputs, batch, wide = vectors("text")
    batch.targets.pop("value")
    scores = 20 * wide[:, 0] @ wide[:, 0].T
    expected = sum(math.log(np.exp(row).sum()) - row[i] for i, row in enumerate(scores))
    assert InBatch().sums(outputs, batch).loss.item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_copies_of_a_text_have_different_dropout(layout: str) -> None:
    tokens = [[5, 9, 7], [5, 9, 7], [11, 12, 13, 14], [11, 12, 13, 14]]
    targets = {"texts": np.array([[0, 0], [1, 1]])}
    given = Features(Ragged.of(tokens), None, np.array([0, 2, 4]), np.arange(2), targets)
    batch = batch_of(given, (0, 1), layout)
    model = model_with(EmbedderConfig(), dropout=0.1)
    objective = InBatch()
    outputs = objective.outputs(model.train(), batch)
    assert (outputs[0] - outputs[1]).abs().max() > 1e-3
    assert (outputs[2] - outputs[3]).abs().max() > 1e-3
    assert torch.autograd.grad(objective.sums(outputs, batch).loss, outputs)[0].abs().max() > 0
    resting = objective.outputs(model.eval(), batch)
    torch.testing.assert_close(resting[0::2], resting[1::2])

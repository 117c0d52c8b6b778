"""Chart head and margin loss: CKY against all trees, the loss against its definition, layouts, the two-part W₁."""

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
import torch
from small_tasks import SIZES
from torch import Tensor

from bertsmith import SequenceLayout
from bertsmith.answers.chart import BRACKETS, POSITIONS, best_trees, fenceposts, parse_table
from bertsmith.answers.sequences import IGNORED
from bertsmith.data.batch import packed, padded
from bertsmith.data.examples import TaskBatch
from bertsmith.models.attach_heads import with_task_head
from bertsmith.models.build import build
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.heads.chart import ChartConfig, ChartHead
from bertsmith.models.model import Model
from bertsmith.models.published import preset
from bertsmith.objectives.chart import Chart, gold_labels, span_scores
from bertsmith.ops import cky

LABELS = ("NP", "S", "VP::NP")
# [CLS], words of one or two tokens, [SEP]
SENTENCES = ([0, 1, IGNORED, 2, 3, 4], [0, 1, 2], [0, IGNORED, 1, 2, IGNORED, 3, 4, 5])
GOLD = ([(0, 3, 2), (1, 3, 1)], [(0, 1, 3)], [(0, 4, 2), (0, 1, 1), (1, 4, 3)])
DRAWS = 30


def make() -> Model:
    sizes = {key: SIZES[key] for key in ("width", "layers", "heads", "max_length", "dropout", "init_std", "vocabulary")}
    head = ChartConfig(labels=LABELS, hidden=6, dropout=0.0)
    return with_task_head(build(preset("bert-tiny", **sizes), seed=0), head, seed=0).double()


def make_batch(layout: str = "packed", chosen: tuple[int, ...] = (0, 1, 2)) -> TaskBatch:
    draws = np.random.default_rng(0)
    texts = [draws.integers(1, 20, len(one)) for one in SENTENCES]
    lie = packed if layout == "packed" else padded
    tokens, lies = lie([texts[item] for item in chosen], 0)
    positions, _ = lie([np.array(SENTENCES[item]) for item in chosen], IGNORED)
    brackets = torch.full((len(chosen), 4, 3), IGNORED)
    for row, item in enumerate(chosen):
        brackets[row, : len(GOLD[item])] = torch.tensor(GOLD[item])
    targets = {POSITIONS: positions, BRACKETS: brackets}
    return TaskBatch(tokens, lies, None, torch.tensor(chosen), targets, sum(len(texts[item]) for item in chosen))


def outputs_of(model: Model, batch: TaskBatch) -> Tensor:
    return model.run(EncoderInputs(batch.tokens, batch.layout), Want(task=True)).outputs


@cache
def binary_trees(begin: int, end: int) -> tuple[frozenset[tuple[int, int]], ...]:
    """Return the spans of every binary tree over the words `begin` to before `end`."""
    if end - begin == 1:
        return (frozenset([(begin, end)]),)
    return tuple(
        left | right | {(begin, end)}
        for split in range(begin + 1, end)
        for left in binary_trees(begin, split)
        for right in binary_trees(split, end)
    )


@pytest.mark.parametrize("words", range(1, 8))
def test_cky_finds_the_best_of_all_trees(words: int) -> None:
    scores = np.random.default_rng(words).normal(size=(DRAWS, 9, 9))
    for item, chosen in enumerate(best_trees(scores, np.full(DRAWS, words))):
        best = max(binary_trees(0, words), key=lambda tree: sum(scores[item][span] for span in tree))
        assert set(zip(*map(np.ndarray.tolist, np.nonzero(chosen)), strict=True)) == best


def test_cky_of_a_batch_equals_cky_of_each_sentence() -> None:
    words = np.array([3, 1, 6, 5])
    scores = np.random.default_rng(0).normal(size=(4, 7, 7))
    together = best_trees(scores, words)
    for item, count in enumerate(words.tolist()):
        (alone,) = best_trees(scores[item : item + 1, : count + 1, : count + 1], np.array([count]))
        np.testing.assert_array_equal(together[item, : count + 1, : count + 1], alone)
        assert together[item].sum() == 2 * count - 1


@pytest.mark.parametrize("kind", ["random", "ties", "all_equal"])
def test_cky_of_torch_equals_cky_of_numpy(kind: str) -> None:
    draws = np.random.default_rng(0)
    words = draws.integers(1, 13, 40)
    words[:2] = 1, 12
    scores = draws.normal(size=(40, 13, 13)).astype(np.float32)
    if kind == "ties":
        scores = draws.integers(-1, 2, scores.shape).astype(np.float32)
    elif kind == "all_equal":
        scores = np.zeros_like(scores)
    found = cky.best_trees(torch.from_numpy(scores), torch.from_numpy(words))
    np.testing.assert_array_equal(found.numpy(), best_trees(scores, words))
    assert found.sum((1, 2)).tolist() == (2 * words - 1).tolist()


def labelled_trees(words: int) -> Iterator[dict[tuple[int, int], int]]:
    """Yield every binary tree with every choice of labels; the root has one."""
    for tree in binary_trees(0, words):
        spans = sorted(tree)
        for choice in np.ndindex(*(len(LABELS) + 1 for _ in spans)):
            labels = dict(zip(spans, choice, strict=True))
            if labels[0, words]:
                yield labels


@pytest.mark.parametrize("item", range(3))
def test_loss_equals_the_maximum_over_all_labelled_trees(item: int) -> None:
    model, batch = make(), make_batch(chosen=(item,))
    outputs = outputs_of(model, batch)
    head = model.task_head
    assert isinstance(head, ChartHead)
    spans, scores = span_scores(outputs, batch, head.scorer)
    by_span = {
        (begin, end): row
        for begin, end, row in zip(spans.begin.tolist(), spans.end.tolist(), scores.tolist(), strict=True)
    }
    gold = {(begin, end): label for begin, end, label in GOLD[item]}
    right = sum(by_span[span][label] for span, label in gold.items())
    best = max(
        sum(by_span[span][label] + (label != gold.get(span, 0)) for span, label in tree.items())
        for tree in labelled_trees(int(spans.words[0]))
    )
    loss = Chart().for_model(model).sums(outputs, batch).loss
    assert loss.item() == pytest.approx(max(0.0, best - right))
    assert loss.item() > 0


def margin_outputs(batch: TaskBatch, model: Model, size: float) -> tuple[Chart, Tensor]:
    """Return an objective whose scorer gives the gold label of every span `size`, and all others -`size`."""
    objective = Chart().for_model(model)
    outputs = outputs_of(model, batch)
    assert objective.scorer is not None
    spans, _ = span_scores(outputs, batch, objective.scorer)
    gold = gold_labels(batch, spans)

    class Oracle(torch.nn.Module):
        def forward(self, differences: Tensor) -> Tensor:
            table = torch.full((len(gold), len(LABELS) + 1), -size, dtype=torch.float64)
            return table.scatter(1, gold[:, None], size)[:, 1:]

    return Chart(scorer=Oracle()), outputs  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "is_zero"), [(1.0, True), (0.51, False), (0.0, False), (-1.0, False), (2.0, True)])
def test_loss_is_zero_only_if_the_gold_tree_wins_by_the_margin(size: float, is_zero: bool) -> None:
    batch, model = make_batch(), make()
    objective, outputs = margin_outputs(batch, model, size)
    sums = objective.sums(outputs, batch)
    assert (sums.loss.item() == 0) is is_zero
    if size > 1:  # at 1 the gold tree ties with others
        found = sums.metrics["accuracy"]
        assert found.part == found.whole == 6


def test_unknown_gold_labels_are_left_out() -> None:
    model, batch = make(), make_batch()
    batch.targets[BRACKETS][:, 0] = IGNORED  # even the root's
    assert torch.isfinite(Chart().for_model(model).sums(outputs_of(model, batch), batch).loss)


def test_gradients_are_right() -> None:
    model, batch = make(), make_batch(chosen=(0, 1))
    objective = Chart().for_model(model)
    scorer = objective.scorer
    assert scorer is not None
    outputs = outputs_of(model, batch).detach().requires_grad_()
    names = [name for name, _ in scorer.named_parameters()]

    def loss(outputs: Tensor, *parameters: Tensor) -> Tensor:
        class Given(torch.nn.Module):
            def forward(self, differences: Tensor) -> Tensor:
                given = dict(zip(names, parameters, strict=True))
                return torch.func.functional_call(scorer, given, (differences,))

        return Chart(scorer=Given()).sums(outputs, batch).loss  # type: ignore[arg-type]

    parameters = [parameter.detach().requires_grad_() for parameter in scorer.parameters()]
    assert torch.autograd.gradcheck(loss, (outputs, *parameters))


def test_alone_padded_and_packed_losses_are_equal() -> None:
    model = make()

    def loss(batch: TaskBatch) -> Tensor:
        return Chart()(model, batch)["task"].loss

    packed_loss = loss(make_batch())
    torch.testing.assert_close(packed_loss, loss(make_batch("padded")), rtol=0, atol=1e-10)
    alone = sum(loss(make_batch(chosen=(item,))) for item in range(3))
    torch.testing.assert_close(packed_loss, alone, rtol=0, atol=1e-10)


def test_two_parts_of_a_token_equal_the_plain_formula() -> None:
    """W₂ ReLU(LN(W₁ (f_j − f_i) + b₁)) + b₂ with f_i = [first half of y_i; second half of y_(i+1)]."""
    model, batch = make(), make_batch(chosen=(2,))
    head = model.task_head
    assert isinstance(head, ChartHead)
    states = model.run(EncoderInputs(batch.tokens, batch.layout)).last
    rows = states[(batch.targets[POSITIONS] != IGNORED)]  # (words + 2, width)
    half = rows.shape[-1] // 2
    fences = torch.cat([rows[:-1, :half], rows[1:, half:]], dim=-1)
    first = torch.cat([head.after.weight, head.before.weight], dim=-1)
    spans, scores = span_scores(outputs_of(model, batch), batch, head.scorer)
    hidden = head.scorer.norm((fences[spans.end] - fences[spans.begin]) @ first.T + head.scorer.bias)
    expected = head.scorer.score(torch.relu(hidden))
    torch.testing.assert_close(scores[:, 1:], expected, rtol=0, atol=1e-12)
    assert not scores[:, 0].any()


@pytest.mark.parametrize("item", range(3))
def test_numpy_and_torch_scores_are_equal(item: int) -> None:
    model, batch = make(), make_batch(chosen=(item,))
    head = model.task_head
    assert isinstance(head, ChartHead)
    spans, scores = span_scores(outputs_of(model, batch), batch, head.scorer)
    weights = model.span_weights
    assert weights is not None
    outputs = outputs_of(model, batch).detach().numpy()
    positions = batch.targets[POSITIONS].numpy()
    fences = fenceposts(outputs[positions != IGNORED])
    found = weights.scores(fences[spans.end.numpy()] - fences[spans.begin.numpy()])
    np.testing.assert_allclose(found, scores[:, 1:].detach().numpy(), rtol=0, atol=1e-5)
    table = weights.best_labels(outputs, positions)
    best = scores.detach().max(-1)
    is_inner = ~spans.is_root.numpy()
    begin, end = spans.begin.numpy(), spans.end.numpy()
    np.testing.assert_array_equal(table[1, begin, end][is_inner], best.indices.numpy()[is_inner])
    assert table[1, 0, -1] > 0  # the root is a constituent


def test_sentence_of_one_word_is_one_constituent() -> None:
    table = np.zeros((2, 2, 2), dtype=np.float32)
    table[:, 0, 1] = -1.5, 3
    assert parse_table(table, LABELS) == ([("VP", 0, 1), ("NP", 0, 1)], -1.5)


def test_lengths_of_a_layout_do_not_matter() -> None:
    model, batch = make(), make_batch("padded")
    assert batch.layout.is_token is not None
    wider = torch.nn.functional.pad(batch.tokens, (0, 3), value=7)
    layout = SequenceLayout.padded(torch.nn.functional.pad(batch.layout.is_token, (0, 3)))
    targets = {**batch.targets, POSITIONS: torch.nn.functional.pad(batch.targets[POSITIONS], (0, 3), value=IGNORED)}
    other = TaskBatch(wider, layout, None, batch.item, targets, batch.real_tokens)
    losses = [Chart()(model, one)["task"].loss for one in (batch, other)]
    torch.testing.assert_close(*losses, rtol=0, atol=1e-10)

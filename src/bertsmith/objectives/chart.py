"""Margin loss of a chart parser (Stern et al. 2017; Kitaev and Klein 2018)."""

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from bertsmith.answers.chart import BRACKETS, POSITIONS
from bertsmith.answers.sequences import IGNORED
from bertsmith.data.examples import TaskBatch
from bertsmith.errors import InputError
from bertsmith.models.heads.chart import ChartHead, SpanScorer
from bertsmith.models.model import Model
from bertsmith.objectives.base import Share, Sums, squared_error, wide
from bertsmith.objectives.supervised import Supervised
from bertsmith.ops.cky import best_trees


class SpanIndex(NamedTuple):
    """All spans of the sentences of a batch, one after the other.

    Shape: (spans,) each but words, (batch,).
    """

    item: Tensor
    begin: Tensor
    end: Tensor
    words: Tensor

    @property
    def is_root(self) -> Tensor:
        return (self.begin == 0) & (self.end == self.words[self.item])

    @property
    def cells(self) -> tuple[Tensor, Tensor, Tensor]:
        """Index into (batch, most + 1, most + 1)."""
        return self.item, self.begin, self.end

    def table(self, values: Tensor) -> Tensor:
        """Scatter one value per span: (spans,) -> (batch, most + 1, most + 1)."""
        edges = int(self.words.max()) + 1
        table = values.new_zeros(len(self.words), edges, edges)
        table[self.cells] = values
        return table


@dataclass(frozen=True)
class Chart(Supervised):
    """max(0, max over trees T of [score(T) + Δ(T)] − score(gold)), summed over sentences.

    Δ(T) counts the spans of T whose label differs from the gold tree's, which is 0 ("no constituent") off that tree.
    """

    scorer: SpanScorer | None = None
    """The span scorer of the model's head, set by `for_model`."""

    metrics: ClassVar[tuple[str, ...]] = ("accuracy",)

    def for_model(self, model: Model) -> "Chart":
        head = model.task_head
        if not isinstance(head, ChartHead):
            raise InputError("this model has no chart head, which parsing needs")
        return replace(self, scorer=head.scorer)

    def sums(self, outputs: Tensor, batch: TaskBatch) -> Sums:
        """Shape: outputs (batch, length, 2 hidden) or (tokens, 2 hidden)."""
        assert self.scorer is not None, "for_model comes first"
        spans, scores = span_scores(outputs, batch, self.scorer)
        gold = gold_labels(batch, spans)
        with torch.no_grad():
            labels, is_chosen = best_labels(scores + label_cost(scores, gold), spans)
        chosen = torch.where(is_chosen, _at(scores, labels) + (labels != gold), 0.0)
        margins = torch.zeros(len(spans.words), dtype=scores.dtype, device=scores.device)
        margins = margins.index_add(0, spans.item, chosen - _at(scores, gold))
        found = (is_chosen & (gold > 0) & (labels == gold)).sum()
        return Sums(margins.clamp(min=0).sum(), {"accuracy": Share(found, (gold > 0).sum())})

    def distillation_loss(self, outputs: Tensor, teacher: Tensor, batch: TaskBatch, temperature: float = 1.0) -> Tensor:
        """Return the squared error of the vectors of each word; both models have the same scorer to begin with."""
        is_word = batch.targets[POSITIONS].flatten() != IGNORED
        return squared_error(outputs.flatten(0, -2)[is_word], teacher.detach().flatten(0, -2)[is_word])

    def comparable_count(self, batch: TaskBatch) -> Tensor:
        return (batch.targets[POSITIONS] != IGNORED).sum()


def span_scores(outputs: Tensor, batch: TaskBatch, scorer: SpanScorer) -> tuple[SpanIndex, Tensor]:
    """Return all spans of a batch and the scores of their labels, "no constituent" first, in at least float32.

    Shape: outputs (batch, length, 2 hidden) or (tokens, 2 hidden) -> scores (spans, 1 + labels).
    """
    positions = batch.targets[POSITIONS].flatten()
    rows = (positions != IGNORED).nonzero().squeeze(-1)  # per sentence: its start, its words, its end
    positions = positions[rows]
    after, before = wide(outputs.flatten(0, -2)[rows]).chunk(2, dim=-1)
    is_fence = positions[1:] > 0  # not between the end of a sentence and the start of the next
    fences = (after[:-1] + before[1:])[is_fence]  # (fences, hidden)
    starts = (positions == 0).nonzero().squeeze(-1)
    words = torch.diff(starts, append=starts.new_tensor([len(positions)])) - 2
    items, begins, ends, offsets, offset = [], [], [], [], 0
    for item, count in enumerate(words.tolist()):
        begin, end = torch.triu_indices(count + 1, count + 1, 1, device=outputs.device)
        items.append(torch.full_like(begin, item))
        begins.append(begin)
        ends.append(end)
        offsets.append(torch.full_like(begin, offset))
        offset += count + 1
    spans, first = SpanIndex(torch.cat(items), torch.cat(begins), torch.cat(ends), words), torch.cat(offsets)
    scores = wide(scorer(fences[first + spans.end] - fences[first + spans.begin]))
    return spans, torch.cat([scores.new_zeros(len(scores), 1), scores], dim=-1)


def gold_labels(batch: TaskBatch, spans: SpanIndex) -> Tensor:
    """Return the gold label of every span, 0 for "no constituent"; Shape: (spans,)."""
    brackets = batch.targets[BRACKETS]
    item, place = (brackets[..., 0] != IGNORED).nonzero(as_tuple=True)
    begin, end, label = brackets[item, place].unbind(-1)
    edges = int(spans.words.max()) + 1
    table = torch.zeros(len(spans.words), edges, edges, dtype=torch.long, device=brackets.device)
    table[item, begin, end] = label
    return table[spans.cells]


def label_cost(scores: Tensor, gold: Tensor) -> Tensor:
    """Return 1 for every label but the gold one; Shape: (spans, 1 + labels)."""
    return torch.ones_like(scores).scatter(-1, gold[:, None], 0.0)


def best_labels(scores: Tensor, spans: SpanIndex) -> tuple[Tensor, Tensor]:
    """Return the best label of every span, and whether the span is in the best tree of its sentence.

    Shape: scores (spans, 1 + labels) -> (spans,) both.
    """
    scores = scores.clone()
    scores[spans.is_root, 0] = -torch.inf  # the root must be a constituent
    best, labels = scores.max(-1)
    return labels, best_trees(spans.table(best), spans.words)[spans.cells]


def _at(scores: Tensor, labels: Tensor) -> Tensor:
    return scores.gather(-1, labels[:, None]).squeeze(-1)

"""Fit the two factors of a factorised token table to the embeddings of the full table.

Factorisation minimises the error of the table, but the encoder reads the sum of token, position and type embeddings,
normalised and, in some models, projected. This module minimises the error of that output by a regression over the
vocabulary, weighted by token counts, at a few sampled positions per token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bertsmith.layers.embedding import Embedding
from bertsmith.models.model import Model

_POSITIONS = 4  # sampled per token
_TOLERANCE = 1e-5  # stop when a step lowers the loss by less than this share of its initial value
_HISTORY = 10
_BATCH = 1000
_TINY = 1e-12


class TokenStatistics:
    """Token counts of texts, and the position and type embeddings that are added to the tokens."""

    def __init__(self, model: Model, texts: Sequence[str]) -> None:
        tokenizer, embedding = model.require_tokenizer(), model.encoder.embedding
        vocabulary = model.config.encoder.vocabulary
        max_length = None if embedding.position is None else embedding.max_length
        tokens, positions = [], []
        for start in range(0, len(texts), _BATCH):
            rows = tokenizer.encode(texts[start : start + _BATCH], max_length=max_length, padding=False)["input_ids"]
            tokens += [torch.from_numpy(row) for row in rows]
            positions += [torch.arange(len(row)) for row in rows]
        all_tokens = torch.cat(tokens)
        self.counts = all_tokens.bincount(minlength=vocabulary)
        type_vector = None if embedding.type_table is None else embedding.type_table.detach()[0]
        self.offsets = [type_vector]
        """Vectors, each (vocabulary, embedding width) or (embedding width,); None if nothing is added."""
        if embedding.position is not None:
            table = embedding.position.table.detach()
            sampled = _sample_positions(all_tokens, torch.cat(positions), self.counts)
            self.offsets = [table[row] if type_vector is None else table[row] + type_vector for row in sampled]

    @property
    def weights(self) -> Tensor:
        """Counts clamped to at least 1, since unseen tokens may occur in other texts; (vocabulary,), float64."""
        return self.counts.clamp_min(1).double()


def _sample_positions(tokens: Tensor, positions: Tensor, counts: Tensor) -> list[Tensor]:
    """Sample positions of each token, evenly over the texts; unseen tokens get positions of any token.

    Shape: tokens, positions (tokens of all texts,), counts (vocabulary,) -> (vocabulary,) each
    """
    ordered = positions[tokens.argsort(stable=True)]
    starts = counts.cumsum(0) - counts
    sampled = []
    for index in range(_POSITIONS):
        share = (2 * index + 1) / (2 * _POSITIONS)
        fallback = positions[int(share * len(positions))]
        own = ordered[(starts + (share * counts).long()).clamp_max(len(ordered) - 1)]
        sampled.append(torch.where(counts > 0, own, fallback))
    return sampled


def embedded(embedding: Embedding, table: Tensor, offset: Tensor | None) -> Tensor:
    """Return the embedding layer's output for every row of a table plus an offset.

    Shape: table (vocabulary, embedding width) -> (vocabulary, width)
    """
    vectors = table if embedding.scale is None else table * embedding.scale
    states: Tensor = embedding.widen(embedding.norm(vectors if offset is None else vectors + offset))
    return states


@torch.no_grad()
def embedding_error(model: Model, whole: Model, statistics: TokenStatistics) -> float:
    """Return the RMS error of the embeddings relative to their RMS size, weighted by token counts."""
    weights = statistics.weights.to(model.device)
    error = size = 0.0
    for offset in statistics.offsets:
        target = embedded(whole.encoder.embedding, whole.token_table, offset)
        states = embedded(model.encoder.embedding, model.token_table, offset)
        error += float((weights * (states - target).square().sum(1)).sum())
        size += float((weights * target.square().sum(1)).sum())
    return (error / max(size, _TINY)) ** 0.5


def repair(model: Model, whole: Model, statistics: TokenStatistics, steps: int) -> None:
    """Fit the factors of a model's token table in place with at most `steps` L-BFGS steps over the vocabulary.

    The loss is the weighted mean of |embedding - embedding of the whole model|²; the fit is deterministic. Both factors
    are preconditioned, because rare tokens and small singular values would otherwise take thousands of steps.
    """
    embedding = model.encoder.embedding
    table, factor = embedding.token_table, embedding.token_factor
    assert table is not None
    assert factor is not None
    with torch.no_grad():
        targets = [embedded(whole.encoder.embedding, whole.token_table, offset) for offset in statistics.offsets]
    weights = statistics.weights.to(table)
    weights = (weights / (weights.sum() * len(targets)))[:, None]
    row_scale = weights.sqrt()
    lengths = factor.detach().norm(dim=1).clamp_min(_TINY)
    left = (row_scale * table.detach() * lengths).contiguous()
    sizes = left.norm(dim=0).clamp_min(_TINY)
    right = ((sizes / lengths)[:, None] * factor.detach()).contiguous()
    start = left.clone(), right.clone()
    for tensor in (left, right):
        tensor.requires_grad_(True)

    def loss_of(left: Tensor, right: Tensor) -> Tensor:
        rows = (left / row_scale) @ (right / sizes[:, None])
        losses = [
            (weights * (embedded(embedding, rows, offset) - target).square()).sum()
            for offset, target in zip(statistics.offsets, targets, strict=True)
        ]
        return torch.stack(losses).sum()

    with torch.no_grad():
        first = loss_of(*start)
    if steps == 0 or first == 0:
        return
    optimizer = torch.optim.LBFGS(
        [left, right],
        max_iter=steps,
        max_eval=2 * steps,
        history_size=_HISTORY,
        tolerance_grad=0.0,
        tolerance_change=_TOLERANCE,
        line_search_fn="strong_wolfe",
    )

    def closure() -> float:
        loss = loss_of(left, right) / first
        left.grad, right.grad = torch.autograd.grad(loss, (left, right))
        return loss.item()

    optimizer.step(closure)
    with torch.no_grad():
        if not loss_of(left, right) < first:  # the factors were already optimal up to rounding
            return
        outer, inner = left / row_scale, right / sizes[:, None]
        balance = (outer.norm(dim=0).clamp_min(_TINY) / inner.norm(dim=1).clamp_min(_TINY)).sqrt()
        embedding.token_table = nn.Parameter(outer / balance)
        embedding.token_factor = nn.Parameter(inner * balance[:, None])

"""Fit the two factors of a token table so that the embeddings match those of the whole table.

The factorisation minimises the error of the table. The encoder reads something else: the sum of token, position and
type, normalised and, in some models, projected. This module minimises the error of that output, by a regression over
the vocabulary in which a token counts as often as it occurs, at a few of its positions.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bertsmith.layers.embedding import Embedding
from bertsmith.models.model import Model

_PLACES = 4  # positions sampled for every token
_TOLERANCE = 1e-5  # stop when a step lowers the loss by less than this share of its first value
_HISTORY = 10
_BATCH = 1000
_TINY = 1e-12


class Surroundings:
    """Counts of the tokens in texts, and the position and type vectors that are added to them."""

    def __init__(self, model: Model, texts: Sequence[str]) -> None:
        tokenizer, embedding = model.require_tokenizer(), model.encoder.embedding
        vocabulary = model.config.encoder.vocabulary
        max_length = None if embedding.position is None else embedding.max_length
        tokens, positions = [], []
        for start in range(0, len(texts), _BATCH):
            rows = tokenizer.encode(texts[start : start + _BATCH], max_length=max_length, padding=False)["input_ids"]
            tokens += [torch.from_numpy(row) for row in rows]
            positions += [torch.arange(len(row)) for row in rows]
        every = torch.cat(tokens)
        self.counts = every.bincount(minlength=vocabulary)
        type_vector = None if embedding.type_table is None else embedding.type_table.detach()[0]
        self.offsets = [type_vector]
        """Vectors, each (vocabulary, embedding width) or (embedding width,); None if nothing is added."""
        if embedding.position is not None:
            table = embedding.position.table.detach()
            chosen = _spread(every, torch.cat(positions), self.counts)
            self.offsets = [table[row] if type_vector is None else table[row] + type_vector for row in chosen]

    @property
    def weights(self) -> Tensor:
        """The counts, at least 1, since unseen tokens may occur in other texts. Shape: (vocabulary,), float64."""
        return self.counts.clamp_min(1).double()


def _spread(tokens: Tensor, positions: Tensor, counts: Tensor) -> list[Tensor]:
    """Sample positions of each token, evenly over the texts; for an unseen token, positions of all tokens.

    Shape: tokens, places (tokens of all texts,), counts (vocabulary,) -> (vocabulary,) each
    """
    ordered = positions[tokens.argsort(stable=True)]
    starts = counts.cumsum(0) - counts
    found = []
    for index in range(_PLACES):
        share = (2 * index + 1) / (2 * _PLACES)
        elsewhere = positions[int(share * len(positions))]
        own = ordered[(starts + (share * counts).long()).clamp_max(len(ordered) - 1)]
        found.append(torch.where(counts > 0, own, elsewhere))
    return found


def embedded(embedding: Embedding, table: Tensor, offset: Tensor | None) -> Tensor:
    """Return the output of an embedding for every row of a table plus an offset.

    Shape: table (vocabulary, embedding width) -> (vocabulary, width)
    """
    vectors = table if embedding.scale is None else table * embedding.scale
    states: Tensor = embedding.widen(embedding.norm(vectors if offset is None else vectors + offset))
    return states


@torch.no_grad()
def embedding_error(model: Model, whole: Model, surroundings: Surroundings) -> float:
    """Return the RMS error of the embeddings relative to their RMS size, weighted by token counts."""
    weights = surroundings.weights.to(model.device)
    off = size = 0.0
    for offset in surroundings.offsets:
        wanted = embedded(whole.encoder.embedding, whole.token_table, offset)
        states = embedded(model.encoder.embedding, model.token_table, offset)
        off += float((weights * (states - wanted).square().sum(1)).sum())
        size += float((weights * wanted.square().sum(1)).sum())
    return (off / max(size, _TINY)) ** 0.5


def repair(model: Model, whole: Model, surroundings: Surroundings, steps: int) -> None:
    """Fit the factors of a model's token table in place, by at most `steps` steps of L-BFGS over all tokens.

    The loss is the weighted mean of |embedding - embedding of the whole model|²; the fit is deterministic. Both factors
    are preconditioned, otherwise rare tokens and small singular values would take thousands of steps.
    """
    embedding = model.encoder.embedding
    table, factor = embedding.token_table, embedding.token_factor
    assert table is not None
    assert factor is not None
    with torch.no_grad():
        wanted = [embedded(whole.encoder.embedding, whole.token_table, offset) for offset in surroundings.offsets]
    weights = surroundings.weights.to(table)
    weights = (weights / (weights.sum() * len(wanted)))[:, None]
    stretch = weights.sqrt()
    lengths = factor.detach().norm(dim=1).clamp_min(_TINY)
    left = (stretch * table.detach() * lengths).contiguous()
    sizes = left.norm(dim=0).clamp_min(_TINY)
    right = ((sizes / lengths)[:, None] * factor.detach()).contiguous()
    start = left.clone(), right.clone()
    for part in (left, right):
        part.requires_grad_(True)

    def loss_of(left: Tensor, right: Tensor) -> Tensor:
        rows = (left / stretch) @ (right / sizes[:, None])
        losses = [
            (weights * (embedded(embedding, rows, offset) - states).square()).sum()
            for offset, states in zip(surroundings.offsets, wanted, strict=True)
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
        if not loss_of(left, right) < first:  # rounding errors, if the factors were optimal before
            return
        outer, inner = left / stretch, right / sizes[:, None]
        balance = (outer.norm(dim=0).clamp_min(_TINY) / inner.norm(dim=1).clamp_min(_TINY)).sqrt()
        embedding.token_table = nn.Parameter(outer / balance)
        embedding.token_factor = nn.Parameter(inner * balance[:, None])

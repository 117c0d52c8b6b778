"""A trained token table as the product of two smaller ones: truncated singular value decomposition, weighted or not."""

import copy

import torch
from torch import Tensor, nn

from bertsmith.errors import InputError
from bertsmith.models.model import Model

_TINY = 1e-30  # a column of nothing is divided by it


@torch.no_grad()
def factorise(model: Model, rank: int, weights: Tensor | None = None) -> Model:
    """A copy of a model whose token table E is A · B, (vocabulary, rank) · (rank, width), the nearest of that rank.

    With `weights`, such as how often each token occurs, it is the one of least Σ weight · |row of E - row of A · B|²; a
    token of weight 0 gets the best that B has for it. Only the tokens' table is replaced: positions, types and the norm
    stay as wide as they were, and heads over the vocabulary score with A · B, so at full rank nothing changes. Below
    it, train on, by distillation for example, or repair the factors alone (shrinking/embedding_repair.py).
    Shape: weights (vocabulary,).
    """
    table = model.token_table
    most = min(table.shape)
    if not 1 <= rank <= most:
        raise InputError(f"rank is {rank}; allowed: 1 to {most}")
    left, right = _nearest(table.double(), rank, _checked(weights, table))
    root = left.norm(dim=0).clamp_min(_TINY).sqrt()  # half to either side, so that both learn at the same pace
    encoder = model.config.encoder
    config = model.config.changed(encoder=encoder.changed(embedding=encoder.embedding.changed(rank=rank)))
    small = copy.deepcopy(model)
    small.config = config
    small.encoder.embedding.token_table = nn.Parameter((left / root).to(table))
    small.encoder.embedding.token_factor = nn.Parameter((root[:, None] * right).to(table))
    return small


def _nearest(table: Tensor, rank: int, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """The two factors, the second with orthonormal rows.

    The rows of least weighted error lie in the space of the first right singular vectors of the weighted table, and
    each is the projection of its own onto it, whatever its weight.
    """
    weighted = table if weights is None else weights.sqrt()[:, None] * table
    right = torch.linalg.svd(weighted, full_matrices=False)[2][:rank]
    return table @ right.T, right


def _checked(weights: Tensor | None, table: Tensor) -> Tensor | None:
    if weights is None:
        return None
    if weights.shape != table.shape[:1]:
        raise InputError(f"weights has shape {tuple(weights.shape)}; allowed: ({len(table)},), one for every token")
    weights = weights.to(table.device, torch.float64)
    if not (weights.isfinite().all() and weights.min() >= 0 and weights.max() > 0):
        raise InputError(f"weights goes from {weights.min():g} to {weights.max():g}; allowed: 0 and up, some above 0")
    return weights

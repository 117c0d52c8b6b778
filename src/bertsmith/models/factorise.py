"""A trained token table as the product of two smaller ones: truncated singular value decomposition."""

import copy

import torch
from torch import nn

from bertsmith.errors import InputError
from bertsmith.models.model import Model


@torch.no_grad()
def factorise(model: Model, rank: int) -> Model:
    """A copy of a model whose token table E is A · B, (vocabulary, rank) · (rank, width), the nearest of that rank.

    Only the tokens' table is replaced: positions, types and the norm stay as wide as they were, and heads over the
    vocabulary score with A · B, so at full rank nothing changes. Below it, train on, by distillation for example.
    """
    table = model.token_table
    most = min(table.shape)
    if not 1 <= rank <= most:
        raise InputError(f"rank is {rank}; allowed: 1 to {most}")
    left, sizes, right = torch.linalg.svd(table.double(), full_matrices=False)
    root = sizes[:rank].sqrt()  # half to either side, so that both learn at the same pace
    encoder = model.config.encoder
    config = model.config.changed(encoder=encoder.changed(embedding=encoder.embedding.changed(rank=rank)))
    small = copy.deepcopy(model)
    small.config = config
    small.encoder.embedding.token_table = nn.Parameter((left[:, :rank] * root).to(table))
    small.encoder.embedding.token_factor = nn.Parameter((root[:, None] * right[:rank]).to(table))
    return small

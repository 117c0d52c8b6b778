"""A trained model whose vocabulary grows: rows for new tokens, made from those of the tokens that spelled them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from bertsmith.models.build import share
from bertsmith.models.config import ModelConfig
from bertsmith.models.model import Model

_SCORING = ("masked_tokens", "next_token")  # heads with one bias for every token


@torch.no_grad()
def add_tokens(model: Model, parts: Mapping[int, Sequence[int]]) -> Model:
    """The same folded model, its generator too, with rows for new tokens: the mean of the rows of each one's parts.

    The bias of a new token is the mean of theirs as well, so its score is the mean of their scores: as likely as its
    parts are, on the (geometric) average. A token without parts gets the mean of all. Rows that stand ready in a table
    larger than its tokenizer are used first; all other rows stay as they are, bit by bit.
    """
    needed = max(parts, default=-1) + 1
    for part in (model, *([] if model.generator is None else [model.generator])):
        embedding = part.encoder.embedding
        assert embedding.token_table is not None
        embedding.token_table = nn.Parameter(_grown(embedding.token_table, parts, needed))
        for kind, head in part.heads.items():
            if kind in _SCORING and isinstance(head.bias, Tensor):
                head.bias = nn.Parameter(_grown(head.bias, parts, needed))
    generator = model.config.generator
    if generator is not None and model.generator is not None:
        model.generator.config = _with_rows(model.generator.config, needed)
        generator = generator.changed(model=_with_rows(generator.model, needed))
    # both at once: with shared embeddings one alone would not be valid
    model.config = _with_rows(model.config.changed(generator=None), needed).changed(generator=generator)
    share(model)
    return model


def _with_rows(config: ModelConfig, needed: int) -> ModelConfig:
    return config.changed(encoder=config.encoder.changed(vocabulary=max(needed, config.encoder.vocabulary)))


def _grown(table: Tensor, parts: Mapping[int, Sequence[int]], needed: int) -> Tensor:
    """A table of at least the rows that are needed; Shape: (vocabulary, …) -> (rows, …)."""
    mean = table.mean(0, keepdim=True)
    grown = torch.cat([table, mean.expand(max(0, needed - len(table)), *table.shape[1:])])
    for token, ids in parts.items():
        grown[token] = table[list(ids)].mean(0) if ids else mean[0]
    return grown

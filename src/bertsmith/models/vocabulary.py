"""Extend the vocabulary of a trained model with averaged rows, or reduce it to a subset."""

import copy
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from bertsmith.errors import InputError
from bertsmith.models.build import share
from bertsmith.models.config import EncoderConfig, ModelConfig
from bertsmith.models.encoder import Encoder
from bertsmith.models.generator import fold
from bertsmith.models.heads.decoder_exits import DecoderExit
from bertsmith.models.model import Model
from bertsmith.models.seq2seq import Seq2Seq
from bertsmith.text.tokenizer import Tokenizer

_VOCABULARY_HEADS = ("masked_tokens", "next_token")  # heads with one bias per token


@torch.no_grad()
def add_tokens(model: Model, parts: Mapping[int, Sequence[int]]) -> Model:
    """Add rows for new tokens to a folded model and its generator: the mean of the rows of each token's parts.

    The bias of a new token is the mean of its parts' biases, so its score is the mean of their scores. A token without
    parts gets the mean of all rows. Unused rows of a table larger than its tokenizer are used first; all other rows
    stay bitwise the same.
    """
    needed = max(parts, default=-1) + 1
    for network in (model, *([] if model.generator is None else [model.generator])):
        embedding = network.encoder.embedding
        assert embedding.token_table is not None
        embedding.token_table = nn.Parameter(_extend_table(embedding.token_table, parts, needed))
        for kind, head in network.heads.items():
            if kind in _VOCABULARY_HEADS and isinstance(head.bias, Tensor):
                head.bias = nn.Parameter(_extend_table(head.bias, parts, needed))
    generator = model.config.generator
    if generator is not None and model.generator is not None:
        model.generator.config = _with_rows(model.generator.config, needed)
        generator = generator.changed(model=_with_rows(generator.model, needed))
    # in one change: with shared embeddings the vocabularies must be equal
    model.config = _with_rows(model.config.changed(generator=None), needed).changed(generator=generator)
    share(model)
    return model


@torch.no_grad()
def keep_tokens(model: Model, ids: Sequence[int], tokenizer: Tokenizer | None = None) -> Model:
    """Return a copy of a model with only the tokens `ids`, in this order, and the tokenizer with their new ids.

    The kept rows of all token tables and output biases stay bitwise the same, so outputs for texts in these tokens do
    not change. An unfolded model is returned folded.
    """
    rows = min(stack.vocabulary for stack in _stacks(model.config))
    if not ids or len(set(ids)) < len(ids) or not 0 <= min(ids) <= max(ids) < rows:
        raise InputError(f"ids has {len(ids)} entries; allowed: one or more of 0 to {rows - 1}, without duplicates")
    if tokenizer is not None and tokenizer.size != len(ids):
        raise InputError(f"the tokenizer has {tokenizer.size} tokens and ids {len(ids)} entries; they must be equal")
    memo = {} if model.tokenizer is None else {id(model.tokenizer): tokenizer}  # do not copy the old tokenizer
    small = fold(copy.deepcopy(model, memo))
    small.tokenizer = tokenizer
    index = torch.tensor(ids, device=small.device)
    for network in (small, *([] if small.generator is None else [small.generator])):
        for embedding in (stack.embedding for stack in _encoders(network)):
            if embedding.token_table is not None:
                embedding.token_table = _select_rows(embedding.token_table, index)
        for kind, head in network.heads.items():
            if kind in _VOCABULARY_HEADS and isinstance(head.bias, nn.Parameter):
                head.bias = _select_rows(head.bias, index)
        for module in network.modules():
            if isinstance(module, DecoderExit) and module.table is not None:
                module.table = _select_rows(module.table, index)
    generator = small.config.generator
    if generator is not None and small.generator is not None:
        small.generator.config = _with_vocabulary(small.generator.config, len(ids))
        generator = generator.changed(model=_with_vocabulary(generator.model, len(ids)))
    small.config = _with_vocabulary(small.config.changed(generator=None), len(ids)).changed(generator=generator)
    share(small)
    return small


def _stacks(config: ModelConfig) -> Iterator[EncoderConfig]:
    yield config.encoder
    if config.decoder is not None:
        yield config.decoder
    if config.generator is not None:
        yield from _stacks(config.generator.model)


def _encoders(model: Model) -> list[Encoder]:
    return [model.encoder, model.decoder] if isinstance(model, Seq2Seq) else [model.encoder]


def _select_rows(table: nn.Parameter, ids: Tensor) -> nn.Parameter:
    return nn.Parameter(table[ids], requires_grad=table.requires_grad)


def _with_vocabulary(config: ModelConfig, vocabulary: int) -> ModelConfig:
    decoder = None if config.decoder is None else config.decoder.changed(vocabulary=vocabulary)
    # in one change: a decoder that reads the encoder's table must have the same vocabulary
    return config.changed(encoder=config.encoder.changed(vocabulary=vocabulary), decoder=decoder)


def _with_rows(config: ModelConfig, needed: int) -> ModelConfig:
    return config.changed(encoder=config.encoder.changed(vocabulary=max(needed, config.encoder.vocabulary)))


def _extend_table(table: Tensor, parts: Mapping[int, Sequence[int]], needed: int) -> Tensor:
    """Return the table with at least `needed` rows; Shape: (vocabulary, …) -> (rows, …)."""
    mean = table.mean(0, keepdim=True)
    grown = torch.cat([table, mean.expand(max(0, needed - len(table)), *table.shape[1:])])
    for token, ids in parts.items():
        grown[token] = table[list(ids)].mean(0) if ids else mean[0]
    return grown

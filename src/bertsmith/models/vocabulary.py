"""A trained model whose vocabulary grows, by rows made from those of other tokens, or shrinks to some of its own."""

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


@torch.no_grad()
def keep_tokens(model: Model, ids: Sequence[int], tokenizer: Tokenizer | None = None) -> Model:
    """A copy of a model that knows only the tokens `ids`, in this order, and the tokenizer that gives their new ids.

    The rows of the encoder's table, of a decoder's and of a generator's stay as they are, bit by bit, and so does the
    bias of every token's score: of texts in these tokens nothing changes. A model in the form in which it is trained
    against a generator comes back folded.
    """
    rows = min(stack.vocabulary for stack in _stacks(model.config))
    if not ids or len(set(ids)) < len(ids) or not 0 <= min(ids) <= max(ids) < rows:
        raise InputError(f"ids holds {len(ids)} tokens; allowed: some of 0 to {rows - 1}, each once")
    if tokenizer is not None and tokenizer.size != len(ids):
        raise InputError(f"the tokenizer has {tokenizer.size} tokens and ids {len(ids)}; they must be as many")
    memo = {} if model.tokenizer is None else {id(model.tokenizer): tokenizer}  # the old one needs no copy
    small = fold(copy.deepcopy(model, memo))
    small.tokenizer = tokenizer
    chosen = torch.tensor(ids, device=small.device)
    for part in (small, *([] if small.generator is None else [small.generator])):
        for embedding in (stack.embedding for stack in _networks(part)):
            if embedding.token_table is not None:
                embedding.token_table = _chosen(embedding.token_table, chosen)
        for kind, head in part.heads.items():
            if kind in _SCORING and isinstance(head.bias, nn.Parameter):
                head.bias = _chosen(head.bias, chosen)
        for module in part.modules():
            if isinstance(module, DecoderExit) and module.table is not None:
                module.table = _chosen(module.table, chosen)
    generator = small.config.generator
    if generator is not None and small.generator is not None:
        small.generator.config = _of_size(small.generator.config, len(ids))
        generator = generator.changed(model=_of_size(generator.model, len(ids)))
    small.config = _of_size(small.config.changed(generator=None), len(ids)).changed(generator=generator)
    share(small)
    return small


def _stacks(config: ModelConfig) -> Iterator[EncoderConfig]:
    yield config.encoder
    if config.decoder is not None:
        yield config.decoder
    if config.generator is not None:
        yield from _stacks(config.generator.model)


def _networks(model: Model) -> list[Encoder]:
    return [model.encoder, model.decoder] if isinstance(model, Seq2Seq) else [model.encoder]


def _chosen(table: nn.Parameter, ids: Tensor) -> nn.Parameter:
    return nn.Parameter(table[ids], requires_grad=table.requires_grad)


def _of_size(config: ModelConfig, vocabulary: int) -> ModelConfig:
    decoder = None if config.decoder is None else config.decoder.changed(vocabulary=vocabulary)
    # both at once: a decoder that reads the encoder's table must have its size
    return config.changed(encoder=config.encoder.changed(vocabulary=vocabulary), decoder=decoder)


def _with_rows(config: ModelConfig, needed: int) -> ModelConfig:
    return config.changed(encoder=config.encoder.changed(vocabulary=max(needed, config.encoder.vocabulary)))


def _grown(table: Tensor, parts: Mapping[int, Sequence[int]], needed: int) -> Tensor:
    """A table of at least the rows that are needed; Shape: (vocabulary, …) -> (rows, …)."""
    mean = table.mean(0, keepdim=True)
    grown = torch.cat([table, mean.expand(max(0, needed - len(table)), *table.shape[1:])])
    for token, ids in parts.items():
        grown[token] = table[list(ids)].mean(0) if ids else mean[0]
    return grown

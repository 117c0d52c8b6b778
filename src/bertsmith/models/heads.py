"""What stands on an encoder: states → token scores, sentence scores, one vector."""

from abc import ABC, abstractmethod
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from bertsmith.layers.activation import ACTIVATIONS, Activation
from bertsmith.layers.elastic import ElasticLinear
from bertsmith.layers.norm import Norm
from bertsmith.settings import ByKind, Record


class HeadConfig(Record, ABC):
    """The settings of one kind of head."""

    kind: str

    @abstractmethod
    def build(self, width: int, embedding_width: int, vocabulary: int) -> nn.Module: ...


class MaskedTokensConfig(HeadConfig):
    """Scores over the vocabulary."""

    kind: Literal["masked_tokens"] = "masked_tokens"
    activation: Activation = "gelu"
    epsilon: float = Field(default=1e-12, gt=0)

    def build(self, width: int, embedding_width: int, vocabulary: int) -> "MaskedTokens":
        return MaskedTokens(width, embedding_width, vocabulary, self.activation, self.epsilon)


class PoolerConfig(HeadConfig):
    """One vector for the sequence."""

    kind: Literal["pooler"] = "pooler"

    def build(self, width: int, embedding_width: int, vocabulary: int) -> "Pooler":
        return Pooler(width)


class NextSentenceConfig(HeadConfig):
    """Does the second segment follow the first one in its document?"""

    kind: Literal["next_sentence"] = "next_sentence"

    def build(self, width: int, embedding_width: int, vocabulary: int) -> nn.Module:
        return ElasticLinear(width, 2)


class ReplacedTokensConfig(HeadConfig):
    """Was the token replaced (ELECTRA)?"""

    kind: Literal["replaced_tokens"] = "replaced_tokens"
    activation: Activation = "gelu"

    def build(self, width: int, embedding_width: int, vocabulary: int) -> "ReplacedTokens":
        return ReplacedTokens(width, self.activation)


class NextTokenConfig(HeadConfig):
    """Scores over the vocabulary for the token that comes next."""

    kind: Literal["next_token"] = "next_token"
    has_bias: bool = False

    def build(self, width: int, embedding_width: int, vocabulary: int) -> "NextToken":
        if width != embedding_width:
            raise ValueError(f"a next_token head needs an embedding as wide as the states: {embedding_width} ≠ {width}")
        return NextToken(vocabulary if self.has_bias else None)


HEADS: dict[str, type[HeadConfig]] = {
    "masked_tokens": MaskedTokensConfig,
    "next_token": NextTokenConfig,
    "pooler": PoolerConfig,
    "next_sentence": NextSentenceConfig,
    "replaced_tokens": ReplacedTokensConfig,
}

AnyHead = Annotated[HeadConfig, ByKind(HEADS)]


class MaskedTokens(nn.Module):
    """Transform, then the product with the embedding table, which the caller hands in: the weights are tied by use."""

    def __init__(self, width: int, embedding_width: int, vocabulary: int, activation: Activation, epsilon: float):
        super().__init__()
        self.activation = activation
        self.transform = ElasticLinear(width, embedding_width)
        self.norm = Norm(embedding_width, epsilon)
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, hidden: Tensor, table: Tensor) -> Tensor:
        """The scores of every token of the vocabulary.

        Shape: hidden (…, width), table (vocabulary, embedding width) -> (…, vocabulary). On a GPU the last axis is
        rounded up to a multiple of 64, the extra scores being -inf: the matrix units want aligned rows.
        """
        return _token_scores(self.norm(ACTIVATIONS[self.activation](self.transform(hidden))), table, self.bias)


class NextToken(nn.Module):
    """The product with the embedding table, which the caller hands in."""

    def __init__(self, vocabulary: int | None) -> None:
        super().__init__()
        self.bias = None if vocabulary is None else nn.Parameter(torch.zeros(vocabulary))

    def forward(self, hidden: Tensor, table: Tensor) -> Tensor:
        """The scores of every token of the vocabulary, as those of `MaskedTokens`."""
        bias = table.new_zeros(table.shape[0]) if self.bias is None else self.bias
        return _token_scores(hidden, table, bias)


def _token_scores(hidden: Tensor, table: Tensor, bias: Tensor) -> Tensor:
    """hidden · tableᵀ + bias; on a GPU the last axis is rounded up to a multiple of 64, which the matrix units want."""
    missing = -table.shape[0] % 64 if table.is_cuda else 0
    if missing:
        table, bias = pad(table, (0, 0, 0, missing)), pad(bias, (0, missing), value=-torch.inf)
    return linear(hidden, table, bias)


class Pooler(nn.Module):
    """tanh of a linear layer on the first token's state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = ElasticLinear(width, width)

    def forward(self, first: Tensor) -> Tensor:
        return torch.tanh(self.project(first))


class ReplacedTokens(nn.Module):
    """One score for every token: above 0 means "replaced"."""

    def __init__(self, width: int, activation: Activation) -> None:
        super().__init__()
        self.activation = activation
        self.transform = ElasticLinear(width, width)
        self.score = ElasticLinear(width, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.score(ACTIVATIONS[self.activation](self.transform(hidden))).squeeze(-1)

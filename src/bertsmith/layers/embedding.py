"""Token ids → vectors: token, position and type tables, norm, dropout, and the widening of a factorised table."""

from collections.abc import Callable
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import embedding

from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.layers.elementwise import Norm, NormKind, TokenDropout
from bertsmith.layers.linear import ElasticLinear
from bertsmith.layers.positions import POSITIONS
from bertsmith.settings import Record


class EmbeddingConfig(Record):
    """The input of an encoder."""

    width: int | None = Field(default=None, gt=0)
    """Width of the tables; if it differs from the encoder's, a linear layer follows (factorised embedding)."""
    positions: Literal["learned", "sinusoid", "sinusoid_halves", "none"] = "learned"
    """What is added for the place of a token; "none" leaves places to the mixers. Sines and cosines alternate in
    "sinusoid" and stand in two halves in "sinusoid_halves"."""
    max_length: int = Field(default=512, gt=0)
    """The most tokens a text is given, and, where positions are added, the most that a sequence may have."""
    types: int = Field(default=2, ge=0)
    """Number of token types (segments); 0 for none."""
    is_scaled: bool = False
    """Multiply token vectors by √width, as the Transformer does."""
    rank: int | None = Field(default=None, gt=0)
    """Keep the token table as a product of two, (vocabulary, rank) · (rank, width), and nothing else of the embedding;
    `factorise` makes such a model of a trained one."""
    table: Literal["own", "given", "difference"] = "own"
    """Where the token vectors come from: a table of its own; the encoder's, for a decoder; or the generator's, to which
    its own is added, for an encoder in training whose generator must not learn from it (models/generator.py)."""
    has_norm: bool = True
    norm: NormKind = "layer"
    """The kind of the norm."""
    epsilon: float = Field(default=1e-12, gt=0)
    """Of the norm."""
    has_bias: bool = True
    """Of the norm and of the layer that widens."""
    dropout: float = Field(default=0.1, ge=0, lt=1)

    def build(self, vocabulary: int, width: int) -> "Embedding":
        return Embedding(self, vocabulary, width)


Perturbation = Callable[[Tensor], Tensor]
"""Replaces the sum of the vectors before it is normalised, in adversarial training."""


class TokenRows(nn.Module):
    """How token vectors come out of their table: as they are. It has no weights; others round them or keep codes."""

    def forward(self, tokens: Tensor, table: Tensor | None) -> Tensor:
        """The vectors of tokens: (…,) -> (…, columns)."""
        return embedding(tokens, self.whole(table))

    def whole(self, table: Tensor | None) -> Tensor:
        """The vectors of all tokens, (vocabulary, columns)."""
        assert table is not None, "an embedding without a table of its own must be given one"
        return table


class Embedding(nn.Module):
    """The sum of token, position and type vectors, normalised."""

    def __init__(self, config: EmbeddingConfig, vocabulary: int, width: int) -> None:
        super().__init__()
        inner = config.width or width
        self.max_length = config.max_length
        self.scale = inner**0.5 if config.is_scaled else None
        columns = config.rank or inner
        self.is_difference = config.table == "difference"
        self.token_table = None if config.table == "given" else nn.Parameter(torch.empty(vocabulary, columns))
        self.rows = TokenRows()
        self.token_factor = None if config.rank is None else nn.Parameter(torch.empty(config.rank, inner))
        self.position = None if config.positions == "none" else POSITIONS[config.positions](config.max_length, inner)
        self.type_table = nn.Parameter(torch.empty(config.types, inner)) if config.types else None
        norm = Norm(inner, config.epsilon, config.norm, has_bias=config.has_bias)
        self.norm = norm if config.has_norm else nn.Identity()
        self.dropout = TokenDropout(config.dropout)
        self.widen = ElasticLinear(inner, width, bias=config.has_bias) if inner != width else nn.Identity()

    def forward(
        self,
        tokens: Tensor,
        layout: SequenceLayout,
        types: Tensor | None = None,
        table: Tensor | None = None,
        perturb: Perturbation | None = None,
    ) -> Tensor:
        """The first states; `table` holds the token vectors where the embedding has none, or a difference, of its own.

        Shape: tokens and types (batch, length) or (tokens,); the result has one more axis, the encoder's width.
        """
        positions = None
        if self.position is not None:
            self._check_length(layout.max_length)
            positions = self.position(tokens, layout)
        vectors = self._sum(tokens, positions, types, table)
        if perturb is not None:
            vectors = perturb(vectors)
        return self.widen(self.dropout(self.norm(vectors), layout))

    def at(self, tokens: Tensor, position: int, table: Tensor | None = None) -> Tensor:
        """Return the embeddings of one token of each sequence, all at one position: (batch,) -> (batch, width)."""
        row = None
        if self.position is not None:
            self._check_length(position + 1)
            row = self.position.table[position]
        layout = SequenceLayout.full(tokens.shape[0], 1)
        return self.widen(self.dropout(self.norm(self._sum(tokens, row, None, table)), layout))

    def _sum(self, tokens: Tensor, positions: Tensor | None, types: Tensor | None, table: Tensor | None) -> Tensor:
        vectors = self._vectors(tokens, table)
        if self.token_factor is not None:
            vectors = vectors @ self.token_factor  # (…, rank) -> (…, embedding width)
        if self.scale is not None:
            vectors = vectors * self.scale
        if positions is not None:
            vectors = vectors + positions
        if self.type_table is not None:
            vectors = vectors + (self.type_table[0] if types is None else embedding(types, self.type_table))
        return vectors

    def _vectors(self, tokens: Tensor, given: Tensor | None) -> Tensor:
        if self.is_difference:
            assert given is not None, "an embedding that is a difference must be given the table it is added to"
            assert self.token_table is not None
            return embedding(tokens, given.detach()) + embedding(tokens, self.token_table)
        return self.rows(tokens, self.token_table if given is None else given)

    @torch.no_grad()
    def initialise(self, init_std: float, generator: torch.Generator | None) -> None:
        """A difference begins with nothing."""
        if self.is_difference and self.token_table is not None:
            self.token_table.zero_()

    def _check_length(self, length: int) -> None:
        if length > self.max_length:
            raise InputError(f"a sequence may have {length} tokens; this model takes at most {self.max_length}")

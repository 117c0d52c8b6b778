"""Embedding of token ids: token, position and type tables, norm, dropout, and the projection of a factorised table."""

from collections.abc import Callable
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, pad

from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.layers.elementwise import Norm, NormKind, TokenDropout
from bertsmith.layers.linear import ElasticLinear
from bertsmith.layers.positions import POSITIONS, position_vectors
from bertsmith.ops.token_loss import Sampling, TokenLoss, token_loss
from bertsmith.settings import Record


class EmbeddingConfig(Record):
    """The input of an encoder."""

    width: int | None = Field(default=None, gt=0)
    """Width of the tables; if it differs from the encoder's, a linear layer follows (factorised embedding)."""
    positions: Literal["learned", "sinusoid", "sinusoid_halves", "none"] = "learned"
    """Absolute position embedding; "none" leaves positions to the mixers. Sines and cosines alternate in "sinusoid" and
    form two halves in "sinusoid_halves"."""
    max_length: int = Field(default=512, gt=0)
    """Texts are truncated to this many tokens; with absolute positions no sequence may be longer."""
    types: int = Field(default=2, ge=0)
    """Number of token types (segments); 0 for none."""
    is_scaled: bool = False
    """Multiply token vectors by √width, as the Transformer does."""
    rank: int | None = Field(default=None, gt=0)
    """Factorise the token table, and only that table: (vocabulary, rank) · (rank, width). `factorise` turns a trained
    model into such a model."""
    table: Literal["own", "given", "difference"] = "own"
    """Source of the token vectors: an own table; a table passed to `forward`, as a decoder gets its encoder's; or the
    generator's table, detached, plus an own difference (gradient-disentangled sharing, models/generator.py)."""
    has_norm: bool = True
    norm: NormKind = "layer"
    """LayerNorm or RMSNorm."""
    epsilon: float = Field(default=1e-12, gt=0)
    """Epsilon of the norm."""
    has_bias: bool = True
    """Biases in the norm and in the projection to the encoder's width."""
    dropout: float = Field(default=0.1, ge=0, lt=1)

    def build(self, vocabulary: int, width: int) -> "Embedding":
        return Embedding(self, vocabulary, width)


Perturbation = Callable[[Tensor], Tensor]
"""Maps the summed vectors to perturbed ones before the norm, for adversarial training."""


class TokenRows(nn.Module):
    """Look-up of token vectors. It has no weights; quantised models replace it."""

    def forward(self, tokens: Tensor, table: Tensor | None) -> Tensor:
        """Return the vectors of tokens: (…,) -> (…, columns)."""
        return embedding(tokens, self.whole(table))

    def whole(self, table: Tensor | None) -> Tensor:
        """Return the vectors of all tokens, (vocabulary, columns)."""
        assert table is not None, "an embedding without its own table needs the argument table"
        return table

    def scores_input(self, hidden: Tensor) -> Tensor:
        """Return the hidden states as they are multiplied with the whole table; quantised models round them."""
        return hidden

    def scores(self, hidden: Tensor, table: Tensor | None, bias: Tensor | None = None) -> Tensor:
        """Return the product with the vectors of all tokens; see `token_scores`."""
        return token_scores(self.scores_input(hidden), self.whole(table), bias)

    def loss(
        self,
        hidden: Tensor,
        table: Tensor | None,
        bias: Tensor | None,
        targets: Tensor,
        *,
        smoothing: float = 0.0,
        sampling: Sampling | None = None,
    ) -> TokenLoss:
        """Return the cross-entropy of `scores` without materialising them in float32; see `token_loss`."""
        return token_loss(
            self.scores_input(hidden), self.whole(table), bias, targets, smoothing=smoothing, sampling=sampling
        )


class EmbeddingRounding(nn.Module):
    """Rounding of the other tables and of the sum of all vectors: none here; quantised models replace it."""

    def forward(self, vectors: Tensor, layout: SequenceLayout) -> Tensor:
        """Round the sum of token, position and type vectors."""
        return vectors

    def table(self, table: Tensor) -> Tensor:
        """Round a table of positions or types."""
        return table


def token_scores(hidden: Tensor, table: Tensor, bias: Tensor | None) -> Tensor:
    """Return hidden · tableᵀ + bias: (…, columns) -> (…, vocabulary).

    On a GPU the last axis is rounded up to a multiple of 64, which the matrix units want; the extra scores are -inf.
    """
    bias = table.new_zeros(table.shape[0]) if bias is None else bias
    missing = -table.shape[0] % 64 if table.is_cuda else 0
    if missing:
        table, bias = pad(table, (0, 0, 0, missing)), pad(bias, (0, missing), value=-torch.inf)
    return linear(hidden, table, bias)


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
        self.rounding = EmbeddingRounding()
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
        """Embed tokens; `table` is required if the embedding has no token table of its own, or only a difference.

        Shape: tokens and types (batch, length) or (tokens,); the result has one more axis, the encoder's width.
        """
        positions = None
        if self.position is not None:
            self._check_length(layout.max_length)
            positions = position_vectors(self.rounding.table(self.position.table), tokens, layout)
        vectors = self.rounding(self._sum(tokens, positions, types, table), layout)
        if perturb is not None:
            vectors = perturb(vectors)
        return self.widen(self.dropout(self.norm(vectors), layout))

    def at(self, tokens: Tensor, position: int, table: Tensor | None = None) -> Tensor:
        """Return the embeddings of one token of each sequence, all at one position: (batch,) -> (batch, width)."""
        row = None
        if self.position is not None:
            self._check_length(position + 1)
            row = self.rounding.table(self.position.table)[position]
        layout = SequenceLayout.full(tokens.shape[0], 1)
        vectors = self.rounding(self._sum(tokens, row, None, table), layout)
        return self.widen(self.dropout(self.norm(vectors), layout))

    def _sum(self, tokens: Tensor, positions: Tensor | None, types: Tensor | None, table: Tensor | None) -> Tensor:
        vectors = self._vectors(tokens, table)
        if self.token_factor is not None:
            vectors = vectors @ self.token_factor  # (…, rank) -> (…, embedding width)
        if self.scale is not None:
            vectors = vectors * self.scale
        if positions is not None:
            vectors = vectors + positions
        if self.type_table is not None:
            type_table = self.rounding.table(self.type_table)
            vectors = vectors + (type_table[0] if types is None else embedding(types, type_table))
        return vectors

    def _vectors(self, tokens: Tensor, table: Tensor | None) -> Tensor:
        if self.is_difference:
            assert table is not None, "an embedding that is a difference needs the table it is added to"
            assert self.token_table is not None
            return embedding(tokens, table.detach()) + embedding(tokens, self.token_table)
        return self.rows(tokens, self.token_table if table is None else table)

    @torch.no_grad()
    def initialise(self, init_std: float, generator: torch.Generator | None) -> None:
        """Set a difference to zero."""
        if self.is_difference and self.token_table is not None:
            self.token_table.zero_()

    def _check_length(self, length: int) -> None:
        if length > self.max_length:
            raise InputError(f"a sequence may have {length} tokens; this model takes at most {self.max_length}")

"""Disentangled attention (He et al. 2021, DeBERTa): separate scores for content and relative position."""

from dataclasses import dataclass, replace
from typing import Literal

from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.functional import dropout

from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.layers.context import ForwardContext
from bertsmith.layers.linear import ElasticLinear, WeightSlice
from bertsmith.layers.mixers.base import (
    KEY,
    KEY_AND_VALUE,
    QUERY,
    MixerConfig,
    QueryKeyValueMixer,
    State,
    append_tokens,
)
from bertsmith.layers.mixers.sparse import SparseConfig, SparseWeights
from bertsmith.layers.weight_cache import WeightCache, autocast_dtype
from bertsmith.ops.disentangled import (
    BACKENDS,
    RelativePositions,
    disentangled,
    disentangled_scores,
    disentangled_terms,
    mirrored_rows,
)
from bertsmith.ops.dispatch import resolve_backend

Pair = tuple[Tensor | None, Tensor | None]
PositionRow = Literal["code", "paper"]


@dataclass(frozen=True)
class PositionTerms:
    """Settings of the position terms of the scores."""

    content_to_position: bool
    position_to_content: bool
    shares_projections: bool
    dropout: float
    row: PositionRow = "code"


class DisentangledConfig(MixerConfig):
    """Scores are content-to-content + content-to-position + position-to-content."""

    kind: Literal["disentangled"] = "disentangled"
    content_to_position: bool = True
    """Add the score of the query's content with the key's relative position."""
    position_to_content: bool = True
    """Add the score of the query's relative position with the key's content."""
    position_to_content_row: PositionRow = "code"
    """Row of the relative table in the position-to-content score: that of query − key, as in the released code and
    weights, or that of key − query, as printed in the paper (He et al. 2021, equation 4)."""
    shares_projections: bool = True
    """Project positions with the content's matrices (v2, v3) instead of their own (v1)."""
    has_key_bias: bool = True
    """Biases of the key projections of content and positions; False for v1."""
    position_dropout: float = Field(default=0.1, ge=0, lt=1)
    """Dropout on the relative table, independent in every layer."""
    sparse: SparseConfig | None = None
    """Sparse attention weights; None for the softmax."""

    @model_validator(mode="after")
    def _check_row(self) -> "DisentangledConfig":
        if self.position_to_content_row == "paper" and not self.position_to_content:
            raise ValueError("position_to_content_row is 'paper', but position_to_content is false; allowed: 'code'")
        return self

    @property
    def reads_memory(self) -> bool:
        return True

    @property
    def reads_positions(self) -> bool:
        """Whether the encoder must have a relative position table."""
        return self.content_to_position or self.position_to_content

    def build(self, width: int) -> "DisentangledAttention":
        return DisentangledAttention(
            width,
            self.heads,
            self.resolved_head_width(width),
            PositionTerms(
                self.content_to_position,
                self.position_to_content,
                self.shares_projections,
                self.position_dropout,
                self.position_to_content_row,
            ),
            has_key_bias=self.has_key_bias,
            dropout=self.dropout,
            is_causal=self.is_causal,
            sparse=None if self.sparse is None else self.sparse.build(self.heads),
        )

    def flops(self, width: int, length: int) -> int:
        inner = self.heads * self.resolved_head_width(width)
        # content and values for every token; a position term for every offset on either side
        terms = 2 + 2 * (self.content_to_position + self.position_to_content)
        return 2 * 4 * width * inner + 2 * terms * length * inner


class DisentangledAttention(QueryKeyValueMixer):
    """Projections of content and relative positions, disentangled attention, output projection."""

    backends = (BACKENDS,)

    def __init__(
        self,
        width: int,
        heads: int,
        head_width: int,
        terms: PositionTerms,
        *,
        has_key_bias: bool,
        dropout: float,
        is_causal: bool,
        sparse: SparseWeights | None = None,
    ) -> None:
        biased = (True, has_key_bias, True)
        super().__init__(width, heads, head_width, head_width, dropout=dropout, is_causal=is_causal, biased=biased)
        self.terms = terms
        has_key = terms.content_to_position and not terms.shares_projections
        has_query = terms.position_to_content and not terms.shares_projections
        inner = heads * head_width
        self.position_key = ElasticLinear(width, inner, units_out=heads, bias=has_key_bias) if has_key else None
        self.position_query = ElasticLinear(width, inner, units_out=heads) if has_query else None
        self.output = ElasticLinear(inner, width, units_in=heads)
        self.sparse = sparse
        self.cache: WeightCache[Pair] = WeightCache()

    def forward(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        query, key, value = self._project(hidden, context)
        relative, is_causal = context.relative_positions, self.is_causal or context.is_causal
        return self._mix(query, key, value, context, context.layout, context.key_layout, relative, is_causal=is_causal)

    def maps(self, hidden: Tensor, context: ForwardContext) -> dict[str, Tensor]:
        """Return the probabilities ("attention") and each term of the scores."""
        query, key, _ = self._project(hidden, context)
        return disentangled_terms(
            query,
            key,
            *self._positions(context),
            context.layout,
            self._relative(context.relative_positions),
            key_layout=context.key_layout,
            is_causal=self.is_causal or context.is_causal,
            sparse=self._sparse_map(context),
        )

    def scores(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        query, key, _ = self._project(hidden, context)
        return disentangled_scores(
            query,
            key,
            *self._positions(context),
            context.layout,
            self._relative(context.relative_positions),
            key_layout=context.key_layout,
            is_causal=self.is_causal or context.is_causal,
        )

    def start(self, context: ForwardContext) -> State:
        # the position of the next query
        position = self.output.new_zeros(context.layout.batch).long()
        return *super().start(context), position

    def step(self, hidden: Tensor, state: State, context: ForwardContext) -> tuple[Tensor, State]:
        if context.memory is None and not (self.is_causal or context.is_causal):
            return super().step(hidden, state, context)
        *cached, position = state
        query, (key, value), key_layout = self._look_back(hidden, tuple(cached), context)
        one, relative = SequenceLayout.full(hidden.shape[0], 1), context.relative_positions
        if relative is not None:
            relative = replace(relative, query_positions=position[:, None], are_distinct=True)
        mixed = self._mix(query, key, value, context, one, key_layout, relative, is_causal=False)
        return mixed[:, 0], (key, value, position + 1)

    def absorb(self, hidden: Tensor, state: State, context: ForwardContext) -> State:
        if not (self.is_causal or context.is_causal):
            return super().absorb(hidden, state, context)
        *cached, position = state
        return *append_tokens(cached, self._parts(hidden, context, KEY_AND_VALUE)), position + hidden.shape[1]

    def _mix(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context: ForwardContext,
        layout: SequenceLayout,
        key_layout: SequenceLayout | None,
        relative: RelativePositions | None,
        *,
        is_causal: bool,
    ) -> Tensor:
        mixed = disentangled(
            query,
            key,
            value,
            *self._positions(context),
            layout,
            self._relative(relative),
            key_layout=key_layout,
            is_causal=is_causal,
            sparse=self._sparse_map(context),
            dropout=self.dropout if self.training else 0.0,
            backend=resolve_backend(BACKENDS, context.backend),
        )
        return self._output(mixed, context)

    def _positions(self, context: ForwardContext) -> Pair:
        """Return the projected keys and queries of all rows of the relative table; None for an unused term.

        They depend on weights alone, so they are cached between calls in eval mode.
        Shape: each (rows, heads, head_width).
        """
        if not (self.terms.content_to_position or self.terms.position_to_content):
            return None, None
        if context.relative_positions is None:
            raise InputError("a disentangled mixer needs a relative position table; set encoder.relative")
        relative = context.relative_positions
        vectors = relative.vectors
        layers = [layer for layer in (self.project, self.position_key, self.position_query) if layer is not None]
        weights = [parameter for layer in layers for parameter in layer.parameters()]
        settings = (context.keep_heads, autocast_dtype(vectors))
        return self.cache([vectors, *weights], settings, lambda: self._project_positions(relative, context.keep_heads))

    def _relative(self, relative: RelativePositions | None) -> RelativePositions | None:
        """Return the indices of the rows that `_positions` returns."""
        return relative if relative is None or self.terms.row == "code" else relative.by_offset()

    def _project_positions(self, relative: RelativePositions, keep: int | None) -> Pair:
        vectors = dropout(relative.vectors, self.terms.dropout, self.training)

        def by_head(layer: ElasticLinear | None, part: slice) -> Tensor:
            projected = (
                self.project(vectors, WeightSlice(keep_out=keep, parts=part))
                if layer is None
                else layer(vectors, WeightSlice(keep_out=keep))
            )
            return projected.unflatten(-1, (-1, self.head_width))  # (rows, heads · head_width) -> (rows, heads, …)

        key = by_head(self.position_key, KEY) if self.terms.content_to_position else None
        query = by_head(self.position_query, QUERY) if self.terms.position_to_content else None
        return (key, query) if self.terms.row == "code" else mirrored_rows(key, query, relative.slots)

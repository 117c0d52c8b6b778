"""FAVOR+ (Choromanski et al. 2021): linear-time attention by random features, with the weights of full attention."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from bertsmith.data.random import key as seed_of
from bertsmith.layers.context import ForwardContext
from bertsmith.layers.linear import ElasticLinear
from bertsmith.layers.mixers.base import KEY_AND_VALUE, QUERY, MixerConfig, QueryKeyValueMixer, State
from bertsmith.ops.dispatch import resolve_backend
from bertsmith.ops.dropout import drop_tokens
from bertsmith.ops.favor import (
    BACKENDS,
    FEATURE_MAPS,
    FavorState,
    FeatureMapName,
    RandomFeatures,
    draw,
    favor,
    favor_absorb,
    favor_map,
    favor_memory,
    favor_read,
    favor_start,
    favor_step,
)

_CHUNK = 128


@dataclass(frozen=True)
class FeatureSettings:
    """Settings of the random features of queries and keys."""

    count: int
    feature_map: str
    is_orthogonal: bool
    epsilon: float | None
    redraw_every: int

    def draw(self, head_width: int, generator: torch.Generator | None) -> Tensor:
        """Draw a random matrix, (features, head_width)."""
        constant = FEATURE_MAPS[self.feature_map].has_constant_norms
        return draw(self.count, head_width, generator, is_orthogonal=self.is_orthogonal, has_constant_norms=constant)


class FavorConfig(MixerConfig):
    """Settings of a FAVOR+ mixer, whose cost is linear in the sequence length."""

    kind: Literal["favor"] = "favor"
    value_width: int | None = Field(default=None, gt=0)
    """Width of one head's values; None for head_width."""
    features: int = Field(default=256, ge=0)
    """Rows of the random matrix; 0 applies the feature map to queries and keys without a projection."""
    feature_map: FeatureMapName = "softmax"
    """An estimate of the softmax kernel, or an activation such as relu (generalised attention). Maps with negative
    values (trigonometric, gelu, tanh, cos, identity) are for comparisons: their row sums can approach 0."""
    is_orthogonal: bool = True
    """Draw blocks of orthogonal rows for the random matrix instead of independent rows."""
    redraw_every: int = Field(default=1000, ge=0)
    """Optimiser steps between two draws of the random matrix; 0 for never."""
    epsilon: float | None = Field(default=None, ge=0)
    """Added to every feature; None for the default of the map: 1e-6 for softmax estimates, 1e-3 for activations."""

    @property
    def reads_memory(self) -> bool:
        return True

    def check(self, width: int) -> None:
        super().check(width)
        if self.features == 0 and FEATURE_MAPS[self.feature_map].estimates_softmax:
            raise ValueError(
                f"features is 0 and feature_map {self.feature_map!r} needs a random matrix; allowed: 1 or more"
            )

    def build(self, width: int) -> "FavorAttention":
        head_width = self.resolved_head_width(width)
        return FavorAttention(
            width,
            self.heads,
            head_width,
            self.value_width or head_width,
            FeatureSettings(self.features, self.feature_map, self.is_orthogonal, self.epsilon, self.redraw_every),
            dropout=self.dropout,
            is_causal=self.is_causal,
        )

    def flops(self, width: int, length: int) -> int:
        head_width = self.resolved_head_width(width)
        value_width = self.value_width or head_width
        rows = FEATURE_MAPS[self.feature_map].width(self.features or head_width)
        features = 0 if self.features == 0 else 2 * 2 * rows * head_width
        products = 2 * 2 * rows * value_width
        if self.is_causal:
            products += 2 * min(_CHUNK, length) * (rows + value_width)
        return self.heads * (2 * 2 * width * (head_width + value_width) + features + products)


class FavorAttention(QueryKeyValueMixer):
    """Projections as in full attention, linear attention between them; the random matrix is saved with the weights."""

    backends = (BACKENDS,)
    projection: Tensor

    def __init__(
        self,
        width: int,
        heads: int,
        head_width: int,
        value_width: int,
        features: FeatureSettings,
        *,
        dropout: float,
        is_causal: bool,
    ) -> None:
        super().__init__(width, heads, head_width, value_width, dropout=dropout, is_causal=is_causal)
        self.output = ElasticLinear(heads * value_width, width, units_in=heads)
        self.features = features
        # a placeholder until `initialise` or a checkpoint replaces it
        self.register_buffer("projection", features.draw(head_width, torch.Generator().manual_seed(0)).float())

    @torch.no_grad()
    def initialise(self, init_std: float, generator: torch.Generator | None) -> None:
        """Draw the first random matrix."""
        self.projection.copy_(self.features.draw(self.head_width, generator))

    @torch.no_grad()
    def redraw_features(self, step: int, seed: int, number: int) -> None:
        every = self.features.redraw_every
        if every == 0 or step == 0 or step % every:
            return
        # depends on seed and step only, so all processes and resumed runs draw the same matrix
        generator = torch.Generator().manual_seed(seed_of(seed, number, step // every))
        self.projection.copy_(self.features.draw(self.head_width, generator))

    def forward(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        query, key, value = self._project(hidden, context)
        mixed = favor(
            query,
            key,
            value,
            self._random_features(),
            context.layout,
            key_layout=context.key_layout,
            is_causal=self.is_causal or context.is_causal,
            chunk=_CHUNK,
            backend=resolve_backend(BACKENDS, context.backend),
        )
        if self.training and self.dropout:
            mixed = drop_tokens(mixed, self.dropout, context.layout)
        return self._output(mixed, context)

    def maps(self, hidden: Tensor, context: ForwardContext) -> dict[str, Tensor]:
        query, key, _ = self._project(hidden, context)
        weights = favor_map(
            query,
            key,
            self._random_features(),
            context.layout,
            key_layout=context.key_layout,
            is_causal=self.is_causal or context.is_causal,
        )
        return {"attention": weights}

    def start(self, context: ForwardContext) -> State:
        if context.memory is not None:
            key, value = self._parts(context.memory.hidden_states, context, KEY_AND_VALUE)
            return favor_memory(key, value, self._random_features(), context.memory.layout)
        heads = context.keep_heads or self.heads
        return favor_start(context.layout.batch, heads, self._random_features(), value_width=self.value_width)

    def step(self, hidden: Tensor, state: State, context: ForwardContext) -> tuple[Tensor, State]:
        if context.memory is None and not (self.is_causal or context.is_causal):
            return super().step(hidden, state, context)
        if context.memory is not None:
            (query,) = self._parts(hidden, context, QUERY)
            mixed = favor_read(query, FavorState(*state), self._random_features())
        else:
            query, key, value = self._project(hidden, context)
            mixed, state = favor_step(query, key, value, FavorState(*state), self._random_features())
        return self._output(mixed, context), state

    def absorb(self, hidden: Tensor, state: State, context: ForwardContext) -> State:
        if not (self.is_causal or context.is_causal):
            return super().absorb(hidden, state, context)
        key, value = self._parts(hidden, context, KEY_AND_VALUE)
        sums, features = FavorState(*state), self._random_features()
        for token in zip(key.unbind(1), value.unbind(1), strict=True):  # ε depends on the largest feature so far
            sums = favor_absorb(*token, sums, features)
        return sums

    def _random_features(self) -> RandomFeatures:
        return RandomFeatures(self.projection, self.features.feature_map, self.features.epsilon)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = self.projection
        super()._apply(fn, recurse)
        if self.projection.dtype.itemsize < 4:  # weights are cast to half precision; features are computed in float32
            self.projection = before.to(self.projection.device)
        return self

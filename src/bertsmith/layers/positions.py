"""Absolute positions that are added to the token embedding."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.functional import embedding

from bertsmith.data.layout import SequenceLayout
from bertsmith.layers.elementwise import Norm
from bertsmith.layers.weight_cache import WeightCache, autocast_dtype
from bertsmith.ops.disentangled import RelativePositions, bucket_slots, linear_slots
from bertsmith.settings import Record


class LearnedPositions(nn.Module):
    """One trained vector for every place in a sequence."""

    def __init__(self, max_length: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(max_length, width))

    def forward(self, tokens: Tensor, layout: SequenceLayout) -> Tensor:
        """The position vectors: (length, width) for padded rows, which broadcasts, or (tokens, width)."""
        return _rows(self.table, tokens, layout)


class SinusoidPositions(nn.Module):
    """Fixed waves of geometric wavelengths (Vaswani et al. 2017, section 3.5).

    Sine and cosine of a wavelength stand side by side, or, `in_halves`, all sines before all cosines, as in
    tensor2tensor and Marian.
    """

    table: Tensor

    def __init__(self, max_length: int, width: int, *, in_halves: bool = False) -> None:
        super().__init__()
        waves = sinusoids(torch.arange(max_length, dtype=torch.float64), width, in_halves=in_halves)
        # not saved: it follows from the config
        self.register_buffer("table", waves.to(torch.get_default_dtype()), persistent=False)

    def forward(self, tokens: Tensor, layout: SequenceLayout) -> Tensor:
        """The position vectors: (length, width) for padded rows, which broadcasts, or (tokens, width)."""
        return _rows(self.table, tokens, layout)


def sinusoids(positions: Tensor, width: int, *, in_halves: bool = False) -> Tensor:
    """The waves at some places: (places,) -> (places, width)."""
    pair = torch.arange(0, width, 2, dtype=positions.dtype, device=positions.device)
    angle = positions[:, None] / 10000 ** (pair / width)  # (places, ceil(width / 2))
    if in_halves:
        return torch.cat([angle.sin(), angle.cos()[:, : width // 2]], dim=-1)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, :width]


Positions = LearnedPositions | SinusoidPositions

POSITIONS: dict[str, Callable[[int, int], Positions]] = {
    "learned": LearnedPositions,
    "sinusoid": SinusoidPositions,
    "sinusoid_halves": partial(SinusoidPositions, in_halves=True),
}


def _rows(table: Tensor, tokens: Tensor, layout: SequenceLayout) -> Tensor:
    if layout.is_packed:
        return embedding(layout.positions(tokens), table)
    return table[: layout.max_length]


class RelativeConfig(Record):
    """One vector for every (bucket of a) distance between two tokens."""

    span: int = Field(default=512, gt=0)
    """Half the rows of the table: distances, or buckets of them, to either side."""
    max_distance: int | None = Field(default=None, gt=1)
    """Distances below this one are told apart, beyond span / 2 by buckets that grow with the logarithm (v2, v3); None
    for one row per distance (v1)."""
    clamp: Literal["official", "hf"] = "official"
    """What stands for distances of `farthest` or more: the farthest one's row, or Hugging Face's rows at the very ends
    of the table, of which one was never trained."""
    has_norm: bool = False
    """Normalise the table before it is used (v2, v3)."""
    epsilon: float = Field(default=1e-7, gt=0)

    @model_validator(mode="after")
    def _check_buckets(self) -> "RelativeConfig":
        if self.max_distance is not None and (self.span < 2 or self.max_distance - 1 <= self.span // 2):
            least = self.span // 2 + 2
            raise ValueError(f"span is {self.span} and max_distance {self.max_distance}; allowed: >= 2 and >= {least}")
        return self

    def build(self, width: int) -> "RelativeTable":
        return RelativeTable(width, 2 * self.span, self.slots(), self.epsilon if self.has_norm else None)

    def slots(self) -> Tensor:
        """The row for every offset from the farthest behind to the farthest ahead; further ones take the end's."""
        if self.max_distance is None:
            return linear_slots(self.span)
        return bucket_slots(self.span, self.max_distance, clamps_distance=self.clamp == "official")


class RelativeTable(nn.Module):
    """The vectors, and which of them stands for which offset."""

    slots: Tensor

    def __init__(self, width: int, rows: int, slots: Tensor, epsilon: float | None) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(rows, width))
        self.norm = None if epsilon is None else Norm(width, epsilon)
        self.register_buffer("slots", slots, persistent=False)  # it follows from the config
        self.cache: WeightCache[Tensor] = WeightCache()

    def forward(self) -> RelativePositions:
        norm = self.norm
        if norm is None:
            return RelativePositions(self.table, self.slots)
        # one tensor for many calls, by which the mixers know that their projections of it still hold
        sources = [self.table, *norm.parameters()]
        vectors = self.cache(sources, autocast_dtype(self.table), lambda: norm(self.table))
        return RelativePositions(vectors, self.slots)


class Rotary(NamedTuple):
    """Which angles a mixer turns by: pair i of a head's channels by place / theta^(2i / head_width)."""

    theta: float
    head_width: int

    def turns(self, positions: Tensor) -> "Turns":
        """The turns of some places, in float32 whatever the states are in: half precision cannot count to 1,000."""
        channel = torch.arange(0, self.head_width, 2, device=positions.device, dtype=torch.float32)
        speed = 1 / self.theta ** (channel / self.head_width)
        angle = positions[..., None, None] * speed  # (…) -> (…, 1, head_width / 2)
        return Turns(angle.cos(), angle.sin())


class Turns(NamedTuple):
    """How far the channels of each token are turned.

    Shape: cosine, sine (length, 1, head_width / 2) for padded rows, which broadcasts, or (tokens, 1, head_width / 2).
    """

    cosine: Tensor
    sine: Tensor

    def __call__(self, states: Tensor) -> Tensor:
        """Queries or keys, turned: channel i and channel i + head_width / 2 are the two coordinates of pair i.

        The product of a turned query and a turned key depends on the distance of their places only.
        Shape: states (…, heads, head_width).
        """
        first, second = states.chunk(2, dim=-1)
        turned = (first * self.cosine - second * self.sine, second * self.cosine + first * self.sine)
        return torch.cat(turned, dim=-1).to(states.dtype)


def turns_by_place(kinds: Iterable[Rotary | None], tokens: Tensor, layout: SequenceLayout) -> dict[Rotary, Turns]:
    """The turns of every token for each of the kinds that the mixers of a stack ask for, made once for all of them.

    `tokens` is any tensor that lies in the layout.
    """
    asked = dict.fromkeys(kind for kind in kinds if kind is not None)
    if not asked:
        return {}
    positions = layout.positions(tokens) if layout.is_packed else torch.arange(layout.max_length, device=tokens.device)
    return {kind: kind.turns(positions) for kind in asked}

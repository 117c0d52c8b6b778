"""Position information: absolute embeddings, relative tables and rotary embeddings."""

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
from bertsmith.ops.attention import t5_slots
from bertsmith.ops.disentangled import RelativePositions, bucket_slots, linear_slots
from bertsmith.settings import Record


class LearnedPositions(nn.Module):
    """One learned vector per position."""

    def __init__(self, max_length: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(max_length, width))


class SinusoidPositions(nn.Module):
    """Fixed sinusoidal position embedding (Vaswani et al. 2017, section 3.5).

    Sines and cosines alternate; with `in_halves` all sines come before all cosines, as in tensor2tensor and Marian.
    """

    table: Tensor

    def __init__(self, max_length: int, width: int, *, in_halves: bool = False) -> None:
        super().__init__()
        waves = sinusoids(torch.arange(max_length, dtype=torch.float64), width, in_halves=in_halves)
        # not saved: the config determines it
        self.register_buffer("table", waves.to(torch.get_default_dtype()), persistent=False)


def sinusoids(positions: Tensor, width: int, *, in_halves: bool = False) -> Tensor:
    """Return the sinusoidal embedding of positions: (positions,) -> (positions, width)."""
    pair = torch.arange(0, width, 2, dtype=positions.dtype, device=positions.device)
    angle = positions[:, None] / 10000 ** (pair / width)  # (positions, ceil(width / 2))
    if in_halves:
        return torch.cat([angle.sin(), angle.cos()[:, : width // 2]], dim=-1)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, :width]


Positions = LearnedPositions | SinusoidPositions

POSITIONS: dict[str, Callable[[int, int], Positions]] = {
    "learned": LearnedPositions,
    "sinusoid": SinusoidPositions,
    "sinusoid_halves": partial(SinusoidPositions, in_halves=True),
}


def position_vectors(table: Tensor, tokens: Tensor, layout: SequenceLayout) -> Tensor:
    """Return the vectors of positions: (length, width) for padded rows, which broadcasts, or (tokens, width)."""
    if layout.is_packed:
        return embedding(layout.positions(tokens), table)
    return table[: layout.max_length]


class RelativeConfig(Record):
    """Relative position embedding: one vector per distance, or per bucket of distances; or one bias per head."""

    heads: int | None = Field(default=None, gt=0)
    """Numbers per row: one bias for each head, which full mixers with `has_relative_bias` add to their scores (T5,
    MPNet). None for vectors of the encoder's width, which disentangled mixers read."""
    span: int = Field(default=512, gt=0)
    """Half the rows of the table: the distances, or buckets, on either side."""
    max_distance: int | None = Field(default=None, gt=1)
    """Put distances between span / 2 and this one into logarithmic buckets (DeBERTa v2 and v3, T5); None for one row
    per distance (DeBERTa v1)."""
    clamp: Literal["official", "hf"] = "official"
    """Row of distances from `max_distance` on: the row of max_distance - 1, as in the official code, or the first and
    last row of the table, one of which was never trained, as in Hugging Face's."""
    has_norm: bool = False
    """Normalise the table before it is used (v2, v3)."""
    epsilon: float = Field(default=1e-7, gt=0)

    @model_validator(mode="after")
    def _check_buckets(self) -> "RelativeConfig":
        if self.max_distance is not None and (self.span < 2 or self.max_distance - 1 <= self.span // 2):
            least = self.span // 2 + 2
            raise ValueError(
                f"span is {self.span} and max_distance {self.max_distance}; allowed: span of 2 or more, and "
                f"max_distance of {least} or more"
            )
        return self

    @model_validator(mode="after")
    def _check_bias(self) -> "RelativeConfig":
        if self.heads is not None and (self.has_norm or self.clamp != "official"):
            raise ValueError(
                f"relative.heads is {self.heads}; allowed for a bias: has_norm = false, clamp = 'official'"
            )
        return self

    def build(self, width: int) -> "RelativeTable":
        return RelativeTable(self.heads or width, 2 * self.span, self.slots(), self.epsilon if self.has_norm else None)

    def slots(self) -> Tensor:
        """Return the row of every offset in rising order; offsets beyond the ends use the row of the end."""
        if self.heads is not None:
            return t5_slots(self.span, self.max_distance)
        if self.max_distance is None:
            return linear_slots(self.span)
        return bucket_slots(self.span, self.max_distance, clamps_distance=self.clamp == "official")


class RelativeTable(nn.Module):
    """The relative position vectors, or the biases of all heads, and the row of every offset."""

    slots: Tensor

    def __init__(self, width: int, rows: int, slots: Tensor, epsilon: float | None) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(rows, width))
        self.norm = None if epsilon is None else Norm(width, epsilon)
        self.register_buffer("slots", slots, persistent=False)  # the config determines it
        self.cache: WeightCache[Tensor] = WeightCache()

    def forward(self) -> RelativePositions:
        norm = self.norm
        if norm is None:
            return RelativePositions(self.table, self.slots)
        # the same tensor in every call, so that the mixers' caches of its projections stay valid
        sources = [self.table, *norm.parameters()]
        vectors = self.cache(sources, autocast_dtype(self.table), lambda: norm(self.table))
        return RelativePositions(vectors, self.slots)


class Rotary(NamedTuple):
    """Rotary embedding (Su et al. 2021): rotates channel pair i of a head by position / theta^(2i / head_width)."""

    theta: float
    head_width: int

    def rotations(self, positions: Tensor) -> "Rotation":
        """Return the rotations of positions, always in float32: bfloat16 cannot represent all integers up to 1,000."""
        channel = torch.arange(0, self.head_width, 2, device=positions.device, dtype=torch.float32)
        speed = 1 / self.theta ** (channel / self.head_width)
        angle = positions[..., None, None] * speed  # (…) -> (…, 1, head_width / 2)
        return Rotation(angle.cos(), angle.sin())


class Rotation(NamedTuple):
    """Rotation of the channels of each token.

    Shape: cosine, sine (length, 1, head_width / 2) for padded rows, which broadcasts, or (tokens, 1, head_width / 2).
    """

    cosine: Tensor
    sine: Tensor

    def __call__(self, vectors: Tensor) -> Tensor:
        """Rotate queries or keys; channels i and i + head_width / 2 form pair i.

        The product of a rotated query and a rotated key depends on their relative position only.
        Shape: vectors (…, heads, head_width).
        """
        first, second = vectors.chunk(2, dim=-1)
        rotated = (first * self.cosine - second * self.sine, second * self.cosine + first * self.sine)
        return torch.cat(rotated, dim=-1).to(vectors.dtype)


def token_rotations(
    rotaries: Iterable[Rotary | None], tokens: Tensor, layout: SequenceLayout
) -> dict[Rotary, Rotation]:
    """Return the rotations of every token for each distinct rotary embedding; the mixers of a stack share them.

    `tokens` is any tensor in this layout.
    """
    distinct = dict.fromkeys(rotary for rotary in rotaries if rotary is not None)
    if not distinct:
        return {}
    positions = layout.positions(tokens) if layout.is_packed else torch.arange(layout.max_length, device=tokens.device)
    return {rotary: rotary.rotations(positions) for rotary in distinct}

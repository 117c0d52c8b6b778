"""Rotary positions: queries and keys are turned by angles that grow with their place (Su et al. 2021)."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from bertsmith.batches.layout import SequenceLayout


class Rotary(NamedTuple):
    """Which angles a mixer turns by: pair i of a head's channels by place / theta^(2i / head_width)."""

    theta: float
    head_width: int

    def turns(self, places: Tensor) -> "Turns":
        """The turns of some places, in float32 whatever the states are in: half precision cannot count to 1,000."""
        channel = torch.arange(0, self.head_width, 2, device=places.device, dtype=torch.float32)
        speed = 1 / self.theta ** (channel / self.head_width)
        angle = places[..., None, None] * speed  # (…) -> (…, 1, head_width / 2)
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
    places = layout.positions(tokens) if layout.is_packed else torch.arange(layout.longest, device=tokens.device)
    return {kind: kind.turns(places) for kind in asked}

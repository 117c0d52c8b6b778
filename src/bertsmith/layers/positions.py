"""Absolute positions that are added to the token embedding."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from bertsmith.batches.layout import SequenceLayout


class LearnedPositions(nn.Module):
    """One trained vector for every place in a sequence."""

    def __init__(self, longest: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(longest, width))

    def forward(self, tokens: Tensor, layout: SequenceLayout) -> Tensor:
        """The position vectors: (length, width) for padded rows, which broadcasts, or (tokens, width)."""
        return _rows(self.table, tokens, layout)


class SinusoidPositions(nn.Module):
    """Fixed waves of geometric wavelengths (Vaswani et al. 2017, section 3.5).

    Sine and cosine of a wavelength stand side by side, or, `in_halves`, all sines before all cosines, as in
    tensor2tensor and Marian.
    """

    table: Tensor

    def __init__(self, longest: int, width: int, *, in_halves: bool = False) -> None:
        super().__init__()
        waves = sinusoids(torch.arange(longest, dtype=torch.float64), width, in_halves=in_halves)
        # not saved: it follows from the config
        self.register_buffer("table", waves.to(torch.get_default_dtype()), persistent=False)

    def forward(self, tokens: Tensor, layout: SequenceLayout) -> Tensor:
        """The position vectors: (length, width) for padded rows, which broadcasts, or (tokens, width)."""
        return _rows(self.table, tokens, layout)


def sinusoids(places: Tensor, width: int, *, in_halves: bool = False) -> Tensor:
    """The waves at some places: (places,) -> (places, width)."""
    pair = torch.arange(0, width, 2, dtype=places.dtype, device=places.device)
    angle = places[:, None] / 10000 ** (pair / width)  # (places, ceil(width / 2))
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
    return table[: layout.longest]

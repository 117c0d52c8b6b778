"""Absolute positions that are added to the token embedding."""

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
    """Fixed waves of geometric wavelengths (Vaswani et al. 2017, section 3.5)."""

    table: Tensor

    def __init__(self, longest: int, width: int) -> None:
        super().__init__()
        place = torch.arange(longest, dtype=torch.float64)[:, None]
        pair = torch.arange(0, width, 2, dtype=torch.float64)
        angle = place / 10000 ** (pair / width)
        waves = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, :width]  # (longest, width)
        # not saved: it follows from the config
        self.register_buffer("table", waves.to(torch.get_default_dtype()), persistent=False)

    def forward(self, tokens: Tensor, layout: SequenceLayout) -> Tensor:
        """The position vectors: (length, width) for padded rows, which broadcasts, or (tokens, width)."""
        return _rows(self.table, tokens, layout)


POSITIONS: dict[str, type[LearnedPositions] | type[SinusoidPositions]] = {
    "learned": LearnedPositions,
    "sinusoid": SinusoidPositions,
}


def _rows(table: Tensor, tokens: Tensor, layout: SequenceLayout) -> Tensor:
    if layout.is_packed:
        return embedding(layout.positions(tokens), table)
    return table[: layout.longest]

"""Tile sizes of the kernels, as tables: no search at run time, so the first call is quick and runs repeat."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tile:
    """How a kernel cuts its work: rows and columns of one program's tile, warps of a program, loads under way."""

    rows: int
    columns: int
    warps: int = 4
    stages: int = 2


Tiles = Mapping[tuple[int, int], Tile]
"""Tuned tiles by (bytes of a number, head width)."""


def tile(tuned: Tiles, default: Tile, dtype: torch.dtype, head_width: int) -> Tile:
    """The tuned tile of a shape, or the default."""
    return tuned.get((dtype.itemsize, head_width), default)

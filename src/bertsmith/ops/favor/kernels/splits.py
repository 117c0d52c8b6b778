"""How the sums over a sequence are cut into programs."""

from dataclasses import dataclass

from torch import Tensor

from bertsmith.ops.favor.kernels.features import fitting
from bertsmith.ops.kernels.support import Tile, Tiles, tile

# tile.columns is the block of features a program holds sums for: a program that holds all of them can finish alone.
_TUNED: Tiles = {
    (2, 16): Tile(64, 256, warps=8, stages=3),
    (2, 32): Tile(64, 256, warps=8, stages=3),
    (2, 64): Tile(64, 256, warps=8, stages=3),
    (2, 128): Tile(64, 128, warps=8, stages=3),
    (4, 128): Tile(32, 32, warps=8, stages=1),
}
_DEFAULT = Tile(32, 64, warps=8, stages=1)
_PROGRAMS = 264
"""Two for each multiprocessor of the largest GPU in use."""
_FEWEST_ROWS = 512


@dataclass(frozen=True)
class Splits:
    """`count` splits of `rows` rows for each sequence, and `blocks` blocks of features."""

    count: int
    rows: int
    blocks: int
    tile: Tile

    @property
    def is_whole(self) -> bool:
        """Whether one program sees a whole sequence and all features."""
        return self.count * self.blocks == 1

    @classmethod
    def of(cls, states: Tensor, sequences: int, longest: int, padded: int, asked: Tile | None) -> "Splits":
        """Enough programs to fill the GPU, none with too few rows to pay for its partial sums.

        Shape: states (tokens, heads, head_width); sequences counts each head as its own.
        """
        chosen = fitting(asked or tile(_TUNED, _DEFAULT, states.dtype, states.shape[-1]), padded)
        blocks = padded // chosen.columns
        wanted = max(1, _PROGRAMS // max(1, sequences * blocks))
        count = max(1, min(wanted, longest // _FEWEST_ROWS))
        rows = -(-max(1, longest) // count)
        rows = -(-rows // chosen.rows) * chosen.rows
        return cls(-(-max(1, longest) // rows), rows, blocks, chosen)

"""The sequences of a batch in groups of about one length, for work that grows with the square of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_NEAR = 0.75  # of a group's longest: what is shorter begins the next group
_SHORT = 16  # tokens below which nothing is gained


@dataclass(frozen=True)
class LengthGroups:
    """Padded rows of several widths, one group after the other."""

    sizes: tuple[tuple[int, int], ...]
    """Sequences of each group, and the length of its longest."""
    is_token: tuple[Tensor | None, ...]
    """Of each group where real tokens stand, (sequences, length); None where all are."""
    places: Tensor
    """Where every real token of the batch stands among the rows of all groups, (tokens,)."""
    rows: int
    """Tokens of all groups, pads counted in."""

    @classmethod
    def of(cls, lengths: Sequence[int]) -> "LengthGroups":
        """The groups of sequences of these lengths; which they are depends on nothing else."""
        sizes = np.asarray(lengths, dtype=np.int64)
        order = np.argsort(-sizes, kind="stable")
        order = order[: int((sizes > 0).sum())]
        found: list[tuple[int, int]] = []
        is_token: list[Tensor | None] = []
        begins = np.zeros(len(sizes), dtype=np.int64)
        first = rows = 0
        while first < len(order):
            longest = int(sizes[order[first]])
            near = sizes[order[first:]] >= (longest * _NEAR if longest > _SHORT else 1)
            members = order[first : first + int(near.sum())]
            begins[members] = rows + longest * np.arange(len(members))
            real = np.arange(longest) < sizes[members, None]
            is_token.append(None if real.all() else torch.from_numpy(real))
            found.append((len(members), longest))
            first, rows = first + len(members), rows + longest * len(members)
        offsets = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        places = torch.from_numpy(np.repeat(begins, sizes) + offsets)
        return cls(tuple(found), tuple(is_token), places, rows)

"""Two published ways to choose what is masked that do not end at an exact count: ELECTRA's and DeBERTa's.

Units are tokens or words. Those of all sequences stand in one row, special tokens left out; there are as many slots in
it as tokens, so that no tensor's shape depends on a draw, and each sequence has a stretch of the row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bertsmith.batches.random import bits, uniform
from bertsmith.batches.units import gram_lengths, running_sum, segment_begins

SURPLUS = 4
"""The word that reaches a budget may exceed it by a fourth of it (19 tokens of 77); what it has beyond is not masked.

So the places of a batch are bounded, though a word is not.
"""


@dataclass(frozen=True)
class Row:
    """The units of all sequences, one after the other.

    Shape: number (tokens,), the unit of each token (a special one has that of the unit before); first and count
    (sequences,), where the units of a sequence begin and how many there are.
    """

    number: Tensor
    first: Tensor
    count: Tensor

    @classmethod
    def of(cls, begins: Tensor, is_candidate: Tensor, sequence: Tensor, sequences: int) -> "Row":
        """The row of the units that begin at the places given.

        Shape: begins, is_candidate, sequence (tokens,).
        """
        opens = (begins & is_candidate).long()
        count = opens.new_zeros(sequences).scatter_add(0, sequence, opens)
        return cls(opens.cumsum(0) - 1, count.cumsum(0) - count, count)


def with_replacement(row: Row, is_candidate: Tensor, counts: Tensor, stream: Tensor, slots: int) -> Tensor:
    """True for the tokens drawn: `counts` of each sequence, every time from all of its units (Clark et al. 2020).

    Shape: is_candidate (tokens,); counts and stream (sequences,). `slots` is no less than the sum of the counts.
    """
    tokens = is_candidate.shape[0]
    slot = torch.arange(slots, device=counts.device)
    owner, draw = _owner(slot, counts)
    available = row.count[owner]
    drawn = row.first[owner] + bits(stream[owner], draw) % available.clamp(min=1)
    # what is no draw hits the slot behind the last unit
    drawn = torch.where((slot < counts.sum()) & (available > 0), drawn, tokens)
    hits = torch.zeros(tokens + 1, dtype=torch.long, device=slot.device).scatter_add(0, drawn, torch.ones_like(drawn))
    return is_candidate & (hits[row.number.clamp(min=0)] > 0)


def windows(
    row: Row, is_candidate: Tensor, gram: Tensor, order: Tensor, *, longest: int, spread: int, most: int
) -> Tensor:
    """True for the tokens marked by a walk from left to right (the generator of He et al. 2021).

    At every stop a number of units n is drawn; n units are marked somewhere in the next n · `spread`, and the walk goes
    on behind these or behind the marked ones, whichever is farther. Draws belong to the unit a window begins with, so
    that what follows any unit is known at once for all of them and the walk can be taken in leaps of 2, 4, 8 …

    Shape: is_candidate (tokens,); gram and order, the sources of draws, (sequences,). `longest` is the longest n-gram,
    `most` the most units of a sequence.
    """
    tokens = is_candidate.shape[0]
    slot = torch.arange(tokens, device=gram.device)
    owner, place = _owner(slot, row.count)
    end = (row.first + row.count)[owner]
    size = gram_lengths(uniform(gram[owner], place), longest)
    window = torch.minimum(size * spread, end - slot).clamp(min=1)
    begin = slot + bits(order[owner], place) % window
    stop = torch.minimum(begin + size, end)

    # a walk that has ended stays at the slot behind the last unit
    leap = torch.maximum(slot + window, stop)
    leap = torch.cat([torch.where(leap < end, leap, tokens), leap.new_full((1,), tokens)])
    has_units = row.count > 0
    reached = torch.zeros_like(leap).scatter_add(0, torch.where(has_units, row.first, tokens), has_units.long())
    for _ in range((-(-most // spread) - 1).bit_length()):
        reached = reached.scatter_add(0, leap, reached).clamp(max=1)
        leap = leap[leap]

    reached = reached[:tokens]
    edges = torch.zeros(tokens + 1, dtype=torch.long, device=slot.device)
    edges = edges.scatter_add(0, begin.clamp(max=tokens), reached).scatter_add(0, stop.clamp(max=tokens), -reached)
    return is_candidate & (edges.cumsum(0)[row.number.clamp(min=0)] > 0)


def from_the_left(row: Row, is_marked: Tensor, sequence: Tensor, counts: Tensor) -> Tensor:
    """True for the marked tokens up to the end of the unit that reaches its sequence's count.

    Shape: is_marked, sequence (tokens,); counts (sequences,).
    """
    marked = is_marked.long()
    sofar = running_sum(marked, segment_begins(sequence))
    before_unit = (sofar - marked)[segment_begins(row.number)]
    budget = counts[sequence]
    return is_marked & (before_unit < budget) & (sofar <= budget + budget // SURPLUS)


def _owner(slot: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The sequence each slot belongs to and its place there, where sequences have so many slots one after the other."""
    ends = counts.cumsum(0)
    owner = torch.searchsorted(ends, slot, right=True).clamp(max=counts.shape[0] - 1)
    return owner, slot - (ends - counts)[owner]

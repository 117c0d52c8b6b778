"""Units that are masked as a whole (words, n-grams of words), and their selection.

The units of a sequence are selected in random order until the exact number of tokens is reached; a unit that would
exceed it is skipped (the rule of Google's BERT code). Everything is computed for a whole batch, and no tensor's shape
depends on a draw: there are always as many unit slots as tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bertsmith.data.random import bits, uniform


def word_begins(starts_word: Tensor, is_candidate: Tensor, position: Tensor) -> Tensor:
    """Return True at the first token of each word; a special token is a word of its own.

    Shape: all (tokens,).
    """
    after_special = torch.cat([is_candidate.new_ones(1), ~is_candidate[:-1]])
    return starts_word | ~is_candidate | after_special | (position == 0)


def unit_numbers(begins: Tensor) -> Tensor:
    """Return the number of each token's unit, from 0, given the first tokens of units."""
    return begins.long().cumsum(0) - 1


def ngram_units(word: Tensor, sequence: Tensor, is_candidate: Tensor, stream: Tensor, max_ngram: int) -> Tensor:
    """Tile the words of each sequence with n-grams of 1 to `max_ngram` words, probability proportional to 1/n.

    Shape: word, sequence, is_candidate (tokens,); stream (sequences,): the source of each sequence's draws.
    """
    slots = word.shape[0]
    first = _first_token(word)
    of_sequence, joins = sequence[first], is_candidate[first]
    begin = segment_begins(of_sequence)
    position = torch.arange(slots, device=word.device) - begin

    length = gram_lengths(uniform(stream[of_sequence], position), max_ngram)  # of the n-gram at each position
    end = begin + running_sum(length, begin)
    reached = end.clamp(max=slots - 1)
    is_inside = (end < slots) & (of_sequence[reached] == of_sequence)
    opens = (position == 0).long().scatter_add(0, reached, is_inside.long()) > 0
    # a special token never joins its neighbours
    opens |= ~joins | torch.cat([opens.new_ones(1), ~joins[:-1]])
    return (opens.long().cumsum(0) - 1)[word]


def gram_lengths(draw: Tensor, max_ngram: int) -> Tensor:
    """Return the words of each n-gram: n from 1 to `max_ngram` with probability proportional to 1/n."""
    weights = [1 / n for n in range(1, max_ngram + 1)]
    lengths = torch.ones_like(draw, dtype=torch.long)
    for n in range(1, max_ngram):
        # rounded to the resolution of the draws, so that comparisons agree on every device
        lengths += draw >= round(sum(weights[:n]) / sum(weights) * 2**24) * 2.0**-24
    return lengths


def choose_units(
    unit: Tensor, sequence: Tensor, is_candidate: Tensor, counts: Tensor, stream: Tensor, *, rounds: int = 8
) -> Tensor:
    """Return True for the tokens of selected units.

    After a round the remaining count is below the size of the first unit that did not fit, so a few rounds suffice;
    units of one token need one.

    Shape: unit, sequence, is_candidate (tokens,); counts, the tokens to select, and stream (sequences,).
    """
    size = torch.zeros_like(unit).scatter_add(0, unit, is_candidate.long())
    first = _first_token(unit)
    of_sequence = sequence[first]
    # counted from the start of the sequence, so that other sequences have no effect
    draw = bits(stream[of_sequence], first - segment_begins(sequence)[first])
    # sort by sequence, then by 42 bits of the draw; slots without a candidate are last
    order = torch.argsort(torch.where(size > 0, (of_sequence << 42) | (draw >> 20), (1 << 62) - 1))
    size, of_sequence = size[order], of_sequence[order]
    begin = segment_begins(of_sequence)

    left = counts[of_sequence]
    is_taken = torch.zeros_like(size, dtype=torch.bool)
    for _ in range(rounds):
        # skip units larger than the remaining count; of the others take the longest prefix that fits
        fitting = torch.where((size <= left) & ~is_taken, size, 0)
        now = (fitting > 0) & (running_sum(fitting, begin) <= left)
        is_taken |= now
        used = torch.zeros_like(counts).scatter_add(0, of_sequence, torch.where(now, size, 0))
        left = left - used[of_sequence]
    return torch.zeros_like(is_taken).scatter(0, order, is_taken)[unit] & is_candidate


def _first_token(unit: Tensor) -> Tensor:
    """Return the first token of each unit; unused slots give the last token."""
    index = torch.arange(unit.shape[0], device=unit.device)
    return torch.full_like(unit, unit.shape[0] - 1).scatter_reduce(0, unit, index, "amin")


def segment_begins(segment: Tensor) -> Tensor:
    """Return for every slot the first slot of its run of equal numbers."""
    index = torch.arange(segment.shape[0], device=segment.device)
    changes = torch.cat([index.new_ones(1, dtype=torch.bool), segment[1:] != segment[:-1]])
    return torch.where(changes, index, 0).cummax(0).values


def running_sum(values: Tensor, begin: Tensor) -> Tensor:
    """Return the cumulative sum of values within each run, inclusive."""
    total = values.cumsum(0)
    return total - (total - values)[begin]


SURPLUS = 4
"""The word that reaches a budget may exceed it by 1 / SURPLUS (19 tokens of 77); its tokens beyond are not masked.

This bounds the number of masked positions of a batch, although the length of a word is not bounded.
"""


@dataclass(frozen=True)
class UnitRow:
    """The units of all sequences, concatenated.

    Shape: number (tokens,), the unit of each token (of the previous unit for a special token); first and count
    (sequences,), the first unit of a sequence and its number of units.
    """

    number: Tensor
    first: Tensor
    count: Tensor

    @classmethod
    def of(cls, begins: Tensor, is_candidate: Tensor, sequence: Tensor, sequences: int) -> "UnitRow":
        """Return the row of units, given their first tokens.

        Shape: begins, is_candidate, sequence (tokens,).
        """
        opens = (begins & is_candidate).long()
        count = opens.new_zeros(sequences).scatter_add(0, sequence, opens)
        return cls(opens.cumsum(0) - 1, count.cumsum(0) - count, count)


def with_replacement(row: UnitRow, is_candidate: Tensor, counts: Tensor, stream: Tensor, slots: int) -> Tensor:
    """Return True for tokens of units drawn with replacement, `counts` draws per sequence (Clark et al. 2020).

    Shape: is_candidate (tokens,); counts and stream (sequences,). `slots` is at least the sum of the counts.
    """
    tokens = is_candidate.shape[0]
    slot = torch.arange(slots, device=counts.device)
    owner, draw = _owner(slot, counts)
    available = row.count[owner]
    drawn = row.first[owner] + bits(stream[owner], draw) % available.clamp(min=1)
    # unused draws hit the slot after the last unit
    drawn = torch.where((slot < counts.sum()) & (available > 0), drawn, tokens)
    hits = torch.zeros(tokens + 1, dtype=torch.long, device=slot.device).scatter_add(0, drawn, torch.ones_like(drawn))
    return is_candidate & (hits[row.number.clamp(min=0)] > 0)


def windows(
    row: UnitRow, is_candidate: Tensor, gram: Tensor, order: Tensor, *, max_ngram: int, spread: int, max_units: int
) -> Tensor:
    """Return True for tokens marked by a walk from left to right (the masking of He et al. 2021).

    At every stop a number of units n is drawn; n units are marked at random in the next n · `spread`, and the walk
    continues after these or after the marked ones, whichever is farther. Draws belong to the first unit of a window, so
    that the successors of all units can be computed in parallel and the walk takes leaps of 2, 4, 8 … stops.

    Shape: is_candidate (tokens,); gram and order, the random streams, (sequences,). `max_units` bounds the units of a
    sequence.
    """
    tokens = is_candidate.shape[0]
    slot = torch.arange(tokens, device=gram.device)
    owner, position = _owner(slot, row.count)
    end = (row.first + row.count)[owner]
    size = gram_lengths(uniform(gram[owner], position), max_ngram)
    window = torch.minimum(size * spread, end - slot).clamp(min=1)
    begin = slot + bits(order[owner], position) % window
    stop = torch.minimum(begin + size, end)

    # a finished walk stays at the slot after the last unit
    leap = torch.maximum(slot + window, stop)
    leap = torch.cat([torch.where(leap < end, leap, tokens), leap.new_full((1,), tokens)])
    has_units = row.count > 0
    reached = torch.zeros_like(leap).scatter_add(0, torch.where(has_units, row.first, tokens), has_units.long())
    for _ in range((-(-max_units // spread) - 1).bit_length()):
        reached = reached.scatter_add(0, leap, reached).clamp(max=1)
        leap = leap[leap]

    reached = reached[:tokens]
    edges = torch.zeros(tokens + 1, dtype=torch.long, device=slot.device)
    edges = edges.scatter_add(0, begin.clamp(max=tokens), reached).scatter_add(0, stop.clamp(max=tokens), -reached)
    return is_candidate & (edges.cumsum(0)[row.number.clamp(min=0)] > 0)


def from_the_left(row: UnitRow, is_marked: Tensor, sequence: Tensor, counts: Tensor) -> Tensor:
    """Return True for marked tokens up to the end of the unit that reaches its sequence's count.

    Shape: is_marked, sequence (tokens,); counts (sequences,).
    """
    marked = is_marked.long()
    so_far = running_sum(marked, segment_begins(sequence))
    before_unit = (so_far - marked)[segment_begins(row.number)]
    budget = counts[sequence]
    return is_marked & (before_unit < budget) & (so_far <= budget + budget // SURPLUS)


def _owner(slot: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return each slot's sequence and its index there, given the number of slots per sequence."""
    ends = counts.cumsum(0)
    owner = torch.searchsorted(ends, slot, right=True).clamp(max=counts.shape[0] - 1)
    return owner, slot - (ends - counts)[owner]

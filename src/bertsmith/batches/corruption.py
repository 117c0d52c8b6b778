"""Masking as a pure function of (tokens, seed): which positions are to be predicted, and what stands there instead.

All sequences of a batch are worked on at once, on any device, with the same result on each; what happens to one does
not depend on the others.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from bertsmith.batches.batch import IGNORED, TokenBatch
from bertsmith.batches.layout import SequenceLayout
from bertsmith.batches.random import bits, uniform
from bertsmith.batches.units import choose_units, ngram_units, word_units
from bertsmith.settings import Record

# the streams of random numbers of one sample
_ORDER, _KIND, _REPLACEMENT, _GRAM = range(4)


class MaskingConfig(Record):
    """How much is masked, in which units, and what is put there."""

    rate: float = Field(default=0.15, gt=0, lt=1)
    """Share of a sequence's tokens (special ones counted in) that is to be predicted: exactly, and at least one."""
    unit: Literal["token", "word", "ngram"] = "token"
    longest_ngram: int = Field(default=3, ge=1, le=16)
    """For unit = "ngram": up to so many words, n words with a chance in proportion to 1/n."""
    mask: float = Field(default=0.8, ge=0, le=1)
    """Share of the chosen tokens that become [MASK] …"""
    random: float = Field(default=0.1, ge=0, le=1)
    """… and that become a random token; the others stay as they are."""

    @model_validator(mode="after")
    def _check_shares(self) -> "MaskingConfig":
        if self.mask + self.random > 1 + 1e-9:
            raise ValueError(f"mask {self.mask} and random {self.random} add up to more than 1")
        return self


@dataclass(frozen=True)
class Vocabulary:
    """What masking must know about the tokenizer, on the device of the batch."""

    size: int
    mask: int
    is_special: Tensor
    """(size,), True for [CLS], [SEP], [PAD] …"""
    starts_word: Tensor
    """(size,), False for pieces that go on with a word."""

    def to(self, device: torch.device | str) -> "Vocabulary":
        return Vocabulary(self.size, self.mask, self.is_special.to(device), self.starts_word.to(device))


@dataclass(frozen=True)
class Corrupted:
    """Tokens with some replaced, and where to look.

    Shape: tokens as given; places and targets (limit,), where `limit` depends on the batch's shape alone. Places index
    the flattened tokens; unused ones have the target IGNORED.
    """

    tokens: Tensor
    places: Tensor
    targets: Tensor


def corrupt(batch: TokenBatch, seed: int, masking: MaskingConfig, vocabulary: Vocabulary) -> Corrupted:
    """The batch's tokens with the chosen ones replaced, and what stood there."""
    tokens, layout = batch.tokens, batch.layout
    flat = tokens.flatten().long()
    sequence = layout.sequence_index(tokens).flatten()
    position = layout.positions(tokens).flatten()
    sample = batch.sample[sequence]
    is_candidate = ~vocabulary.is_special[flat]
    if layout.is_token is not None:
        is_candidate &= layout.is_token.flatten()

    unit = torch.arange(flat.shape[0], device=flat.device)
    if masking.unit != "token":
        unit = word_units(vocabulary.starts_word[flat], is_candidate, position)
    counts = target_counts(layout.lengths(tokens.device), masking.rate)
    order = _stream(seed, batch.sample, _ORDER)
    if masking.unit == "ngram":
        grams = ngram_units(unit, sequence, is_candidate, _stream(seed, batch.sample, _GRAM), masking.longest_ngram)
        is_chosen = choose_units(grams, sequence, is_candidate, counts, order, rounds=4)
        # where no n-gram fits any more, single words fill the count
        missing = counts - torch.zeros_like(counts).scatter_add(0, sequence, is_chosen.long())
        is_chosen |= choose_units(unit, sequence, is_candidate & ~is_chosen, missing, order)
    else:
        rounds = 1 if masking.unit == "token" else 8
        is_chosen = choose_units(unit, sequence, is_candidate, counts, order, rounds=rounds)

    kind = uniform(_stream(seed, sample, _KIND), position)
    anything = bits(_stream(seed, sample, _REPLACEMENT), position) % vocabulary.size
    replaced = torch.where(kind < masking.mask + masking.random, anything, flat)
    replaced = torch.where(kind < masking.mask, vocabulary.mask, replaced)
    corrupted = torch.where(is_chosen, replaced, flat)

    # a fixed number of places, the chosen ones first: no tensor's shape depends on the draw
    limit = target_limit(layout, flat.shape[0], masking.rate)
    places = torch.argsort(is_chosen.to(torch.uint8), descending=True, stable=True)[:limit]
    targets = torch.where(is_chosen[places], flat[places], IGNORED)
    return Corrupted(corrupted.view_as(tokens), places, targets)


def target_counts(lengths: Tensor, rate: float) -> Tensor:
    """How many tokens of each sequence are to be predicted: round(rate · length), at least one, none if it is empty."""
    counts = (lengths.double() * rate + 0.5).floor().long().clamp(min=1)
    return torch.where(lengths > 0, counts, 0)


def target_limit(layout: SequenceLayout, tokens: int, rate: float) -> int:
    """The most targets a batch of this shape can have, as a multiple of 64 for the matrix units, at most all tokens."""
    most = int(tokens * rate + layout.batch) + 1
    return min(tokens, -(-most // 64) * 64)


def _stream(seed: int, sample: Tensor, purpose: int) -> Tensor:
    return bits(seed * 4 + purpose, sample)

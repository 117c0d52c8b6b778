"""Masking as a pure function of (tokens, seed): positions to predict and their replacements.

Works on a whole batch in parallel, with the same result on every device; sequences are independent of each other.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from bertsmith.answers.sequences import IGNORED
from bertsmith.data.batch import TokenBatch
from bertsmith.data.layout import SequenceLayout
from bertsmith.data.random import bits, uniform
from bertsmith.data.units import (
    SURPLUS,
    UnitRow,
    choose_units,
    from_the_left,
    ngram_units,
    unit_numbers,
    windows,
    with_replacement,
    word_begins,
)
from bertsmith.settings import Record

# random streams of one sample
_ORDER, _KIND, _REPLACEMENT, _GRAM = range(4)


class MaskingConfig(Record):
    """Masking rate, units and replacements."""

    rate: float = Field(default=0.15, gt=0, lt=1)
    """Fraction of a sequence's tokens (including special tokens) to predict; at least one token."""
    unit: Literal["token", "word", "ngram"] = "token"
    """Unit that is masked as a whole: a token, a word, or an n-gram of words."""
    max_ngram: int = Field(default=3, ge=1, le=16)
    """For unit = "ngram": maximum n; the probability of n is proportional to 1/n."""
    draw: Literal["exact", "with_replacement", "windows"] = "exact"
    """BERT's "exact": units in random order up to the exact number of tokens. ELECTRA's "with_replacement": draws of
    single tokens with replacement; duplicates count once, so that 7 % fewer are masked at rate 0.15. DeBERTa's
    "windows": from left to right n units at random in every window of n · int(1 / rate), until the rate is reached; the
    end of a sequence is masked less."""
    max_predictions: int | None = Field(default=None, ge=1)
    """Maximum number of masked tokens per sequence: BERT's 20 at length 128, ELECTRA's int((rate + 0.005) · length),
    DeBERTa's 80 at length 512. At those lengths and rate 0.15 it has no effect."""
    mask: float = Field(default=0.8, ge=0, le=1)
    """Fraction of the selected tokens that become [MASK] …"""
    random: float = Field(default=0.1, ge=0, le=1)
    """… and that become a random token; the others stay unchanged."""

    @model_validator(mode="after")
    def _check_shares(self) -> "MaskingConfig":
        if self.mask + self.random > 1 + 1e-9:
            raise ValueError(f"mask {self.mask} and random {self.random} add up to more than 1")
        if self.mask + self.random == 0:
            raise ValueError(
                "mask and random are both 0, so no token would be corrupted; allowed: a sum above 0, up to 1"
            )
        return self

    @model_validator(mode="after")
    def _check_draw(self) -> "MaskingConfig":
        if self.unit != "ngram" and self.max_ngram != MaskingConfig.model_fields["max_ngram"].default:
            raise ValueError(f"max_ngram is {self.max_ngram}, but unit is {self.unit!r}; it needs unit 'ngram'")
        if self.draw == "with_replacement" and self.unit != "token":
            raise ValueError(f"draw is 'with_replacement', but unit is {self.unit!r}; allowed: 'token'")
        if self.draw == "windows" and self.rate > 0.5:
            # windows of one unit would mask everything up to the budget
            raise ValueError(f"rate is {self.rate}; allowed with draw = 'windows': up to 0.5")
        return self


@dataclass(frozen=True)
class Vocabulary:
    """Properties of the tokenizer that masking needs, on the device of the batch."""

    size: int
    mask: int
    is_special: Tensor
    """(size,), True for [CLS], [SEP], [PAD] …"""
    starts_word: Tensor
    """(size,), False for tokens that continue a word."""

    def to(self, device: torch.device | str) -> "Vocabulary":
        return Vocabulary(self.size, self.mask, self.is_special.to(device), self.starts_word.to(device))


@dataclass(frozen=True)
class Corrupted:
    """Corrupted tokens with the positions and targets to predict.

    Shape: tokens as given; positions and targets (limit,), where `limit` depends on the batch's shape only. Positions
    index the flattened tokens; unused ones have the target IGNORED.
    """

    tokens: Tensor
    positions: Tensor
    targets: Tensor


def corrupt(batch: TokenBatch, seed: int, masking: MaskingConfig, vocabulary: Vocabulary) -> Corrupted:
    """Replace the selected tokens of a batch and return them as targets."""
    tokens, layout = batch.tokens, batch.layout
    flat = tokens.flatten().long()
    sequence = layout.sequence_index(tokens).flatten()
    position = layout.positions(tokens).flatten()
    sample = batch.sample[sequence]
    is_candidate = ~vocabulary.is_special[flat]
    if layout.is_token is not None:
        is_candidate &= layout.is_token.flatten()

    begins = torch.ones_like(is_candidate)
    if masking.unit != "token":
        begins = word_begins(vocabulary.starts_word[flat], is_candidate, position)
    counts = target_counts(layout.lengths(tokens.device), masking.rate, masking.max_predictions)
    limit = target_limit(layout, flat.shape[0], masking)
    order, gram = _stream(seed, batch.sample, _ORDER), _stream(seed, batch.sample, _GRAM)
    if masking.draw == "exact":
        is_chosen = _choose_exact(begins, sequence, is_candidate, counts, order, gram, masking)
    else:
        row = UnitRow.of(begins, is_candidate, sequence, layout.batch)
        if masking.draw == "with_replacement":
            is_chosen = with_replacement(row, is_candidate, counts, order, limit)
        else:
            max_ngram, spread = masking.max_ngram if masking.unit == "ngram" else 1, int(1 / masking.rate)
            is_marked = windows(
                row, is_candidate, gram, order, max_ngram=max_ngram, spread=spread, max_units=layout.max_length
            )
            is_chosen = from_the_left(row, is_marked, sequence, counts)

    kind = uniform(_stream(seed, sample, _KIND), position)
    random_token = bits(_stream(seed, sample, _REPLACEMENT), position) % vocabulary.size
    replaced = torch.where(kind < masking.mask + masking.random, random_token, flat)
    replaced = torch.where(kind < masking.mask, vocabulary.mask, replaced)
    corrupted = torch.where(is_chosen, replaced, flat)

    # a fixed number of positions, selected ones first, so that no tensor's shape depends on the draw
    positions = torch.argsort(is_chosen.to(torch.uint8), descending=True, stable=True)[:limit]
    targets = torch.where(is_chosen[positions], flat[positions], IGNORED)
    return Corrupted(corrupted.view_as(tokens), positions, targets)


def _choose_exact(
    begins: Tensor,
    sequence: Tensor,
    is_candidate: Tensor,
    counts: Tensor,
    order: Tensor,
    gram: Tensor,
    masking: MaskingConfig,
) -> Tensor:
    """Return True for tokens of units selected in random order, up to the exact counts."""
    unit = unit_numbers(begins)
    if masking.unit != "ngram":
        rounds = 1 if masking.unit == "token" else 8
        return choose_units(unit, sequence, is_candidate, counts, order, rounds=rounds)
    grams = ngram_units(unit, sequence, is_candidate, gram, masking.max_ngram)
    is_chosen = choose_units(grams, sequence, is_candidate, counts, order, rounds=4)
    # if no n-gram fits any more, single words fill the count
    missing = counts - torch.zeros_like(counts).scatter_add(0, sequence, is_chosen.long())
    return is_chosen | choose_units(unit, sequence, is_candidate & ~is_chosen, missing, order)


def target_counts(lengths: Tensor, rate: float, max_predictions: int | None = None) -> Tensor:
    """Return the number of tokens to predict per sequence: round(rate · length), half to even.

    At least one and at most `max_predictions`; 0 for an empty sequence.
    """
    counts = (lengths.double() * rate).round().long().clamp(min=1, max=max_predictions)
    return torch.where(lengths > 0, counts, 0)


def target_limit(layout: SequenceLayout, tokens: int, masking: MaskingConfig) -> int:
    """Return the maximum number of targets of a batch, rounded up to a multiple of 64 for tensor cores."""
    limit = int(tokens * masking.rate + layout.batch) + 1
    if masking.max_predictions is not None:
        limit = min(limit, masking.max_predictions * layout.batch)
    if masking.draw == "windows" and masking.unit != "token":
        limit += limit // SURPLUS
    return min(tokens, -(-limit // 64) * 64)


def _stream(seed: int, sample: Tensor, purpose: int) -> Tensor:
    return bits(seed * 4 + purpose, sample)

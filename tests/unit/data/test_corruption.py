"""Masking against a plain loop over sequences and units."""

import numpy as np
import pytest
import torch
from helpers_masking import END, MASK, SIZE, START, candidates, chosen, packed, padded, sequences, vocabulary, words_of

from bertsmith.data.corruption import MaskingConfig, corrupt, target_counts
from bertsmith.data.random import bits
from bertsmith.data.units import choose_units, ngram_units, unit_numbers, word_begins

RULES = [
    *({"unit": unit, "draw": draw} for unit in ("token", "word", "ngram") for draw in ("exact", "windows")),
    {"draw": "with_replacement"},
    {"draw": "with_replacement", "max_predictions": 3},
]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("rate", [0.15, 0.4])
def test_masking_is_the_same_alone_packed_and_padded(rule: dict[str, object], rate: float) -> None:
    items, samples = sequences(9, 40, seed=1), list(range(100, 109))
    masking = MaskingConfig(**rule, rate=rate)
    together = corrupt(packed(items, samples), 7, masking, vocabulary()).tokens
    rows = corrupt(padded(items, samples), 7, masking, vocabulary()).tokens
    alone = [
        corrupt(packed([item], [s]), 7, masking, vocabulary()).tokens for item, s in zip(items, samples, strict=True)
    ]
    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(together, torch.cat([row[: len(item)] for row, item in zip(rows, items, strict=True)]))


@pytest.mark.parametrize("unit", ["token", "word", "ngram"])
def test_counts_are_exact(unit: str) -> None:
    items = [item for item in sequences(60, 120, seed=2) if len(item) > 20]
    batch = packed(items, list(range(len(items))))
    result = corrupt(batch, 3, MaskingConfig(unit=unit), vocabulary())
    positions = result.positions[result.targets >= 0]
    got = torch.bincount(batch.layout.sequence_index(batch.tokens)[positions], minlength=len(items))
    assert torch.equal(got, target_counts(batch.layout.lengths(), 0.15))
    assert torch.equal(batch.tokens[positions], result.targets[result.targets >= 0])
    untouched = torch.ones(len(batch.tokens), dtype=torch.bool)
    untouched[positions] = False
    assert torch.equal(result.tokens[untouched], batch.tokens[untouched])
    assert not vocabulary().is_special[batch.tokens[positions]].any()


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.get("unit") in ("word", "ngram")], ids=str)
def test_words_and_ngrams_are_masked_whole(rule: dict[str, object]) -> None:
    batch = packed(sequences(40, 90, seed=3), list(range(40)))
    is_chosen = chosen(corrupt(batch, 5, MaskingConfig(**rule, rate=0.3), vocabulary())).float()
    shares = torch.zeros_like(is_chosen).scatter_reduce(0, words_of(batch), is_chosen, "mean", include_self=False)
    assert set(shares.tolist()) == {0.0, 1.0}


def test_ngram_lengths_follow_1_over_n() -> None:
    items = [torch.tensor([START, *([10] * 600), END]) for _ in range(20)]
    batch = packed(items, list(range(20)))
    is_candidate, stream = candidates(batch), bits(9, batch.sample)
    grams = ngram_units(words_of(batch), batch.layout.sequence_index(batch.tokens), is_candidate, stream, 3)
    lengths = torch.bincount(torch.bincount(grams[is_candidate]))[1:4].double()
    shares = lengths / lengths.sum()
    assert torch.allclose(shares, torch.tensor([6 / 11, 3 / 11, 2 / 11]).double(), atol=0.03)


@pytest.mark.parametrize("seed", range(6))
def test_selection_equals_a_plain_loop(seed: int) -> None:
    """Units are selected in random order; one that would exceed the count is skipped."""
    draw = np.random.default_rng(seed)
    items = sequences(12, 60, seed)
    batch = packed(items, list(range(12)))
    sequence = batch.layout.sequence_index(batch.tokens)
    is_candidate = candidates(batch)
    starts_word = torch.from_numpy(draw.random(len(batch.tokens)) < 0.5)
    words = unit_numbers(word_begins(starts_word, is_candidate, batch.layout.positions(batch.tokens)))
    counts = torch.from_numpy(draw.integers(1, 9, size=12))
    stream = bits(seed, batch.sample)
    expected = torch.zeros(len(batch.tokens), dtype=torch.bool)
    for index in range(12):
        begin = int(batch.layout.starts[index])
        units = sorted(set(words[(sequence == index) & is_candidate].tolist()))
        first = {unit: int((words == unit).nonzero()[0]) - begin for unit in units}
        units.sort(key=lambda unit: int(bits(stream[index], torch.tensor(first[unit]))))
        left = int(counts[index])
        for unit in units:
            members = (words == unit) & is_candidate
            if int(members.sum()) <= left:
                expected |= members
                left -= int(members.sum())
    assert torch.equal(choose_units(words, sequence, is_candidate, counts, stream), expected)


def test_replacements_are_80_10_10() -> None:
    items = [torch.tensor([START, *([10] * 900), END]) for _ in range(20)]
    result = corrupt(packed(items, list(range(20))), 1, MaskingConfig(rate=0.5), vocabulary())
    now = result.tokens[result.positions[result.targets >= 0]]
    assert abs(float((now == MASK).float().mean()) - 0.8 - 0.1 / SIZE) < 0.015
    assert abs(float((now == 10).float().mean()) - 0.1 - 0.1 / SIZE) < 0.015


def test_target_counts_are_bounded_and_round_half_to_even() -> None:
    assert target_counts(torch.tensor([0, 1, 10, 30, 128, 512]), 0.15).tolist() == [0, 1, 2, 4, 19, 77]
    assert target_counts(torch.tensor([0, 1, 128]), 0.15, 7).tolist() == [0, 1, 7]
    batch = packed(sequences(30, 100, seed=6), list(range(30)))
    masking = MaskingConfig(rate=0.4, max_predictions=7)
    is_chosen = chosen(corrupt(batch, 3, masking, vocabulary()))
    got = torch.bincount(batch.layout.sequence_index(batch.tokens)[is_chosen], minlength=30)
    assert torch.equal(got, target_counts(batch.layout.lengths(), 0.4, 7).minimum(batch.layout.lengths() - 2))


def test_masking_depends_on_seed_and_sample() -> None:
    items = sequences(4, 80, seed=4)
    first = corrupt(packed(items, [0, 1, 2, 3]), 1, MaskingConfig(), vocabulary()).tokens
    assert not torch.equal(first, corrupt(packed(items, [0, 1, 2, 3]), 2, MaskingConfig(), vocabulary()).tokens)
    assert not torch.equal(first, corrupt(packed(items, [9, 8, 7, 6]), 1, MaskingConfig(), vocabulary()).tokens)
    assert torch.equal(first, corrupt(packed(items, [0, 1, 2, 3]), 1, MaskingConfig(), vocabulary()).tokens)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mask": 0.8, "random": 0.3}, "add up to more than 1"),
        ({"mask": 0.0, "random": 0.0}, "mask and random are both 0"),
        ({"max_ngram": 5}, "max_ngram is 5, but unit is 'token'; it needs unit 'ngram'"),
        ({"draw": "with_replacement", "unit": "word"}, "but unit is 'word'; allowed: 'token'"),
        ({"draw": "windows", "rate": 0.6}, "allowed with draw = 'windows': up to 0.5"),
        ({"max_predictions": 0}, "greater than or equal to 1"),
    ],
)
def test_invalid_settings_raise(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MaskingConfig(**settings)

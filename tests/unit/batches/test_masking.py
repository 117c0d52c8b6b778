"""Masking against a transcription that works one sequence and one unit after the other."""

import numpy as np
import pytest
import torch

from bertsmith.batches.batch import TokenBatch
from bertsmith.batches.corruption import MaskingConfig, Vocabulary, corrupt, target_counts
from bertsmith.batches.layout import SequenceLayout
from bertsmith.batches.random import bits
from bertsmith.batches.units import choose_units, ngram_units, word_units

SIZE, PAD, START, END, MASK = 60, 0, 1, 2, 3


def vocabulary() -> Vocabulary:
    is_special = torch.zeros(SIZE, dtype=torch.bool)
    is_special[:5] = True
    starts_word = torch.ones(SIZE, dtype=torch.bool)
    starts_word[40:] = False
    return Vocabulary(SIZE, MASK, is_special, starts_word)


def sequences(count: int, longest: int, seed: int) -> list[torch.Tensor]:
    draw = np.random.default_rng(seed)
    result = []
    for _ in range(count):
        text = draw.integers(5, SIZE, size=int(draw.integers(1, longest - 1)))
        result.append(torch.tensor([START, *text, END]))
    return result


def packed(items: list[torch.Tensor], samples: list[int]) -> TokenBatch:
    lengths = torch.tensor([len(item) for item in items])
    starts = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int()
    layout = SequenceLayout.packed(starts, int(lengths.max()))
    return TokenBatch(torch.cat(items), layout, torch.tensor(samples), int(lengths.sum()))


def padded(items: list[torch.Tensor], samples: list[int]) -> TokenBatch:
    tokens = torch.nn.utils.rnn.pad_sequence(items, batch_first=True, padding_value=PAD)
    lengths = torch.tensor([len(item) for item in items])
    is_token = torch.arange(tokens.shape[1]) < lengths[:, None]
    return TokenBatch(tokens, SequenceLayout.padded(is_token), torch.tensor(samples), int(lengths.sum()))


@pytest.mark.parametrize("unit", ["token", "word", "ngram"])
@pytest.mark.parametrize("rate", [0.15, 0.4])
def test_a_sequence_is_masked_alike_alone_packed_and_padded(unit: str, rate: float) -> None:
    items, samples = sequences(9, 40, seed=1), list(range(100, 109))
    masking = MaskingConfig(unit=unit, rate=rate)
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
    places = result.places[result.targets >= 0]
    got = torch.bincount(batch.layout.sequence_index(batch.tokens)[places], minlength=len(items))
    assert torch.equal(got, target_counts(batch.layout.lengths(), 0.15))
    assert torch.equal(batch.tokens[places], result.targets[result.targets >= 0])
    untouched = torch.ones(len(batch.tokens), dtype=torch.bool)
    untouched[places] = False
    assert torch.equal(result.tokens[untouched], batch.tokens[untouched])
    assert not vocabulary().is_special[batch.tokens[places]].any()


def test_words_and_ngrams_are_taken_whole() -> None:
    items = sequences(40, 90, seed=3)
    batch, table = packed(items, list(range(40))), vocabulary()
    is_candidate = ~table.is_special[batch.tokens]
    position = batch.layout.positions(batch.tokens)
    words = word_units(table.starts_word[batch.tokens], is_candidate, position)
    for unit in ("word", "ngram"):
        result = corrupt(batch, 5, MaskingConfig(unit=unit, rate=0.3), table)
        chosen = torch.zeros(len(batch.tokens))
        chosen[result.places[result.targets >= 0]] = 1
        shares = torch.zeros_like(chosen).scatter_reduce(0, words, chosen, "mean", include_self=False)
        assert set(shares.tolist()) <= {0.0, 1.0}


def test_ngrams_have_the_right_lengths() -> None:
    items = [torch.tensor([START, *([10] * 600), END]) for _ in range(20)]
    batch, table = packed(items, list(range(20))), vocabulary()
    is_candidate = ~table.is_special[batch.tokens]
    words = word_units(table.starts_word[batch.tokens], is_candidate, batch.layout.positions(batch.tokens))
    stream = bits(9, batch.sample)
    grams = ngram_units(words, batch.layout.sequence_index(batch.tokens), is_candidate, stream, 3)
    lengths = torch.bincount(torch.bincount(grams[is_candidate]))[1:4].double()
    shares = lengths / lengths.sum()
    assert torch.allclose(shares, torch.tensor([6 / 11, 3 / 11, 2 / 11]).double(), atol=0.03)


@pytest.mark.parametrize("seed", range(6))
def test_choice_equals_the_rule_written_out(seed: int) -> None:
    """Units in random order; one that would exceed the count is passed over."""
    draw = np.random.default_rng(seed)
    items = sequences(12, 60, seed)
    batch = packed(items, list(range(12)))
    sequence = batch.layout.sequence_index(batch.tokens)
    is_candidate = ~vocabulary().is_special[batch.tokens]
    words = word_units(
        torch.from_numpy(draw.random(len(batch.tokens)) < 0.5), is_candidate, batch.layout.positions(batch.tokens)
    )
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


def test_eighty_ten_ten() -> None:
    items = [torch.tensor([START, *([10] * 900), END]) for _ in range(20)]
    result = corrupt(packed(items, list(range(20))), 1, MaskingConfig(rate=0.5), vocabulary())
    now = result.tokens[result.places[result.targets >= 0]]
    assert abs(float((now == MASK).float().mean()) - 0.8 - 0.1 / SIZE) < 0.015
    assert abs(float((now == 10).float().mean()) - 0.1 - 0.1 / SIZE) < 0.015


def test_another_seed_and_another_sample_mask_elsewhere() -> None:
    items = sequences(4, 80, seed=4)
    first = corrupt(packed(items, [0, 1, 2, 3]), 1, MaskingConfig(), vocabulary()).tokens
    assert not torch.equal(first, corrupt(packed(items, [0, 1, 2, 3]), 2, MaskingConfig(), vocabulary()).tokens)
    assert not torch.equal(first, corrupt(packed(items, [9, 8, 7, 6]), 1, MaskingConfig(), vocabulary()).tokens)
    assert torch.equal(first, corrupt(packed(items, [0, 1, 2, 3]), 1, MaskingConfig(), vocabulary()).tokens)


def test_shares_that_exceed_one_are_refused() -> None:
    with pytest.raises(ValueError, match="add up to more than 1"):
        MaskingConfig(mask=0.8, random=0.3)

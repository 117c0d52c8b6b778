"""ELECTRA's and DeBERTa's selection of masked tokens, against plain loops over sequences."""

import pytest
import torch
from helpers_masking import END, START, chosen, packed, sequences, vocabulary

from bertsmith.data.batch import TokenBatch
from bertsmith.data.corruption import MaskingConfig, corrupt, target_counts, target_limit
from bertsmith.data.random import bits
from bertsmith.data.units import SURPLUS

SEED = 21
UNBOUND = ("windows", "with_replacement")


def draw(sample: int, purpose: int, counter: int) -> int:
    """Return 62 random bits of a sample's stream: 0 for the selection, 3 for n-gram lengths."""
    return int(bits(bits(SEED * 4 + purpose, torch.tensor(sample)), torch.tensor(counter)))


def units_of(tokens: torch.Tensor, takes_words: bool) -> list[list[int]]:
    """Return the tokens or words of one sequence as lists of positions, without special tokens."""
    table, units = vocabulary(), []
    for position, token in enumerate(tokens.tolist()):
        if table.is_special[token]:
            continue
        if takes_words and units and not table.starts_word[token] and units[-1][-1] == position - 1:
            units[-1].append(position)
        else:
            units.append([position])
    return units


def walk(sample: int, units: int, max_length: int, spread: int) -> list[tuple[int, int]]:
    """Return the spans of units that DeBERTa's masking marks."""
    weights = [1 / n for n in range(1, max_length + 1)]
    spans, offset = [], 0
    while offset < units:
        share = (draw(sample, 3, offset) >> 38) / 2**24
        n = next(n for n in range(1, max_length + 1) if share < sum(weights[:n]) / sum(weights) or n == max_length)
        window = min(n * spread, units - offset)
        begin = offset + draw(sample, 0, offset) % window
        stop = min(begin + n, units)
        spans.append((begin, stop))
        offset = max(offset + window, stop)
    return spans


def windows_rule(tokens: torch.Tensor, sample: int, masking: MaskingConfig) -> set[int]:
    """Return the positions that DeBERTa's masking selects."""
    units = units_of(tokens, masking.unit != "token")
    max_length = masking.max_ngram if masking.unit == "ngram" else 1
    budget = max(1, round(masking.rate * len(tokens)))
    if masking.max_predictions is not None:
        budget = min(budget, masking.max_predictions)
    marked = [unit for span in walk(sample, len(units), max_length, int(1 / masking.rate)) for unit in range(*span)]
    positions: list[int] = []
    for unit in marked:
        if len(positions) >= budget:
            break
        positions += units[unit]
    return set(positions[: budget + budget // SURPLUS])


def replacement_rule(tokens: torch.Tensor, sample: int, masking: MaskingConfig) -> set[int]:
    """Return the positions that ELECTRA's masking selects."""
    units = units_of(tokens, False)
    count = max(1, min(masking.max_predictions or len(tokens), round(masking.rate * len(tokens))))
    return {units[draw(sample, 0, number) % len(units)][0] for number in range(count)}


@pytest.mark.parametrize(
    "masking",
    [
        MaskingConfig(draw="windows", unit="ngram"),
        MaskingConfig(draw="windows", unit="ngram", max_ngram=5, rate=0.3, max_predictions=9),
        MaskingConfig(draw="windows", unit="word", rate=0.5),
        MaskingConfig(draw="windows"),
        MaskingConfig(draw="with_replacement"),
        MaskingConfig(draw="with_replacement", rate=0.4, max_predictions=6),
    ],
    ids=lambda masking: f"{masking.draw}-{masking.unit}-{masking.rate}",
)
def test_selection_equals_a_plain_loop(masking: MaskingConfig) -> None:
    items = [*sequences(30, 150, seed=8), torch.tensor([START, END]), *sequences(10, 5, seed=9)]
    # a separator in the middle, and a word of many tokens where the budget ends
    items += [torch.cat([items[0], items[1][1:]]), torch.tensor([START, *([10] * 9), *([50] * 40), END])]
    samples = [7 * index + 3 for index in range(len(items))]
    rule = replacement_rule if masking.draw == "with_replacement" else windows_rule
    batch = packed(items, samples)
    is_chosen = chosen(corrupt(batch, SEED, masking, vocabulary()))
    for index, (item, sample) in enumerate(zip(items, samples, strict=True)):
        begin = int(batch.layout.starts[index])
        got = set((is_chosen[begin : begin + len(item)]).nonzero().flatten().tolist())
        assert got == (rule(item, sample, masking) if len(item) > 2 else set()), index


def plain(count: int, length: int) -> TokenBatch:
    """Return sequences of single-token words."""
    return packed([torch.tensor([START, *([10] * (length - 2)), END]) for _ in range(count)], list(range(count)))


def test_windows_mask_the_end_less_and_ngrams_by_1_over_n() -> None:
    batch = plain(400, 512)
    is_chosen = chosen(corrupt(batch, SEED, MaskingConfig(draw="windows", unit="ngram"), vocabulary())).view(400, 512)
    assert is_chosen.sum(1).max() == 77  # the last n-gram ends where the budget does
    assert 0.149 < float(is_chosen.float().mean()) < 0.151
    by_place = is_chosen.float().mean(0)
    # one in six until the budget of 15 % is used up, at 90 % of the words
    assert abs(float(by_place[20:400].mean()) - 1 / 6) < 0.005
    assert float(by_place[490:].mean()) < 0.05
    spans = [stop - begin for sample in range(100) for begin, stop in walk(sample, 500, 3, 6)]
    shares = torch.bincount(torch.tensor(spans), minlength=4)[1:].double() / len(spans)
    assert torch.allclose(shares, torch.tensor([6 / 11, 3 / 11, 2 / 11]).double(), atol=0.03)


def test_duplicate_draws_count_once() -> None:
    batch = plain(500, 128)
    is_chosen = chosen(corrupt(batch, SEED, MaskingConfig(draw="with_replacement"), vocabulary())).view(500, 128)
    assert is_chosen.sum(1).max() <= 19
    assert abs(float(is_chosen.sum(1).float().mean()) - 126 * (1 - (125 / 126) ** 19)) < 0.15
    assert not is_chosen[:, [0, -1]].any()
    by_place = is_chosen[:, 1:-1].float().mean(0)
    assert abs(float(by_place[:63].mean()) - float(by_place[63:].mean())) < 0.01


@pytest.mark.parametrize("rate", [0.05, 0.15, 0.34, 0.5])
@pytest.mark.parametrize("most", [None, 2])
@pytest.mark.parametrize(
    "rule",
    [{"draw": "exact", "unit": "ngram"}, {"draw": "windows", "unit": "ngram"}, *({"draw": d} for d in UNBOUND)],
    ids=str,
)
def test_target_limit_bounds_every_rule(rule: dict[str, object], rate: float, most: int | None) -> None:
    """Only targets are replaced, even with short sequences and long words."""
    masking = MaskingConfig(**rule, rate=rate, max_predictions=most, mask=1.0, random=0.0)
    items = [torch.tensor([START, *([10, 50, 51, 52, 53, 54] * (1 + index % 3)), END]) for index in range(64)]
    batch = packed(items, list(range(64)))
    result = corrupt(batch, SEED, masking, vocabulary())
    assert len(result.positions) == target_limit(batch.layout, len(batch.tokens), masking)
    changed = result.tokens != batch.tokens
    assert torch.equal(changed, chosen(result))
    # a word that exceeds an exact count is skipped
    assert changed.any() or masking.draw == "exact"
    per_sequence = torch.bincount(batch.layout.sequence_index(batch.tokens)[changed], minlength=64)
    counts = target_counts(batch.layout.lengths(), rate, most)
    has_surplus = masking.draw == "windows" and masking.unit == "ngram"
    assert (per_sequence <= counts + (counts // SURPLUS if has_surplus else 0)).all()


def test_masking_compiles_as_one_graph() -> None:
    """No branch and no shape depends on a draw."""
    compiled = torch.compile(corrupt, backend="eager", fullgraph=True)
    batch, table = packed(sequences(8, 40, seed=5), list(range(8))), vocabulary()
    for masking in (MaskingConfig(draw="windows", unit="ngram"), MaskingConfig(draw="with_replacement")):
        assert torch.equal(compiled(batch, SEED, masking, table).tokens, corrupt(batch, SEED, masking, table).tokens)

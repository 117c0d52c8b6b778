"""Batches of text pairs: every pair once per epoch, of similar length, reproducible by seed."""

from itertools import islice

import numpy as np
import pytest
import torch

from bertsmith.answers.sequences import IGNORED, Ragged
from bertsmith.data.loader import SpecialTokens, load_batches
from bertsmith.data.pairs import PairBatch, PairConfig, PairPlan, PairReader, Pairs
from bertsmith.data.plan import Cursor
from bertsmith.errors import InputError
from bertsmith.text.learn import learn_tokenizer

SPECIAL = SpecialTokens(pad=0, start=2, separator=3)


def some_pairs(count: int = 300, max_length: int = 30) -> Pairs:
    draw = np.random.default_rng(1)
    sides = []
    for _ in range(2):
        lengths = draw.integers(1, max_length - 1, count)
        sides.append(Ragged.of([draw.integers(5, 90, length).tolist() for length in lengths]))
    return Pairs(*sides)


def batches(pairs: Pairs, config: PairConfig, seed: int = 0, **settings: int) -> list[PairBatch]:
    plan, reader = PairPlan(pairs, config, seed), PairReader(pairs, config, SPECIAL)
    return [reader[item].batch for item in plan.one_epoch()]


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_epoch_contains_every_pair_once_within_the_limit(layout: str) -> None:
    pairs, config = some_pairs(), PairConfig(length=32, micro_tokens=200, layout=layout)
    made = batches(pairs, config)
    seen = torch.cat([batch.sample for batch in made])
    assert sorted(seen.tolist()) == list(range(len(pairs)))
    for batch in made:
        assert max(batch.source.numel(), batch.target.numel()) <= 200
        assert batch.source_layout.batch == batch.target_layout.batch == len(batch.sample)
    # all micro-batches except the longest are as full as their pairs allow
    rows = sum(max(batch.source.numel(), batch.target.numel()) for batch in made)
    assert rows > (len(made) - 1) * (200 - 32)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_batch_contents(layout: str) -> None:
    pairs, config = some_pairs(), PairConfig(length=32, micro_tokens=200, layout=layout)
    real = 0
    for batch in batches(pairs, config):
        source, _ = batch.source_layout.pad(batch.source)
        target, _ = batch.target_layout.pad(batch.target)
        source_lengths, target_lengths = batch.source_layout.lengths(), batch.target_layout.lengths()
        expected, _ = batch.target_layout.pad(batch.expected)
        for row, index in enumerate(batch.sample.tolist()):
            x, y = pairs.source[index].tolist(), pairs.target[index].tolist()
            assert source[row][: source_lengths[row]].tolist() == [2, *x, 3]
            assert target[row][: target_lengths[row]].tolist() == [2, *y]
            assert expected[row][: target_lengths[row]].tolist() == [*y, 3]
            real += len(x) + 2 + len(y) + 1
        if layout == "padded":
            assert (batch.expected[~batch.target_layout.is_token] == IGNORED).all()
    assert real == sum(batch.real_tokens for batch in batches(pairs, config))


def test_batches_have_pairs_of_similar_length() -> None:
    pairs, config = some_pairs(2000), PairConfig(length=32, micro_tokens=400, layout="padded")
    source, target = pairs.lengths
    longer = np.maximum(source, target)
    spreads = [longer[batch.sample].max() - longer[batch.sample].min() for batch in batches(pairs, config)]
    assert np.mean(spreads) < 1.5


def test_order_depends_on_seed_and_epoch() -> None:
    pairs, config = some_pairs(), PairConfig(length=32, micro_tokens=200)

    def order(seed: int, skip: int = 0, every: int = 1, cursor: Cursor | None = None, count: int = 60) -> list:
        stream = PairPlan(pairs, config, seed).from_cursor(cursor or Cursor(), skip=skip, every=every)
        return [item.sequences.tolist() for item in islice(stream, count)]

    whole = order(0)
    assert whole == order(0)
    assert whole != order(1)
    epoch = len(list(PairPlan(pairs, config, 0).one_epoch()))
    assert whole[epoch : 2 * epoch] != whole[:epoch]
    assert order(0, cursor=Cursor(1, 0, 2), skip=1, count=5) == whole[epoch + 3 : epoch + 8]
    ranks = [order(0, skip=rank, every=3, count=20) for rank in range(3)]
    assert [ranks[position % 3][position // 3] for position in range(60)] == whole


@pytest.mark.slow  # starts processes; test_plan.py tests workers of a corpus
def test_workers_do_not_change_the_batches() -> None:
    pairs, config = some_pairs(60), PairConfig(length=32, micro_tokens=200)
    plan, reader = PairPlan(pairs, config, 0), PairReader(pairs, config, SPECIAL)
    here, there = (list(islice(load_batches(reader, plan, workers=workers), 12)) for workers in (0, 1))
    assert [item.cursor for item in here] == [item.cursor for item in there]
    assert all(a.batch.source.equal(b.batch.source) for a, b in zip(here, there, strict=True))


def test_long_pairs_are_dropped_or_truncated() -> None:
    texts = ["a b c", "a b c d e f g h", "b"]
    tokenizer = learn_tokenizer(texts, "wordpiece", 40, progress=False)
    dropped = Pairs.tokenise(texts, texts[::-1], tokenizer, PairConfig(length=8, micro_tokens=16))
    assert (len(dropped), dropped.dropped, dropped.cut) == (2, 1, 0)
    cut = Pairs.tokenise(texts, texts[::-1], tokenizer, PairConfig(length=8, micro_tokens=16, too_long="cut"))
    assert (len(cut), cut.dropped, cut.cut) == (3, 0, 1)
    assert max(cut.lengths[0]) == 8
    with pytest.raises(InputError, match=r"no pair has at most sequences.length = 4 tokens"):
        Pairs.tokenise([texts[1]], [texts[1]], tokenizer, PairConfig(length=4, micro_tokens=16))

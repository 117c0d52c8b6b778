"""Batches of items: each item once per epoch, reproducible by seed, from any cursor, in both layouts."""

from itertools import islice

import numpy as np
import pytest
import torch

from bertsmith.answers.sequences import IGNORED, Features, Ragged, length_batches
from bertsmith.data.examples import ExampleConfig, ExamplePlan, ExampleReader, TaskBatch
from bertsmith.data.loader import load_batches
from bertsmith.data.plan import Cursor, MicroBatchPlan

PAD = 99
ORDERS = ["shuffled", "by_length"]


def some_features(items: int, *, most: int = 1, seed: int = 0) -> Features:
    """Return items of 1 to `most` sequences of 1 to 30 tokens; every token is the index of its sequence."""
    draw = np.random.default_rng(seed)
    counts = draw.integers(1, most + 1, items)
    sequences = [np.full(draw.integers(1, 31), number) for number in range(counts.sum())]
    tags = [np.arange(len(sequence)) % 3 for sequence in sequences]
    return Features(
        tokens=Ragged.of(sequences),
        types=Ragged.of([np.arange(len(sequence)) % 2 for sequence in sequences]),
        items=np.concatenate([[0], np.cumsum(counts)]),
        example=np.arange(items),
        targets={"label": draw.integers(0, 4, items), "tags": Ragged.of(tags)},
    )


def plan_of(features: Features, order: str = "shuffled", seed: int = 5, examples: int = 4) -> ExamplePlan:
    return ExamplePlan(features, ExampleConfig(order=order), examples, seed)


def contents(plans: list[MicroBatchPlan[np.ndarray]]) -> list[list[int]]:
    return [plan.sequences.tolist() for plan in plans]


def read(features: Features, layout: str, items: list[int]) -> TaskBatch:
    reader = ExampleReader(features, ExampleConfig(layout=layout), PAD)
    batch = reader[MicroBatchPlan(np.array(items), Cursor())].batch
    assert isinstance(batch, TaskBatch)
    return batch


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("items", [1, 4, 30, 431])
def test_epoch_contains_every_item_once(order: str, items: int) -> None:
    plan = plan_of(some_features(items), order)
    stream = list(islice(plan.from_cursor(Cursor()), 2 * plan.batches))
    assert plan.batches == -(-items // 4)
    for epoch in range(2):
        found = [item for batch in stream if batch.cursor.epoch == epoch for item in batch.sequences.tolist()]
        assert sorted(found) == list(range(items))
        sizes = [len(batch.sequences) for batch in stream if batch.cursor.epoch == epoch]
        assert sizes[:-1] == [4] * (plan.batches - 1)


@pytest.mark.parametrize("order", ORDERS)
def test_order_depends_on_seed_and_epoch(order: str) -> None:
    features = some_features(50)
    one, again, other = (plan_of(features, order, seed) for seed in (5, 5, 6))
    stream = contents(list(islice(one.from_cursor(Cursor()), 26)))
    assert stream == contents(list(islice(again.from_cursor(Cursor()), 26)))
    assert stream != contents(list(islice(other.from_cursor(Cursor()), 26)))
    assert stream[:13] != stream[13:]


@pytest.mark.parametrize("order", ORDERS)
def test_stream_resumes_from_any_cursor(order: str) -> None:
    plan = plan_of(some_features(30), order)
    stream = list(islice(plan.from_cursor(Cursor()), 20))
    for position in (0, 3, 7, 8, 15):
        rest = list(islice(plan_of(some_features(30), order).from_cursor(stream[position].cursor), 20 - position))
        assert contents(rest) == contents(stream[position:])
        skipped = list(islice(plan.from_cursor(stream[position].cursor, skip=1), 19 - position))
        assert contents(skipped) == contents(stream[position + 1 :])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("processes", [2, 3])
def test_processes_share_the_stream_of_one(order: str, processes: int) -> None:
    plan = plan_of(some_features(30), order)
    stream = contents(list(islice(plan.from_cursor(Cursor()), 18)))
    for rank in range(processes):
        own = list(islice(plan.from_cursor(Cursor(), skip=rank, every=processes), 18 // processes))
        assert contents(own) == stream[rank::processes]


def test_by_length_reduces_padding_and_shuffles_batches() -> None:
    features = some_features(400)
    lengths = features.tokens.lengths

    def padding(order: str) -> int:
        batches = [plan.sequences for plan in plan_of(features, order).one_epoch()]
        return sum(int(lengths[batch].max() * len(batch) - lengths[batch].sum()) for batch in batches)

    assert padding("by_length") < padding("shuffled") / 5
    max_length = [lengths[plan.sequences].max() for plan in plan_of(features, "by_length").one_epoch()]
    steps = np.diff(max_length)
    assert (steps > 0).sum() > 20
    assert (steps < 0).sum() > 20


def test_length_batches_have_every_item_once_within_the_token_budget() -> None:
    lengths = some_features(60, most=3).lengths
    batches = list(length_batches(lengths, 64))
    assert sorted(item for batch in batches for item in batch.tolist()) == list(range(60))
    for batch in batches:
        assert len(batch) == 1 or lengths[batch].max() * len(batch) <= 64
    assert max(map(len, batches)) > 3
    assert max(map(len, length_batches(lengths, 64, 3))) == 3
    assert [len(batch) for batch in length_batches(lengths, 1)] == [1] * 60  # an item that is too long is alone
    assert list(length_batches(lengths[:0], 64)) == []


def test_ragged_sequences_are_taken_by_index() -> None:
    rows = [[1, 2, 3], [], [4], [5, 6]]
    taken = Ragged.of(rows).take(np.array([3, 0, 1, 3]))
    assert [taken[index].tolist() for index in range(len(taken))] == [[5, 6], [1, 2, 3], [], [5, 6]]
    assert len(Ragged.of(rows).take(np.array([], dtype=np.int64))) == 0


@pytest.mark.parametrize("most", [1, 3])
def test_packed_and_padded_batches_are_equal(most: int) -> None:
    features, items = some_features(12, most=most), [7, 0, 11, 3]
    packed, padded = read(features, "packed", items), read(features, "padded", items)
    sequences = [number for item in items for number in range(features.items[item], features.items[item + 1])]
    lengths = features.tokens.lengths[sequences].tolist()
    is_token = padded.layout.is_token
    assert is_token is not None
    assert packed.layout.lengths().tolist() == padded.layout.lengths().tolist() == lengths
    assert packed.layout.max_length == padded.layout.max_length == max(lengths)
    assert packed.tokens.tolist() == np.repeat(sequences, lengths).tolist() == padded.tokens[is_token].tolist()
    assert set(padded.tokens[~is_token].tolist()) <= {PAD}
    assert torch.equal(packed.types, padded.types[is_token])
    assert torch.equal(packed.targets["tags"], padded.targets["tags"][is_token])
    assert set(padded.targets["tags"][~is_token].tolist()) <= {IGNORED}
    assert not padded.types[~is_token].any()
    for batch in (packed, padded):
        assert batch.item.tolist() == items
        assert batch.targets["label"].tolist() == features.targets["label"][items].tolist()
        assert batch.real_tokens == sum(lengths)


def test_item_lengths_sum_over_sequences() -> None:
    features = some_features(9, most=3)
    for item, length in enumerate(features.lengths):
        own = range(features.items[item], features.items[item + 1])
        assert length == sum(len(features.tokens[number]) for number in own)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_batch_moves_and_pins_all_tensors(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = read(some_features(6), layout, [1, 4])
    pinned: list[int] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(id(tensor))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    batch.pin_memory()
    layout_tensor = batch.layout.starts if layout == "packed" else batch.layout.is_token
    tensors = [batch.tokens, batch.types, batch.item, layout_tensor, *batch.targets.values()]
    assert sorted(pinned) == sorted(id(tensor) for tensor in tensors)
    moved = batch.to("meta")
    layout_tensor = moved.layout.starts if layout == "packed" else moved.layout.is_token
    for tensor in (moved.tokens, moved.types, moved.item, layout_tensor, *moved.targets.values()):
        assert tensor.device.type == "meta"
    assert moved.real_tokens == batch.real_tokens


@pytest.mark.slow  # starts processes; test_plan.py tests workers of a corpus
def test_worker_processes_give_the_same_batches() -> None:
    features = some_features(20)
    plan = plan_of(features)
    reader = ExampleReader(features, plan.config, PAD)
    alone, shared = (list(islice(load_batches(reader, plan, workers=workers), 12)) for workers in (0, 1))
    assert [loaded.cursor for loaded in alone] == [loaded.cursor for loaded in shared]
    assert all(torch.equal(one.batch.tokens, other.batch.tokens) for one, other in zip(alone, shared, strict=True))

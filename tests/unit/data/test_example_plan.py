"""Batches of examples: each example once per epoch, the same batches for any number of parts."""

from itertools import islice

import numpy as np
import pytest

from bertsmith.answers.sequences import Features, Ragged
from bertsmith.data.examples import ExampleConfig, ExamplePlan
from bertsmith.data.plan import Cursor
from bertsmith.errors import InputError


def features(count: int) -> Features:
    tokens = Ragged.of([np.arange(3 + index % 7) for index in range(count)])
    return Features(tokens, None, np.arange(count + 1), np.arange(count), {})


def batches(plan: ExamplePlan, epochs: int) -> list[list[np.ndarray]]:
    """Return the parts of every batch of the first epochs."""
    stream = plan.from_cursor(Cursor())
    return [[part.sequences for part in islice(stream, plan.parts)] for _ in range(epochs * plan.batches)]


@pytest.mark.parametrize("order", ["shuffled", "by_length"])
@pytest.mark.parametrize("count", [5, 16, 53, 64, 70])
def test_parts_do_not_change_the_batches(count: int, order: str) -> None:
    config = ExampleConfig(order=order)
    whole = batches(ExamplePlan(features(count), config, 16, 3), 2)
    assert len(whole) == 2 * -(-count // 16)
    for epoch in (whole[: len(whole) // 2], whole[len(whole) // 2 :]):
        assert sorted(np.concatenate([part for batch in epoch for part in batch]).tolist()) == list(range(count))
    for parts in (2, 4):
        divided = batches(ExamplePlan(features(count), config, 16, 3, parts), 2)
        assert [np.concatenate(batch).tolist() for batch in divided] == [batch[0].tolist() for batch in whole]
        for batch in divided:
            sizes = [len(part) for part in batch]
            assert min(sizes) > 0
            assert max(sizes) - min(sizes) <= 1


def test_small_remainder_joins_the_previous_batch() -> None:
    plan = ExamplePlan(features(33), ExampleConfig(), 16, 0, parts=4)
    assert [sum(map(len, batch)) for batch in batches(plan, 1)] == [16, 17]
    assert all(len(part) for batch in batches(plan, 1) for part in batch)


def test_fewer_examples_than_parts_raise() -> None:
    with pytest.raises(InputError, match="the training data has 3 examples, but a batch has 4 parts"):
        ExamplePlan(features(3), ExampleConfig(), 16, 0, parts=4)

"""Fixed shapes of packed batches: every batch is assigned to shapes that hold it, without much padding."""

import numpy as np
import pytest

from bertsmith.serving.shapes import SHORT, PackedShape, assign, shape_classes


@pytest.mark.parametrize(
    ("batch_tokens", "max_length"), [(16_384, 512), (16_384, 256), (1024, 32), (64, 512), (100, 130), (50, 4), (1, 1)]
)
def test_every_batch_is_assigned_to_shapes_that_hold_it(batch_tokens: int, max_length: int) -> None:
    classes, random = shape_classes(batch_tokens, max_length), np.random.default_rng(0)
    for _ in range(50):
        longest = int(random.integers(1, max_length + 1))
        lengths = random.integers(1, longest + 1, size=int(random.integers(1, 200))).tolist()
        passes = assign(lengths, classes)
        assert sorted(index for _, indices in passes for index in indices) == list(range(len(lengths)))
        for shape, indices in passes:
            own = [lengths[index] for index in indices]
            starts = shape.starts(own)
            assert starts.dtype == np.int32
            assert starts.shape == (shape.sequences + 1,)
            assert np.diff(starts)[: len(own)].tolist() == own
            assert (np.diff(starts) >= 0).all()
            assert np.diff(starts).max() <= shape.max_length
            assert starts[-1] == shape.tokens


def test_there_are_a_few_shapes_of_two_classes() -> None:
    short, long = shape_classes(16_384, 512)
    assert [shape.tokens for shape in short] == [
        64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12_288, 16_384
    ]  # fmt: skip
    assert [shape.tokens for shape in long] == [tokens for tokens in (one.tokens for one in short) if tokens > SHORT]
    assert {shape.max_length for shape in short} == {64, SHORT}
    assert {shape.max_length for shape in long} == {256, 512}
    assert (short[-1].sequences, long[-1].sequences) == (2048 + 128, 256 + 32)
    (only,) = shape_classes(16_384, 100)
    assert {shape.max_length for shape in only} == {64, 100}


def test_smallest_shape_is_chosen() -> None:
    classes = shape_classes(16_384, 512)
    assert assign([20], classes) == [(PackedShape(64, 9, 64), [0])]
    assert assign([300], classes) == [(PackedShape(512, 9, 512), [0])]
    ((shape, _),) = assign([8] * 2000, classes)
    assert shape.tokens == 16_384
    ((shape, _),) = assign([4] * 100, classes)  # many short sequences need a shape with room for their number
    assert shape.tokens == 1024


def test_few_short_and_long_sequences_share_a_forward_pass_and_many_do_not() -> None:
    classes = shape_classes(16_384, 512)
    assert assign([20, 300, 10], classes) == [(PackedShape(512, 9, 512), [0, 1, 2])]
    lengths = [300, *[12] * 400, 200]
    assert [indices for _, indices in assign(lengths, classes)] == [list(range(1, 401)), [0, 401]]


def test_more_than_the_largest_shape_takes_several_passes() -> None:
    passes = assign([16] * 200, shape_classes(1024, 32))
    assert [(shape.tokens, len(indices)) for shape, indices in passes] == [(1024, 64), (1024, 64), (1024, 64), (128, 8)]

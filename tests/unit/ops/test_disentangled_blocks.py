"""CPU backends of disentangled attention, by blocks and by groups of similar length, and the choice of "auto"."""

import pytest
import torch
from torch import Tensor

from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.ops.disentangled import BACKENDS, RelativePositions, bucket_slots, disentangled, linear_slots
from bertsmith.ops.dispatch import choose

HEADS, WIDTH = 3, 8
SLOTS = {"linear": linear_slots(40), "buckets": bucket_slots(16, 100, clamps_distance=True)}
LENGTHS = [[1], [7, 3, 1], [64, 65, 63], [130, 0, 17], [200]]


def call(lengths: list[int], layout_name: str) -> tuple[list[Tensor], SequenceLayout]:
    """Return query, key and value of sequences in a layout, and the layout."""
    max_length = max(lengths)
    if layout_name == "packed":
        layout, shape = SequenceLayout.packed(torch.tensor([0, *lengths]).cumsum(0).int(), max_length), (sum(lengths),)
    else:
        layout = SequenceLayout.padded(torch.arange(max_length + 2) < torch.tensor(lengths)[:, None])
        shape = (len(lengths), max_length + 2)
    # three parts of one projection, as in a mixer
    parts = torch.randn(*shape, 3, HEADS, WIDTH, dtype=torch.float64).unbind(-3)
    return list(parts), layout


def tables(slots: Tensor, terms: tuple[bool, bool]) -> list[Tensor | None]:
    rows = int(slots.max()) + 1
    return [torch.randn(rows, HEADS, WIDTH, dtype=torch.float64) if has_term else None for has_term in terms]


def relative(slots: Tensor) -> RelativePositions:
    return RelativePositions(torch.empty(0), slots)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("terms", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("kind", SLOTS)
@pytest.mark.parametrize("layout_name", ["packed", "padded"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_blocks_equal_the_reference(
    lengths: list[int], layout_name: str, kind: str, terms: tuple[bool, bool], is_causal: bool
) -> None:
    (query, key, value), layout = call(lengths, layout_name)
    rows = tables(SLOTS[kind], terms)
    actual, expected = (
        disentangled(query, key, value, *rows, layout, relative(SLOTS[kind]), is_causal=is_causal, backend=backend)
        for backend in ("blocks", "reference")
    )
    if layout.is_token is not None:
        assert (actual[~layout.is_token] == 0).all()
        actual, expected = actual[layout.is_token], expected[layout.is_token]
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("terms", [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("lengths", [[7, 3, 1], [40, 33, 64, 20, 0, 21, 9], [30, 30]], ids=str)
def test_groups_equal_the_reference_with_gradients(
    lengths: list[int], terms: tuple[bool, bool], is_causal: bool
) -> None:
    (query, key, value), layout = call(lengths, "packed")
    rows = tables(SLOTS["buckets"], terms)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value, *rows) if tensor is not None]
    outputs, gradients = [], []
    for backend in ("grouped", "reference"):
        outputs.append(
            disentangled(
                query, key, value, *rows, layout, relative(SLOTS["buckets"]), is_causal=is_causal, backend=backend
            )
        )
        gradients.append(torch.autograd.grad(outputs[-1].sin().sum(), leaves))
    torch.testing.assert_close(*outputs, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-9)


def test_padding_is_never_read() -> None:
    (query, key, value), layout = call([70, 5], "padded")
    assert layout.is_token is not None
    rows = tables(SLOTS["buckets"], (True, True))
    clean = disentangled(query, key, value, *rows, layout, relative(SLOTS["buckets"]), backend="blocks")
    for tensor in (query, key, value):
        tensor[~layout.is_token] = torch.nan
    assert torch.equal(disentangled(query, key, value, *rows, layout, relative(SLOTS["buckets"])), clean)


def test_blocks_accumulate_half_precision_in_float32() -> None:
    (query, key, value), layout = call([80], "packed")
    rows = tables(SLOTS["buckets"], (True, True))
    half = [None if tensor is None else tensor.bfloat16() for tensor in (query, key, value, *rows)]
    actual = disentangled(*half, layout, relative(SLOTS["buckets"]), backend="blocks")
    expected = disentangled(*half, layout, relative(SLOTS["buckets"]), backend="reference")
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)


def test_auto_chooses_the_faster_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []

    def record_choice(backends: dict, backend: str, inputs: object) -> object:
        backend = choose(backends, backend, inputs)
        chosen.extend(name for name, actual in backends.items() if actual is backend)
        return backend

    monkeypatch.setattr("bertsmith.ops.disentangled.choose", record_choice)
    rows = tables(SLOTS["buckets"], (True, True))
    calls = [([70, 70], False), ([70, 70], True), ([70, 20], True), ([6, 5], False), ([30, 9], False), ([6], False)]
    for lengths, needs_grad in calls:
        (query, key, value), layout = call(lengths, "packed")
        disentangled(query.requires_grad_(needs_grad), key, value, *rows, layout, relative(SLOTS["buckets"]))
    assert chosen == ["blocks", "sdpa", "grouped", "sdpa", "grouped", "blocks"]


def test_unsupported_inputs_raise_with_the_reason() -> None:
    (query, key, value), layout = call([5, 4], "packed")
    slots = SLOTS["buckets"]
    rows = tables(slots, (True, True))
    with pytest.raises(InputError, match="dropout is not 0"):
        disentangled(query, key, value, *rows, layout, relative(slots), dropout=0.1, backend="blocks")
    with pytest.raises(InputError, match="there are no position terms"):
        disentangled(query, key, value, None, None, layout, None, backend="blocks")
    with pytest.raises(InputError, match="gradients are required"):
        disentangled(query.requires_grad_(), key, value, *rows, layout, relative(slots), backend="blocks")
    other = SequenceLayout.packed(torch.tensor([0, 5, 9]).int(), 5)
    with pytest.raises(InputError, match="query_positions are set"):
        disentangled(query, key, value, *rows, layout, relative(slots), key_layout=other, backend="blocks")
    with pytest.raises(InputError, match="its random numbers would differ from those of a padded batch"):
        disentangled(query, key, value, *rows, layout, relative(slots), dropout=0.1, backend="grouped")
    (query, key, value), layout = call([5, 4], "padded")
    with pytest.raises(InputError, match="the sequences are not packed"):
        disentangled(query, key, value, *rows, layout, relative(slots), backend="grouped")


def test_backends_are_registered() -> None:
    assert {"blocks", "grouped", "products"} <= set(BACKENDS)

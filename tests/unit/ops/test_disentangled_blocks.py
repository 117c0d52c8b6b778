"""Disentangled attention on a CPU by blocks, and by groups of one length: the numbers, and when each is taken."""

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


def call(lengths: list[int], lying: str) -> tuple[list[Tensor], SequenceLayout]:
    """Query, key and value of sequences that lie so, and their layout."""
    max_length = max(lengths)
    if lying == "packed":
        layout, shape = SequenceLayout.packed(torch.tensor([0, *lengths]).cumsum(0).int(), max_length), (sum(lengths),)
    else:
        layout = SequenceLayout.padded(torch.arange(max_length + 2) < torch.tensor(lengths)[:, None])
        shape = (len(lengths), max_length + 2)
    # as they come: three parts of one projection
    parts = torch.randn(*shape, 3, HEADS, WIDTH, dtype=torch.float64).unbind(-3)
    return list(parts), layout


def tables(slots: Tensor, terms: tuple[bool, bool]) -> list[Tensor | None]:
    rows = int(slots.max()) + 1
    return [torch.randn(rows, HEADS, WIDTH, dtype=torch.float64) if there else None for there in terms]


def relative(slots: Tensor) -> RelativePositions:
    return RelativePositions(torch.empty(0), slots)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("terms", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("kind", SLOTS)
@pytest.mark.parametrize("lying", ["packed", "padded"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_blocks_say_what_the_reference_says(
    lengths: list[int], lying: str, kind: str, terms: tuple[bool, bool], is_causal: bool
) -> None:
    (query, key, value), layout = call(lengths, lying)
    rows = tables(SLOTS[kind], terms)
    found, wanted = (
        disentangled(query, key, value, *rows, layout, relative(SLOTS[kind]), is_causal=is_causal, backend=form)
        for form in ("blocks", "reference")
    )
    if layout.is_token is not None:
        assert (found[~layout.is_token] == 0).all()
        found, wanted = found[layout.is_token], wanted[layout.is_token]
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("terms", [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("lengths", [[7, 3, 1], [40, 33, 64, 20, 0, 21, 9], [30, 30]], ids=str)
def test_groups_say_and_learn_what_the_reference_does(
    lengths: list[int], terms: tuple[bool, bool], is_causal: bool
) -> None:
    (query, key, value), layout = call(lengths, "packed")
    rows = tables(SLOTS["buckets"], terms)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value, *rows) if tensor is not None]
    told, learned = [], []
    for form in ("grouped", "reference"):
        told.append(
            disentangled(
                query, key, value, *rows, layout, relative(SLOTS["buckets"]), is_causal=is_causal, backend=form
            )
        )
        learned.append(torch.autograd.grad(told[-1].sin().sum(), leaves))
    torch.testing.assert_close(*told, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(*learned, rtol=1e-8, atol=1e-9)


def test_pads_are_never_read() -> None:
    (query, key, value), layout = call([70, 5], "padded")
    assert layout.is_token is not None
    rows = tables(SLOTS["buckets"], (True, True))
    clean = disentangled(query, key, value, *rows, layout, relative(SLOTS["buckets"]), backend="blocks")
    for tensor in (query, key, value):
        tensor[~layout.is_token] = torch.nan
    assert torch.equal(disentangled(query, key, value, *rows, layout, relative(SLOTS["buckets"])), clean)


def test_half_precision_sums_in_float32() -> None:
    (query, key, value), layout = call([80], "packed")
    rows = tables(SLOTS["buckets"], (True, True))
    half = [None if tensor is None else tensor.bfloat16() for tensor in (query, key, value, *rows)]
    found = disentangled(*half, layout, relative(SLOTS["buckets"]), backend="blocks")
    wanted = disentangled(*half, layout, relative(SLOTS["buckets"]), backend="reference")
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)


def test_each_is_taken_where_it_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []

    def noting(backends: dict, backend: str, inputs: object) -> object:
        form = choose(backends, backend, inputs)
        taken.extend(name for name, found in backends.items() if found is form)
        return form

    monkeypatch.setattr("bertsmith.ops.disentangled.choose", noting)
    rows = tables(SLOTS["buckets"], (True, True))
    calls = [([70, 70], False), ([70, 70], True), ([70, 20], True), ([6, 5], False), ([30, 9], False), ([6], False)]
    for lengths, learns in calls:
        (query, key, value), layout = call(lengths, "packed")
        disentangled(query.requires_grad_(learns), key, value, *rows, layout, relative(SLOTS["buckets"]))
    assert taken == ["blocks", "sdpa", "grouped", "sdpa", "grouped", "blocks"]


def test_what_it_cannot_do_is_said() -> None:
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


def test_the_forms_stand_in_the_table() -> None:
    assert {"blocks", "grouped", "products"} <= set(BACKENDS)

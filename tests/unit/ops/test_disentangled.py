"""Disentangled attention: slots, formula, all backends, padding, cross-attention and the single terms."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from bertsmith.data.layout import SequenceLayout
from bertsmith.ops.disentangled import (
    BACKENDS,
    RelativePositions,
    bucket_slots,
    disentangled,
    disentangled_terms,
    linear_slots,
    mirrored_rows,
)

HEADS, WIDTH = 2, 4
SLOTS = {"linear": linear_slots(3), "buckets": bucket_slots(4, 9, clamps_distance=True)}
TERMS = list(product([True, False], repeat=2))
GENERAL_BACKENDS = [
    backend for backend in BACKENDS if backend not in ("blocks", "grouped", "triton")
]  # tested in files of their own


def padded(lengths: list[int], max_length: int) -> SequenceLayout:
    return SequenceLayout.padded(torch.arange(max_length) < torch.tensor(lengths)[:, None])


def packed(lengths: list[int]) -> SequenceLayout:
    return SequenceLayout.packed(torch.tensor([0, *lengths]).cumsum(0).int(), max(lengths))


def states(*shape: int) -> Tensor:
    return torch.randn(*shape, HEADS, WIDTH, dtype=torch.float64, requires_grad=True)


def tables(terms: tuple[bool, bool], slots: Tensor) -> list[Tensor | None]:
    return [states(int(slots.max()) + 1) if has_term else None for has_term in terms]


def relative(slots: Tensor, positions: Tensor | None = None) -> RelativePositions:
    return RelativePositions(torch.empty(0), slots, positions)


def attention_loop(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position_key: Tensor | None,
    position_query: Tensor | None,
    slots: Tensor,
    *,
    as_printed: bool = False,
) -> Tensor:
    """Return the output of one sequence, computed element by element from the formula.

    The formula printed in the paper has the row of j − i in the position-to-content term.
    """
    reach, mixed = len(slots) // 2, torch.zeros_like(query)
    terms = 1 + (position_key is not None) + (position_query is not None)
    for head in range(HEADS):
        for i in range(len(query)):
            scores = []
            for j in range(len(key)):
                row = slots[max(-reach, min(reach, i - j)) + reach]
                score = query[i, head] @ key[j, head]
                if position_key is not None:
                    score = score + query[i, head] @ position_key[row, head]
                if position_query is not None:
                    offset = j - i if as_printed else i - j
                    row = slots[max(-reach, min(reach, offset)) + reach]
                    score = score + key[j, head] @ position_query[row, head]
                scores.append(score / math.sqrt(terms * WIDTH))
            mixed[i, head] = torch.stack(scores).softmax(0) @ value[:, head]
    return mixed


@pytest.mark.parametrize("slots", [*SLOTS.values(), bucket_slots(4, 9, clamps_distance=False)], ids=str)
@pytest.mark.parametrize("terms", [(True, True), (False, True)])
@pytest.mark.parametrize("backend", [*GENERAL_BACKENDS, "blocks", "grouped"])
def test_mirrored_rows_give_the_formula_of_the_paper(slots: Tensor, terms: tuple[bool, bool], backend: str) -> None:
    lengths = [13, 1, 6]
    layout = packed(lengths)
    query, key, value = (states(sum(lengths)) for _ in range(3))
    position_key, position_query = tables(terms, slots)
    if backend == "blocks":  # it computes no gradients
        query, key, value = (tensor.detach() for tensor in (query, key, value))
        position_key, position_query = (
            None if table is None else table.detach() for table in (position_key, position_query)
        )
    expected = torch.cat(
        [
            attention_loop(*parts, position_key, position_query, slots, as_printed=True)
            for parts in zip(*(tensor.split(lengths) for tensor in (query, key, value)), strict=True)
        ]
    )
    rows = mirrored_rows(position_key, position_query, slots)
    by_offset = relative(slots).by_offset()
    actual = disentangled(query, key, value, *rows, layout, by_offset, backend=backend)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    as_released = disentangled(query, key, value, position_key, position_query, layout, relative(slots))
    assert (actual - as_released).abs().max() > 0.05
    if actual.requires_grad:
        inputs = [tensor for tensor in (query, key, value, position_key, position_query) if tensor is not None]
        weights = torch.randn_like(actual)
        for own, theirs in zip(
            torch.autograd.grad((actual * weights).sum(), inputs),
            torch.autograd.grad((expected * weights).sum(), inputs),
            strict=True,
        ):
            torch.testing.assert_close(own, theirs, rtol=0, atol=1e-12)


def test_buckets_match_published_values() -> None:
    slots, reach, middle = bucket_slots(256, 512, clamps_distance=True), 511, 256
    assert len(slots) == 2 * reach + 1
    known = {0: 0, 1: 1, 128: 128, 129: 129, 132: 131, 200: 169, 256: 192, 300: 207, 400: 233, 500: 254, 509: 255}
    for distance, bucket in {**known, 510: 255, 511: 255}.items():
        assert slots[reach + distance] - middle == bucket
        assert slots[reach - distance] - middle == -bucket
    assert (slots.min(), slots.max()) == (1, 511)  # row 0 is never used
    for distance in range(129, 512):
        bucket = 128 + math.ceil(math.log(distance / 128) / math.log(511 / 128) * 127)
        assert slots[reach + distance] - middle == bucket


def test_unclamped_distances_use_the_ends_of_the_table() -> None:
    official, loose = (bucket_slots(256, 512, clamps_distance=clamps) for clamps in (True, False))
    assert len(loose) == len(official) + 2
    assert torch.equal(loose[1:-1], official)
    assert (loose[0], loose[-1]) == (0, 511)


def test_linear_slots_match_equation_3() -> None:
    assert linear_slots(3).tolist() == [0, 1, 2, 3, 4, 5, 5]


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("kind", SLOTS)
@pytest.mark.parametrize("lengths", [(1, 1), (2, 2), (6, 6), (11, 4), (3, 12)])
def test_backends_match_the_formula(kind: str, terms: tuple[bool, bool], lengths: tuple[int, int]) -> None:
    slots = SLOTS[kind]
    (queries, keys), rows = lengths, tables(terms, slots)
    query, key, value = states(1, queries), states(1, keys), states(1, keys)
    expected = attention_loop(query[0], key[0], value[0], *rows, slots)
    layouts = SequenceLayout.full(1, queries), SequenceLayout.full(1, keys)
    for backend in GENERAL_BACKENDS:
        mixed = disentangled(
            query, key, value, *rows, layouts[0], relative(slots), key_layout=layouts[1], backend=backend
        )
        torch.testing.assert_close(mixed[0], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", GENERAL_BACKENDS)
def test_query_positions_select_rows_of_the_full_output(backend: str) -> None:
    """Chosen queries, in any order, give rows of the output for all queries."""
    slots = SLOTS["buckets"]
    query, key, value = states(12), states(12), states(12)
    rows = tables((True, True), slots)
    index, positions = torch.tensor([6, 0, 2, 7 + 4, 7 + 1]), torch.tensor([6, 0, 2, 4, 1])
    for causal in (False, True):
        everything = disentangled(query, key, value, *rows, packed([7, 5]), relative(slots), is_causal=causal)
        some = disentangled(
            query[index],
            key,
            value,
            *rows,
            packed([3, 2]),
            relative(slots, positions),
            key_layout=packed([7, 5]),
            is_causal=causal,
            backend=backend,
        )
        torch.testing.assert_close(some, everything[index], rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", GENERAL_BACKENDS)
def test_layouts_of_queries_and_keys_are_independent(backend: str) -> None:
    slots, rows = SLOTS["linear"], tables((True, True), SLOTS["linear"])
    query, key, value = states(5), states(8), states(8)
    query_layout, key_layout = packed([2, 3]), packed([7, 1])
    expected = torch.cat([
        disentangled(query[:2], key[:7], value[:7], *rows, packed([2]), relative(slots), key_layout=packed([7])),
        disentangled(query[2:], key[7:], value[7:], *rows, packed([3]), relative(slots), key_layout=packed([1])),
    ])  # fmt: skip
    sides = {
        (query_is_packed, key_is_packed): (
            (query, query_layout) if query_is_packed else query_layout.pad(query),
            (key, value, key_layout) if key_is_packed else (key_layout.pad(key)[0], *key_layout.pad(value)),
        )
        for query_is_packed, key_is_packed in product([True, False], repeat=2)
    }
    for (q, q_layout), (k, v, k_layout) in sides.values():
        mixed = disentangled(q, k, v, *rows, q_layout, relative(slots), key_layout=k_layout, backend=backend)
        mixed = mixed if q_layout.is_packed else mixed[q_layout.is_token]
        torch.testing.assert_close(mixed, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", GENERAL_BACKENDS)
def test_padding_is_ignored_and_empty_rows_are_zero(backend: str) -> None:
    slots = SLOTS["buckets"]
    layout = padded([4, 0, 6], 6)
    query, key, value = states(3, 6), states(3, 6), states(3, 6)
    rows = tables((True, True), slots)
    mixed = disentangled(query, key, value, *rows, layout, relative(slots), backend=backend)
    gradients = torch.autograd.grad(mixed.square().sum(), (query, key, value, *rows))
    assert all(tensor.isfinite().all() for tensor in (mixed, *gradients))
    assert (mixed[1] == 0).all()
    with torch.no_grad():  # the kernel with gradients rounds differently
        mixed = disentangled(query, key, value, *rows, layout, relative(slots), backend=backend)
        other = [tensor.where(layout.is_token[..., None, None], 1e4) for tensor in (query, key, value)]
        after = disentangled(*other, *rows, layout, relative(slots), backend=backend)
    assert torch.equal(after[layout.is_token], mixed[layout.is_token])


@pytest.mark.parametrize("backend", GENERAL_BACKENDS)
@pytest.mark.parametrize("has_positions", [False, True])
def test_gradcheck(backend: str, has_positions: bool) -> None:
    slots = SLOTS["buckets"]
    query_layout, key_layout = packed([3, 2]), padded([4, 3], 5)
    positions = torch.tensor([4, 0, 1, 1, 3]) if has_positions else None

    def call(*inputs: Tensor) -> Tensor:
        return disentangled(*inputs, query_layout, relative(slots, positions), key_layout=key_layout, backend=backend)

    inputs = states(5), states(2, 5), states(2, 5), *tables((True, True), slots)
    assert torch.autograd.gradcheck(call, inputs)


@pytest.mark.parametrize("backend", GENERAL_BACKENDS)
def test_half_precision_sums_scores_in_float32(backend: str) -> None:
    slots, layout = linear_slots(16), SequenceLayout.full(2, 20)
    exact = [torch.randn(*shape, HEADS, 16).bfloat16() for shape in [(2, 20)] * 3 + [(32,)] * 2]
    # a constant added to all scores of a query changes nothing if the scores are summed in float32
    exact[4] += 40 * torch.nn.functional.one_hot(torch.tensor(0), 16)
    exact[1][..., 0] = 8
    mixed = disentangled(*exact, layout, relative(slots), backend=backend)
    assert mixed.dtype == torch.bfloat16
    expected = disentangled(*(tensor.double() for tensor in exact), layout, relative(slots), backend="reference")
    assert (mixed.double() - expected).abs().max() < 2e-2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(disentangled(*exact, layout, relative(slots), backend=backend), mixed)


@pytest.mark.parametrize("backend", GENERAL_BACKENDS)
def test_dropout_preserves_the_mean(backend: str) -> None:
    slots, layout = SLOTS["linear"], padded([5, 3], 5)
    inputs = [states(2, 5), states(2, 5), states(2, 5), *tables((True, True), slots)]
    clean = disentangled(*inputs, layout, relative(slots), backend=backend)
    noisy = torch.stack(
        [disentangled(*inputs, layout, relative(slots), dropout=0.3, backend=backend).detach() for _ in range(1000)]
    )
    assert noisy.std(0).mean() > 0.05
    assert ((noisy.mean(0) - clean).abs() / (noisy.std(0) / 1000**0.5)).mean() < 1.2


@pytest.mark.parametrize("terms", TERMS)
def test_terms_sum_to_the_scores(terms: tuple[bool, bool]) -> None:
    slots, layout = SLOTS["buckets"], padded([7, 4], 8)
    query, key, value = states(2, 8), states(2, 8), states(2, 8)
    rows = tables(terms, slots)
    maps = disentangled_terms(query, key, *rows, layout, relative(slots))
    names = ["content_to_position"] * terms[0] + ["position_to_content"] * terms[1]
    assert list(maps) == ["attention", "content_to_content", *names]
    assert all(scores.shape == (2, HEADS, 8, 8) for scores in maps.values())
    assert all((scores[1, :, :, 4:] == 0).all() for scores in maps.values())
    attention = maps.pop("attention")
    scores = sum(maps.values()).masked_fill(~layout.is_token[:, None, None], -torch.inf)
    torch.testing.assert_close(attention, scores.softmax(-1))
    mixed = torch.einsum("bhqk,bkhd->bqhd", attention, value)
    torch.testing.assert_close(mixed, disentangled(query, key, value, *rows, layout, relative(slots)))

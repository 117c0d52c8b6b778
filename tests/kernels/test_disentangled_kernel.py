"""Kernels of disentangled attention against the reference in float64: outputs and all gradients."""

from functools import partial

import pytest
import torch
from cases import packed_layout, padded_layout
from helpers_kernels import DEVICE, assert_close_to_truth, needs_triton, results
from torch import Tensor

from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.ops.disentangled import BACKENDS, RelativePositions, bucket_slots, disentangled, fused, linear_slots
from bertsmith.ops.disentangled.kernels.plan import Buffer
from bertsmith.ops.disentangled.reference import DisentangledInputs
from bertsmith.ops.dispatch import choose

pytestmark = needs_triton
LENGTHS = [1, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1000]
MIXES = [*([length] for length in LENGTHS), LENGTHS, [3] * 40, [5, 0, 0, 70, 1, 0], [1500, 2]]
TABLES = {"linear": (linear_slots(512), 1024), "log": (bucket_slots(256, 512, clamps_distance=True), 512)}
SMALL = {"linear": (linear_slots(5), 10), "log": (bucket_slots(8, 20, clamps_distance=True), 16)}
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # Triton's interpreter does not round to bfloat16
TERMS = [(True, True), (True, False), (False, True), (False, False)]


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(DEVICE)


def op(
    *tensors: Tensor,
    terms: tuple[bool, bool],
    layout: SequenceLayout,
    slots: Tensor,
    backend: str,
    positions: Tensor | None = None,
    key_layout: SequenceLayout | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Call the op with query, key, value and the tables of the chosen terms."""
    query, key, value, *rest = tensors
    tables = iter(rest)
    position_key, position_query = (next(tables) if has_term else None for has_term in terms)
    relative = RelativePositions(slots, slots, positions, are_distinct=True)
    return disentangled(
        query,
        key,
        value,
        position_key,
        position_query,
        layout,
        relative,
        key_layout=key_layout,
        is_causal=is_causal,
        backend=backend,
    )


def compare(
    lengths: list[int],
    table: tuple[Tensor, int],
    *,
    how: str = "packed",
    heads: int = 2,
    head_width: int = 16,
    terms: tuple[bool, bool] = (True, True),
    is_causal: bool = False,
    dtype: torch.dtype = torch.float32,
    room: float = 1.0,
) -> None:
    layout = (packed_layout(lengths, empty=2) if how == "packed" else padded_layout(lengths, extra=3)).to(DEVICE)
    shape = (sum(lengths),) if how == "packed" else (layout.batch, layout.max_length)
    slots, rows = table
    # slices of a joint projection, so that rows are strided
    states = numbers(*shape, 3, heads, head_width).to(dtype).unbind(-3)
    tables = [numbers(rows, heads, head_width) for has_term in terms if has_term]
    call = partial(op, terms=terms, layout=layout, slots=slots.to(DEVICE), is_causal=is_causal)
    assert_close_to_truth(call, [*states, *tables], dtype, is_token=layout.is_token, room=room)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("table", SMALL)
def test_packed_sequences(table: str, is_causal: bool) -> None:
    compare([5, 0, 33, 1], SMALL[table], is_causal=is_causal)


@pytest.mark.parametrize("terms", TERMS[1:], ids=str)
def test_terms_can_be_omitted(terms: tuple[bool, bool]) -> None:
    compare([35, 3], SMALL["linear"], terms=terms)


def test_padded_rows() -> None:
    compare([3, 20, 1], SMALL["log"], how="padded")


def test_sequences_longer_than_the_band() -> None:
    assert Buffer.of(210, reach=1, is_dense=False).half > 0
    compare([210, 2], (linear_slots(1), 2), heads=1)


def test_half_precision() -> None:
    compare([40, 5], SMALL["log"], dtype=HALF)


def test_query_positions_are_supported() -> None:
    _compare_query_positions([9, 40], [4, 13], heads=2, head_width=16, dtype=torch.float32, table=SMALL["log"])


def _compare_query_positions(
    lengths: list[int],
    queries_per_sequence: list[int],
    *,
    heads: int,
    head_width: int,
    dtype: torch.dtype,
    table: tuple[Tensor, int],
) -> None:
    """Compare with the reference for queries at random positions of each sequence, in any order."""
    slots, rows = table
    layout, key_layout = packed_layout(queries_per_sequence).to(DEVICE), packed_layout(lengths).to(DEVICE)
    positions = torch.cat(
        [torch.randperm(keys)[:queries] for keys, queries in zip(lengths, queries_per_sequence, strict=True)]
    )
    for is_causal in (False, True):
        states = [numbers(sum(counts), heads, head_width) for counts in (queries_per_sequence, lengths, lengths)]
        tables = [numbers(rows, heads, head_width) for _ in range(2)]
        call = partial(
            op,
            terms=(True, True),
            layout=layout,
            key_layout=key_layout,
            slots=slots.to(DEVICE),
            positions=positions.to(DEVICE),
            is_causal=is_causal,
        )
        assert_close_to_truth(call, [*states, *tables], dtype)


def _dropped(value: Tensor, seed: int, rate: float = 0.3) -> Tensor:
    """Return the output with dropout; query, key and tables are always the same."""
    layout, (slots, rows) = packed_layout([30, 7]).to(DEVICE), SMALL["linear"]
    generator = torch.Generator().manual_seed(1)
    query, key = (torch.randn(37, 2, 16, generator=generator).to(DEVICE) for _ in range(2))
    tables = [torch.randn(rows, 2, 16, generator=generator).to(DEVICE) for _ in range(2)]
    torch.manual_seed(seed)
    relative = RelativePositions(slots, slots.to(DEVICE))
    return disentangled(query, key, value, *tables, layout, relative, dropout=rate, backend="triton")


def test_dropout_mask_is_recomputed_in_backward() -> None:
    value = numbers(37, 2, 16).float().requires_grad_()
    mixed = _dropped(value, seed=0)
    assert torch.equal(mixed, _dropped(value, seed=0))
    assert not torch.equal(mixed, _dropped(value, seed=1))
    # for a fixed mask the output is linear in the values, so ⟨gradient, values⟩ equals ⟨output, upstream⟩
    upstream = torch.randn_like(mixed)
    (gradient,) = torch.autograd.grad(mixed, value, upstream)
    torch.testing.assert_close((mixed * upstream).sum(), (gradient * value).sum(), rtol=1e-4, atol=1e-3)


def test_dropout_preserves_the_mean() -> None:
    value = numbers(37, 2, 16).float()
    plain = _dropped(value, seed=0, rate=0.0)
    mean = torch.stack([_dropped(value, seed) for seed in range(6 if DEVICE == "cpu" else 400)]).mean(0)
    # projected on the output without dropout, few samples are enough: without the scale the ratio would be 0.7
    assert ((mean * plain).sum() / (plain * plain).sum()).item() == pytest.approx(1, abs=0.15)


@pytest.mark.slow  # several backward passes in Triton's interpreter
def test_backward_is_deterministic() -> None:
    layout, (slots, rows) = packed_layout([33, 20]).to(DEVICE), SMALL["log"]
    tensors = [*(numbers(53, 2, 16) for _ in range(3)), *(numbers(rows, 2, 16) for _ in range(2))]
    call = partial(op, terms=(True, True), layout=layout, slots=slots.to(DEVICE))
    first, second = (results(call, tensors, "triton", torch.float32) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_op_compiles_without_graph_breaks() -> None:
    layout, (slots, rows) = packed_layout([12, 5]).to(DEVICE), SMALL["log"]
    tensors = [*(numbers(17, 2, 16).float() for _ in range(3)), *(numbers(rows, 2, 16).float() for _ in range(2))]
    call = partial(op, terms=(True, True), layout=layout, slots=slots.to(DEVICE), backend="triton")
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors), call(*tensors))


def test_unsupported_inputs_raise_with_the_reason() -> None:
    layout, (slots, rows) = packed_layout([3]).to(DEVICE), SMALL["log"]
    query, table, slots = numbers(3, 2, 24).float(), numbers(rows, 2, 24).float(), slots.to(DEVICE)
    with pytest.raises(InputError, match="the head width is 24, but the kernel supports 16, 32, 64, 128"):
        disentangled(*[query] * 3, table, table, layout, RelativePositions(slots, slots), backend="triton")
    relative = RelativePositions(slots, slots, torch.zeros(3, dtype=torch.long, device=DEVICE))
    query, table = query[..., :16], table[..., :16]
    with pytest.raises(InputError, match="not known to be distinct"):
        disentangled(*[query] * 3, table, table, layout, relative, backend="triton")
    with pytest.raises(InputError, match="float64"):
        disentangled(*[query.double()] * 3, None, None, layout, None, backend="triton")
    inputs = DisentangledInputs(
        query, query, query, layout, layout, position_key=None, position_query=None, relative=None
    )
    assert fused.unsupported(inputs) is None
    assert (choose(BACKENDS, "auto", inputs) is BACKENDS["triton"]) == (DEVICE == "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("lengths", MIXES, ids=str)
def test_all_lengths(lengths: list[int], table: str, is_causal: bool) -> None:
    compare(lengths, TABLES[table], head_width=64, is_causal=is_causal, dtype=torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_width", [32, 64, 128])
@pytest.mark.parametrize("terms", TERMS, ids=str)
def test_all_widths_and_dtypes(terms: tuple[bool, bool], head_width: int, dtype: torch.dtype) -> None:
    for how in ("packed", "padded"):
        compare([129, 5, 600], TABLES["log"], how=how, head_width=head_width, terms=terms, dtype=dtype)


@pytest.mark.gpu
def test_query_positions_on_gpu() -> None:
    lengths, queries_per_sequence = [1, 64, 200, 513], [1, 10, 31, 100]
    for dtype in (torch.float32, torch.bfloat16):
        _compare_query_positions(
            lengths, queries_per_sequence, heads=4, head_width=64, dtype=dtype, table=TABLES["log"]
        )

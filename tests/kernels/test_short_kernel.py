"""Kernels of attention for short sequences against the reference in float64: outputs and all gradients."""

from functools import partial

import pytest
import torch
from cases import packed_layout, padded_layout
from helpers_kernels import DEVICE, assert_close_to_truth, needs_triton, results
from torch import Tensor

from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.ops.attention import BACKENDS, attention, short
from bertsmith.ops.attention.reference import AttentionInputs
from bertsmith.ops.dispatch import choose

pytestmark = needs_triton
LENGTHS = [1, 17, 63, 64, 65, 127, 128]
MIXES = [*([length] for length in LENGTHS), LENGTHS, [3] * 40, [5, 0, 0, 70, 1, 0], [128] * 300]


def op(joint: Tensor, *, layout: SequenceLayout, backend: str, **options: object) -> Tensor:
    """Call the op with the slices of one tensor, as a mixer does."""
    return attention(*joint.unbind(-3), layout, joint=joint, backend=backend, **options)


def op_of_parts(*parts: Tensor, layout: SequenceLayout, backend: str) -> Tensor:
    return attention(*parts, layout, backend=backend)


def compare(
    lengths: list[int],
    *,
    lying: str = "packed",
    heads: int = 2,
    head_width: int = 16,
    dtype: torch.dtype = torch.float16,
    **options: object,
) -> None:
    layout, shape = _lying(lengths, lying)
    joint = torch.randn(*shape, 3, heads, head_width, dtype=torch.float64).to(DEVICE)
    call = partial(op, layout=layout, **options)
    assert_close_to_truth(call, [joint], dtype, fast="short", is_token=layout.is_token)


def _lying(lengths: list[int], lying: str) -> tuple[SequenceLayout, tuple[int, ...]]:
    if lying == "packed":
        return packed_layout(lengths, empty=2).to(DEVICE), (sum(lengths),)
    layout = padded_layout(lengths, extra=0 if max(lengths) == short.MAX_LENGTH else 1).to(DEVICE)
    return layout, (layout.batch, layout.max_length)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": 3}, {"is_causal": True, "window": 3}], ids=str)
@pytest.mark.parametrize("lying", ["packed", "padded"])
def test_outputs_and_gradients_equal_the_reference(lying: str, options: dict[str, object]) -> None:
    compare([5, 0, 33, 1], lying=lying, **options)


def test_rows_without_padding() -> None:
    layout = SequenceLayout.full(2, 20)
    joint = torch.randn(2, 20, 3, 2, 32, dtype=torch.float64).to(DEVICE)
    assert_close_to_truth(partial(op, layout=layout), [joint], torch.float16, fast="short")


def test_query_key_and_value_may_be_separate_tensors() -> None:
    layout = packed_layout([9, 4]).to(DEVICE)
    parts = [torch.randn(13, 2, 16, dtype=torch.float64).to(DEVICE) for _ in range(3)]
    assert_close_to_truth(partial(op_of_parts, layout=layout), parts, torch.float16, fast="short")


def test_the_first_three_of_four_projections_are_read_in_place() -> None:
    layout, call = packed_layout([9, 4]).to(DEVICE), partial(op, backend="short")
    projected = torch.randn(13, 4, 2, 16, dtype=torch.float16).to(DEVICE)
    joint = projected[:, :3]
    assert torch.equal(call(joint, layout=layout), call(joint.contiguous(), layout=layout))


def _dropped(joint: Tensor, seed: int, rate: float = 0.3) -> Tensor:
    torch.manual_seed(seed)
    return op(joint, layout=packed_layout([30, 7]).to(DEVICE), dropout=rate, backend="short")


def test_dropout_mask_is_recomputed_in_backward() -> None:
    query_and_key = torch.randn(37, 2, 2, 16, dtype=torch.float16).to(DEVICE)
    value = torch.randn(37, 1, 2, 16, dtype=torch.float16).to(DEVICE).requires_grad_()
    joint = torch.cat([query_and_key, value], dim=1)
    mixed = _dropped(joint, seed=0)
    assert torch.equal(mixed, _dropped(joint, seed=0))
    assert not torch.equal(mixed, _dropped(joint, seed=1))
    # for a fixed mask the output is linear in the values, so ⟨gradient, values⟩ equals ⟨output, upstream⟩
    upstream = torch.randn_like(mixed)
    (gradient,) = torch.autograd.grad(mixed, value, upstream)
    torch.testing.assert_close((mixed * upstream).float().sum(), (gradient * value).float().sum(), rtol=0.01, atol=0.1)


def test_dropout_gradient_of_the_scores_equals_differences() -> None:
    generator = torch.Generator().manual_seed(1)
    joint = torch.randn(37, 3, 2, 16, generator=generator, dtype=torch.float64).half().to(DEVICE)
    upstream = torch.randn(37, 2, 16, generator=generator, dtype=torch.float64).to(DEVICE)
    leaf = joint.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(_dropped(leaf, seed=0), leaf, upstream.half())
    direction = gradient.double()
    direction[:, 2] = 0  # queries and keys only
    step = 0.05 / direction.square().mean().sqrt()
    ahead, behind = (_dropped((joint + sign * step * direction).half(), seed=0) for sign in (1, -1))
    slope = ((ahead - behind).double() * upstream).sum() / (2 * step)
    assert direction.square().sum().item() == pytest.approx(slope.item(), rel=0.05)


def test_dropout_preserves_the_mean() -> None:
    joint = torch.randn(37, 3, 2, 16, dtype=torch.float16).to(DEVICE)
    plain = _dropped(joint, seed=0, rate=0.0).float()
    mean = torch.stack([_dropped(joint, seed).float() for seed in range(6 if DEVICE == "cpu" else 400)]).mean(0)
    assert ((mean * plain).sum() / (plain * plain).sum()).item() == pytest.approx(1, abs=0.15)


def test_op_compiles_without_graph_breaks() -> None:
    layout = packed_layout([12, 5]).to(DEVICE)
    joint = torch.randn(17, 3, 2, 16, dtype=torch.float16).to(DEVICE).requires_grad_()
    call = partial(op, layout=layout, backend="short")
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    expected, actual = call(joint), compiled(joint)
    torch.testing.assert_close(actual, expected)
    gradients = [torch.autograd.grad(mixed.square().sum(), joint)[0] for mixed in (actual, expected)]
    torch.testing.assert_close(*gradients)


def test_unsupported_inputs_raise_with_the_reason() -> None:
    layout = packed_layout([3]).to(DEVICE)

    def call(
        width: int, dtype: torch.dtype = torch.float16, layout: SequenceLayout = layout, **options: object
    ) -> None:
        part = torch.randn(3, 2, width, dtype=dtype, device=DEVICE)
        attention(part, part, part, layout, backend="short", **options)

    with pytest.raises(InputError, match="the head width is 24, but the kernel supports 16, 32, 64, 128"):
        call(24)
    with pytest.raises(InputError, match="float32, but the kernel supports float16 and bfloat16"):
        call(16, torch.float32)
    with pytest.raises(InputError, match="max_length is 129, but the kernel supports 1 to 128"):
        call(16, layout=SequenceLayout.packed(torch.tensor([0, 3], dtype=torch.int32, device=DEVICE), 129))
    with pytest.raises(InputError, match="key_layout differs"):
        call(16, key_layout=packed_layout([3]).to(DEVICE))


def test_auto_uses_it_on_a_gpu_only() -> None:
    part, layout = torch.randn(3, 2, 16, dtype=torch.float16, device=DEVICE), packed_layout([3]).to(DEVICE)
    chosen = choose(BACKENDS, "auto", AttentionInputs(part, part, part, layout, layout))
    assert (chosen is BACKENDS["short"]) == (DEVICE == "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_width", [16, 32, 64, 128])
@pytest.mark.parametrize("lying", ["packed", "padded"])
@pytest.mark.parametrize("lengths", MIXES, ids=str)
def test_all_lengths_and_widths(lengths: list[int], lying: str, head_width: int, is_causal: bool) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        compare(lengths, lying=lying, heads=4, head_width=head_width, dtype=dtype, is_causal=is_causal)


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("head_width", [16, 32, 64, 128])
def test_repeated_runs_are_equal(head_width: int, dropout: float) -> None:
    layout = packed_layout([128] * 500 + [65, 1, 31]).to(DEVICE)
    joint = torch.randn(500 * 128 + 97, 3, 4, head_width, device=DEVICE, dtype=torch.bfloat16)
    call = partial(op, layout=layout, dropout=dropout)
    runs = []
    for _ in range(5):
        torch.manual_seed(0)
        runs.append(results(call, [joint], "short", torch.bfloat16))
    assert all(torch.equal(one, other) for run in runs[1:] for one, other in zip(runs[0], run, strict=True))

"""Packed attention on a GPU against the reference in float64: outputs and every gradient."""

import pytest
import torch
from cases import packed_layout

from bertsmith.ops.attention import attention

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_width", [32, 64, 128])
@pytest.mark.parametrize("lengths", [[1], [17, 1, 63], [64, 65], [1000, 3], [128] * 8])
def test_varlen_equals_the_reference(lengths: list[int], head_width: int, is_causal: bool, window: int | None) -> None:
    layout = packed_layout(lengths, empty=2).to("cuda")
    exact = [torch.randn(sum(lengths), 4, head_width, device="cuda", dtype=torch.float64) for _ in range(3)]
    weight = torch.randn_like(exact[0])
    results = {}
    for name, dtype in (("varlen", torch.bfloat16), ("reference", torch.bfloat16), ("truth", torch.float64)):
        tensors = [tensor.to(torch.bfloat16).to(dtype).requires_grad_() for tensor in exact]
        backend = "varlen" if name == "varlen" else "reference"
        mixed = attention(*tensors, layout, is_causal=is_causal, window=window, backend=backend)
        gradients = torch.autograd.grad((mixed * weight.to(dtype)).sum(), tensors)
        results[name] = [tensor.double() for tensor in (mixed, *gradients)]
    for fast, rounded, truth in zip(results["varlen"], results["reference"], results["truth"], strict=True):
        assert fast.isfinite().all()
        # no further from the truth than the written-out form in the same precision, with a little room
        scale = truth.norm() + 0.01 * truth.numel() ** 0.5  # some gradients are exactly 0
        assert (fast - truth).norm() / scale <= 1.5 * (rounded - truth).norm() / scale + 4e-3


def test_auto_takes_varlen_for_packed_half_precision() -> None:
    from bertsmith.ops.attention import FORMS
    from bertsmith.ops.attention.inputs import AttentionInputs
    from bertsmith.ops.dispatch import choose

    layout = packed_layout([3, 5]).to("cuda")
    tensors = [torch.randn(8, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    assert choose(FORMS, "auto", AttentionInputs(*tensors, layout, layout)) is FORMS["varlen"]
    with_dropout = AttentionInputs(*tensors, layout, layout, dropout=0.1)
    assert choose(FORMS, "auto", with_dropout) is FORMS["sdpa"]
    assert FORMS["varlen"].unsupported(with_dropout) == "the kernel has no attention dropout"

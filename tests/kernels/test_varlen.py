"""Packed attention on a GPU against the reference in float64: outputs and all gradients."""

import pytest
import torch
from cases import packed_layout

from bertsmith.ops.attention import attention, varlen
from bertsmith.ops.attention.reference import AttentionInputs

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
        # as close to float64 as the reference in the same precision, with a small tolerance
        scale = truth.norm() + 0.01 * truth.numel() ** 0.5  # some gradients are exactly 0
        assert (fast - truth).norm() / scale <= 1.5 * (rounded - truth).norm() / scale + 4e-3


def test_auto_chooses_varlen_for_long_packed_half_precision() -> None:
    from bertsmith.ops.attention import BACKENDS
    from bertsmith.ops.dispatch import choose

    layout = packed_layout([3, 129]).to("cuda")
    tensors = [torch.randn(132, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    assert choose(BACKENDS, "auto", AttentionInputs(*tensors, layout, layout)) is BACKENDS["varlen"]
    assert choose(BACKENDS, "auto", AttentionInputs(*tensors, layout, layout, dropout=0.1)) is BACKENDS["varlen"]


def test_varlen_dropout() -> None:
    lengths = [1, 17, 64, 100]
    layout = packed_layout(lengths).to("cuda")
    query, key, value = (torch.randn(sum(lengths), 4, 32, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def mixed(values: torch.Tensor, rate: float, seed: int = 0) -> torch.Tensor:
        torch.manual_seed(seed)
        return attention(query, key, values, layout, dropout=rate, backend="varlen")

    plain = attention(query, key, value, layout, backend="varlen")
    without_dropout = AttentionInputs(query, key, value, layout, layout)
    assert layout.starts is not None
    torch.testing.assert_close(varlen._with_dropout(without_dropout, layout.starts, layout.starts, (-1, -1)), plain)
    assert torch.equal(mixed(value, 0.3), mixed(value, 0.3))
    assert not torch.equal(mixed(value, 0.3), mixed(value, 0.3, seed=1))
    # the kernel rounds rates to 1/256
    mean = torch.stack([mixed(value, 0.3, seed).float() for seed in range(400)]).mean(0)
    assert (mean - plain.float()).norm() / plain.float().norm() < 0.1
    # for a fixed mask the output is linear in the values, so ⟨gradient, values⟩ equals ⟨output, upstream⟩
    leaf = value.clone().requires_grad_()
    upstream = torch.randn_like(value)
    out = mixed(leaf, 0.3)
    (gradient,) = torch.autograd.grad(out, leaf, upstream)
    forward, backward = (out.detach() * upstream).float().sum(), (gradient * value).float().sum()
    torch.testing.assert_close(forward, backward, rtol=0.05, atol=3.0)

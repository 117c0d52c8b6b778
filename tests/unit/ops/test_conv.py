"""Convolution backends against loops written from the papers, in every layout, with gradients."""

import pytest
import torch
from cases import LENGTH_CASES, packed_layout, padded_layout, rows_of
from torch import Tensor

from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.ops.conv import (
    BACKENDS,
    depthwise,
    depthwise_step,
    kernel_map,
    light_conv,
    light_conv_step,
    tap_weights,
)

CPU_BACKENDS = [name for name in BACKENDS if name != "triton"]  # kernels: tests/kernels
KERNEL_SIZES = [1, 3, 9, 13]
HEADS, HEAD_WIDTH = 3, 2


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def depthwise_loop(hidden: Tensor, kernel: Tensor, is_causal: bool) -> Tensor:
    """O[i, c] = Σ_j W[c, j] · X[i + j − ⌈(k + 1)/2⌉, c] (Wu et al. 2019, section 2), one sequence."""
    kernel_size = kernel.shape[1]
    centre = kernel_size - 1 if is_causal else kernel_size // 2
    rows = []
    for i in range(len(hidden)):
        terms = [kernel[:, j] * hidden[i + j - centre] for j in range(kernel_size) if 0 <= i + j - centre < len(hidden)]
        rows.append(torch.stack(terms).sum(0))
    return torch.stack(rows)


def light_loop(value: Tensor, scores: Tensor, is_causal: bool) -> Tensor:
    """LightConv and DynamicConv (Wu et al. 2019, eqs. 3 to 5): softmax over the taps, shared by a head's channels."""
    kernel_size = scores.shape[-1]
    centre = kernel_size - 1 if is_causal else kernel_size // 2
    result = torch.zeros_like(value)
    for i in range(len(value)):
        for head in range(value.shape[1]):
            kernel = (scores if scores.dim() == 2 else scores[i])[head].exp()
            kernel = kernel / kernel.sum()
            for channel in range(value.shape[2]):
                for j in range(kernel_size):
                    if 0 <= i + j - centre < len(value):
                        result[i, head, channel] += kernel[j] * value[i + j - centre, head, channel]
    return result


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kernel_size", KERNEL_SIZES)
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_depthwise_equals_loop(backend: str, kernel_size: int, is_causal: bool) -> None:
    for case in LENGTH_CASES.values():
        items, kernel = [numbers(length, 5).detach() for length in case], numbers(5, kernel_size).detach()
        expected = torch.cat([depthwise_loop(item, kernel, is_causal) for item in items])
        packed = depthwise(torch.cat(items), kernel, packed_layout(case, empty=2), is_causal=is_causal, backend=backend)
        torch.testing.assert_close(packed, expected, rtol=0, atol=1e-13)
        layout = padded_layout(case, extra=2)
        rows = depthwise(rows_of(items, 2, 1e3), kernel, layout, is_causal=is_causal, backend=backend)
        torch.testing.assert_close(rows[layout.is_token], expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kernel_size", KERNEL_SIZES)
@pytest.mark.parametrize("is_fixed", [True, False], ids=["light", "dynamic"])
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_light_conv_equals_loop(backend: str, is_fixed: bool, kernel_size: int, is_causal: bool) -> None:
    with torch.no_grad():
        for case in LENGTH_CASES.values():
            items = [numbers(length, HEADS, HEAD_WIDTH) for length in case]
            fixed = numbers(HEADS, kernel_size)
            scores = [fixed if is_fixed else numbers(length, HEADS, kernel_size) for length in case]
            expected = torch.cat([light_loop(v, s, is_causal) for v, s in zip(items, scores, strict=True)])
            together = fixed if is_fixed else torch.cat(scores)
            layout = packed_layout(case, empty=2)
            packed = light_conv(torch.cat(items), together, layout, is_causal=is_causal, backend=backend)
            torch.testing.assert_close(packed, expected, rtol=0, atol=1e-13)
            layout, padded = padded_layout(case, extra=2), fixed if is_fixed else rows_of(scores, 2, 1e3)
            rows = light_conv(rows_of(items, 2, 1e3), padded, layout, is_causal=is_causal, backend=backend)
            torch.testing.assert_close(rows[layout.is_token], expected, rtol=0, atol=1e-13)


def test_gradients() -> None:
    layouts = {(5,): packed_layout([3, 2]), (2, 4): padded_layout([4, 2])}
    for shape, layout in layouts.items():
        assert torch.autograd.gradcheck(
            lambda h, k, at=layout: depthwise(h, k, at), (numbers(*shape, 3), numbers(3, 5))
        )
        for scores in (numbers(2, 5), numbers(*shape, 2, 5)):
            tensors = (numbers(*shape, 2, 3), scores)
            assert torch.autograd.gradcheck(lambda v, s, at=layout: light_conv(v, s, at), tensors)


def test_legacy_padding_convolves_padding() -> None:
    layout = padded_layout([4, 2], extra=3)
    value, scores, kernel = numbers(2, 7, 1, 3), numbers(1, 5), numbers(3, 5)
    for backend in CPU_BACKENDS:
        full = SequenceLayout.full(2, 7)
        options = {"legacy_padding": True, "backend": backend}
        torch.testing.assert_close(light_conv(value, scores, layout, **options), light_conv(value, scores, full))
        hidden = value[:, :, 0]
        torch.testing.assert_close(depthwise(hidden, kernel, layout, **options), depthwise(hidden, kernel, full))
        assert not torch.allclose(light_conv(value, scores, layout), light_conv(value, scores, full))


def test_causal_convolution_ignores_future_tokens() -> None:
    value, scores, kernel, layout = numbers(8, 2, 3), numbers(8, 2, 5), numbers(6, 5), packed_layout([8])
    later = torch.cat([value[:5], numbers(3, 2, 3)])
    for backend in CPU_BACKENDS:
        first, second = (light_conv(v, scores, layout, is_causal=True, backend=backend) for v in (value, later))
        assert torch.equal(first[:5], second[:5])
        assert not torch.equal(first[5:], second[5:])
        first, second = (
            depthwise(v.flatten(1), kernel, layout, is_causal=True, backend=backend) for v in (value, later)
        )
        torch.testing.assert_close(first[:5], second[:5], rtol=0, atol=1e-15)


def test_steps_equal_causal_convolution() -> None:
    value, scores, kernel = numbers(2, 6, 2, 3), numbers(2, 6, 2, 5), numbers(6, 5)
    layout = SequenceLayout.full(2, 6)
    whole = light_conv(value, scores, layout, is_causal=True)
    fixed = light_conv(value, scores[0, 0], layout, is_causal=True)
    deep = depthwise(value.flatten(2), kernel, layout, is_causal=True)
    before = torch.nn.functional.pad(value, (0, 0, 0, 0, 4, 0))
    for position in range(6):
        window = before[:, position : position + 5]
        torch.testing.assert_close(light_conv_step(window, scores[:, position]), whole[:, position], rtol=0, atol=1e-13)
        torch.testing.assert_close(light_conv_step(window, scores[0, 0]), fixed[:, position], rtol=0, atol=1e-13)
        torch.testing.assert_close(depthwise_step(window.flatten(2), kernel), deep[:, position], rtol=0, atol=1e-13)


def test_map_times_value_equals_convolution() -> None:
    layout, value, scores = packed_layout([6, 2]), numbers(8, 2, 3), numbers(8, 2, 5)
    maps = kernel_map(tap_weights(scores), layout)
    assert maps.shape == (2, 2, 6, 6)
    assert (maps[1, :, :, 2:] == 0).all()
    assert (maps[0, :, 0, 3:] == 0).all()
    rows, _ = layout.pad(value)
    mixed = layout.unpad(torch.einsum("bhqk,bkhd->bqhd", maps, rows), value)
    torch.testing.assert_close(mixed, light_conv(value, scores, layout))
    torch.testing.assert_close(maps[0, :, 2, :5].sum(-1), torch.ones(2, dtype=torch.float64))
    assert (maps[0, :, 0].sum(-1) < 1).all(), "taps outside the sequence must not be renormalised"


def test_half_precision_accumulates_in_float32() -> None:
    layout = packed_layout([400, 30])
    value, scores = torch.randn(430, 4, 16), torch.randn(430, 4, 9)
    exact = light_conv(value.bfloat16().double(), scores.bfloat16().double(), layout)
    for backend in CPU_BACKENDS:
        half = light_conv(value.bfloat16(), scores.bfloat16(), layout, backend=backend)
        assert half.dtype == torch.bfloat16
        # rounded once, at the end
        torch.testing.assert_close(half.double(), exact, rtol=2**-8, atol=1e-6)


def test_dropout_applies_to_taps_and_preserves_the_mean() -> None:
    value, scores, layout = numbers(5, 2, 3).detach(), numbers(5, 2, 3).detach(), packed_layout([5])
    clean = light_conv(value, scores, layout)
    for backend in CPU_BACKENDS:
        noisy = torch.stack([light_conv(value, scores, layout, dropout=0.5, backend=backend) for _ in range(2000)])
        assert ((noisy.mean(0) - clean).abs() < 5 * noisy.std(0) / 2000**0.5).all()
        assert noisy.std(0).min() > 0


def test_no_windows_are_saved_for_backward() -> None:
    saved = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal saved
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            saved += storage.nbytes()
        return tensor

    value, scores = torch.randn(4, 64, 2, 32, requires_grad=True), torch.randn(4, 64, 2, 9, requires_grad=True)
    kernel = torch.randn(64, 9, requires_grad=True)
    for layout in (SequenceLayout.full(4, 64), padded_layout([64, 5, 9, 30])):
        for mix in (
            lambda at=layout: light_conv(value, scores, at, backend="taps"),
            lambda at=layout: depthwise(value.flatten(2), kernel, at, backend="taps"),
        ):
            saved, seen = 0, set()
            with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
                mix()
            assert 0 < saved < 3 * value.numel() * 4, "nine windows would be nine times the value"


@pytest.mark.parametrize("kernel_size", [2, 8])
def test_even_kernel_size_is_rejected(kernel_size: int) -> None:
    with pytest.raises(InputError, match=f"kernel_size is {kernel_size}; allowed: odd numbers"):
        light_conv(numbers(5, 2, 3), numbers(2, kernel_size), packed_layout([5]))
    with pytest.raises(InputError, match=f"kernel_size is {kernel_size}; allowed: odd numbers"):
        depthwise(numbers(5, 6), numbers(6, kernel_size), packed_layout([5]))

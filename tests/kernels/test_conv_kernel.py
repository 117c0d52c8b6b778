"""Convolution kernels against the reference in float64: outputs and all gradients, in every layout."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from cases import packed_layout, padded_layout, tiny_model
from helpers_kernels import DEVICE, assert_close_to_truth, needs_triton, results
from torch import Tensor

from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.ops.conv import BACKENDS, depthwise, fused, light_conv
from bertsmith.ops.conv.reference import LightConvInputs
from bertsmith.ops.dispatch import choose

pytestmark = needs_triton
LENGTHS = [1, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1000]
MIXES = [*([length] for length in LENGTHS), LENGTHS, [3] * 40, [5, 0, 0, 70, 1, 0]]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(DEVICE, dtype)


def make_layout(lengths: list[int], how: str) -> tuple[SequenceLayout, tuple[int, ...]]:
    """Return a layout and the leading shape of its tensors."""
    if how == "packed":
        return packed_layout(lengths, empty=2).to(DEVICE), (sum(lengths),)
    layout = padded_layout(lengths, extra=3).to(DEVICE)
    return layout, (len(lengths), layout.max_length)


def compare(
    lengths: list[int],
    how: str,
    *,
    heads: int,
    head_width: int,
    kernel_size: int,
    dtype: torch.dtype,
    is_fixed: bool = False,
    is_causal: bool = False,
    legacy_padding: bool = False,
) -> None:
    """Compare both ops with the reference in one layout."""
    layout, shape = make_layout(lengths, how)
    options = {"layout": layout, "is_causal": is_causal, "legacy_padding": legacy_padding}
    is_token = None if legacy_padding else layout.is_token
    scores = numbers(heads, kernel_size) if is_fixed else 2 * numbers(*shape, heads, kernel_size)
    value = numbers(*shape, heads, head_width)
    assert_close_to_truth(partial(light_conv, **options), [value, scores], dtype, is_token=is_token)
    hidden, kernel = value.flatten(-2), numbers(heads * head_width, kernel_size)
    assert_close_to_truth(partial(depthwise, **options), [hidden, kernel], dtype, is_token=is_token)


@pytest.mark.parametrize(
    ("how", "kernel_size", "is_causal"),
    [
        ("packed", 1, False),
        ("packed", 3, True),
        pytest.param("packed", 9, False, marks=pytest.mark.slow),
        ("packed", 13, True),
        ("padded", 13, False),
        ("padded", 9, True),
    ],
)
def test_convolutions_equal_the_reference(how: str, kernel_size: int, is_causal: bool) -> None:
    lengths = [70, 1, 0, 5, 12] if how == "packed" else [40, 1, 5]
    compare(lengths, how, heads=2, head_width=24, kernel_size=kernel_size, dtype=torch.float32, is_causal=is_causal)


@pytest.mark.parametrize("is_fixed", [False, True], ids=["dynamic", "light"])
@pytest.mark.parametrize("legacy_padding", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_padding_and_shared_kernels(legacy_padding: bool, is_fixed: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        options = {"is_fixed": is_fixed, "legacy_padding": legacy_padding, "dtype": dtype}
        compare([9, 2, 33], "padded", heads=3, head_width=16, kernel_size=5, **options)


@pytest.mark.slow
def test_more_channels_than_a_tile_and_more_chunks_than_programs() -> None:
    layout, hidden = packed_layout([45, 3], empty=1).to(DEVICE), numbers(48, 300)
    for kernel_size in (3, 17):
        assert_close_to_truth(partial(depthwise, layout=layout), [hidden, numbers(300, kernel_size)], torch.float32)
    from bertsmith.ops.conv.depthwise_kernels import kernel_gradient
    from bertsmith.ops.kernel_support import SequenceRows

    rows, gradient = SequenceRows.of(layout, hidden.device), numbers(48, 300)
    many, one = (kernel_gradient(gradient, hidden, 5, rows, 2, max_shares=shares) for shares in (127, 1))
    torch.testing.assert_close(many, one, rtol=1e-5, atol=1e-4)


def test_padding_gets_zeros_and_no_gradient() -> None:
    layout, shape = make_layout([3, 7], "padded")
    assert layout.is_token is not None
    pads = ~layout.is_token
    value, scores, kernel = numbers(*shape, 2, 16), numbers(*shape, 2, 3), numbers(32, 3)
    for tensor in (value, scores):
        tensor[pads] = float("nan")
    mixes: list[tuple[Callable[..., Tensor], list[Tensor]]] = [
        (light_conv, [value, scores]),
        (depthwise, [value.flatten(-2), kernel]),
    ]
    for op, tensors in mixes:
        mixed, *gradients = results(partial(op, layout=layout), tensors, "triton", torch.float32)
        assert (mixed[pads] == 0).all()
        assert all(tensor.isfinite().all() for tensor in (mixed, *gradients))
        assert all((tensor[pads] == 0).all() for tensor in gradients if tensor.shape[: len(shape)] == shape)


def test_strided_inputs_are_supported() -> None:
    layout = packed_layout([11, 6]).to(DEVICE)
    projected = numbers(17, 4, 2, 16).requires_grad_()
    predicted, upstream = numbers(17, 2, 16).requires_grad_(), numbers(17, 4, 16)

    def mix(backend: str) -> list[Tensor]:
        value, scores = projected.unbind(1)[3], predicted[..., :9]  # neither is contiguous
        # concatenated, as with attention heads, so that its gradient is a slice of a wider tensor
        mixed = torch.cat([value, light_conv(value, scores, layout, backend=backend)], 1)
        deep = depthwise(projected[:, 1].flatten(1), predicted[0].T[:, 0:1].repeat(2, 3), layout, backend=backend)
        return list(torch.autograd.grad((mixed * upstream).sum() + deep.sum(), [projected, predicted]))

    for ours, theirs in zip(mix("triton"), mix("reference"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_fixed", [False, True], ids=["dynamic", "light"])
def test_dropout_mask_is_the_same_in_forward_and_backward(is_fixed: bool) -> None:
    layout, rate = packed_layout([13, 40]).to(DEVICE), 0.3
    value, scores = numbers(53, 2, 16), numbers(2, 5) if is_fixed else numbers(53, 2, 5)

    def mixed(value: Tensor, scores: Tensor, seed: int = 0) -> Tensor:
        torch.manual_seed(seed)
        return light_conv(value, scores, layout, dropout=rate, backend="triton")

    assert torch.equal(mixed(value, scores), mixed(value, scores))
    assert not torch.equal(mixed(value, scores), mixed(value, scores, seed=1))
    # for a fixed mask the output is linear in the values, so ⟨gradient, values⟩ equals ⟨output, upstream⟩
    leaves, upstream = [value.clone().requires_grad_(), scores.clone().requires_grad_()], numbers(53, 2, 16)
    out = mixed(*leaves)
    to_value, to_scores = torch.autograd.grad(out, leaves, upstream)
    torch.testing.assert_close((out * upstream).sum(), (to_value * value).sum(), rtol=1e-4, atol=1e-3)
    # finite differences along the scores
    step = 1e-2 * numbers(*scores.shape)
    change = (mixed(value, scores + step) - mixed(value, scores - step)) * upstream
    torch.testing.assert_close(change.sum() / 2, (to_scores * step).sum(), rtol=1e-2, atol=1e-4)
    # values of 1 and equal scores: the output is a sum of weights that are 0 or 0.2 / 0.7
    ones = mixed(torch.ones_like(value), torch.zeros_like(scores))[4:9]
    torch.testing.assert_close(ones * 3.5, (ones * 3.5).round(), rtol=0, atol=1e-5)
    assert is_fixed == torch.equal(ones[:1].expand_as(ones), ones)


def test_dropout_preserves_the_mean() -> None:
    # inputs repeat every five tokens, so a long sequence gives many samples of the same output
    value, scores = numbers(5, 2, 16).repeat(121, 1, 1), numbers(5, 2, 3).repeat(121, 1, 1)
    layout = packed_layout([len(value)]).to(DEVICE)
    noisy, clean = (
        light_conv(value, scores, layout, dropout=rate, backend="triton")[5:].unflatten(0, (120, 5))[:-1]
        for rate in (0.5, 0.0)
    )
    assert ((noisy.mean(0) - clean[0]).abs() < 6 * noisy.std(0) / 119**0.5).all()
    assert noisy.std(0).min() > 0


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.slow), 0.2])
def test_op_compiles_without_graph_breaks(dropout: float) -> None:
    layout = packed_layout([7, 4], empty=1).to(DEVICE)
    tensors = [numbers(11, 2, 16), numbers(11, 2, 3), numbers(32, 3)]

    def mix(value: Tensor, scores: Tensor, kernel: Tensor, backend: str) -> Tensor:
        mixed = light_conv(value, scores, layout, dropout=dropout, backend=backend)
        return depthwise(mixed.flatten(1), kernel, layout, backend=backend)

    outputs = []
    for function in (torch.compile(mix, fullgraph=True, backend="aot_eager"), mix):
        torch.manual_seed(4)
        outputs.append(results(function, tensors, "triton", torch.float32))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*outputs, strict=True))
    leaves = [tensor.requires_grad_() for tensor in tensors]
    assert layout.starts is not None
    first, length = layout.starts[:-1].clone(), layout.starts.diff()
    seed = torch.tensor([5], dtype=torch.int32, device=DEVICE) if dropout else None
    light = (*leaves[:2], first, length, seed, 7, 0, 1, dropout, False)
    torch.library.opcheck(torch.ops.bertsmith.light_conv.default, light)
    deep = (numbers(11, 32), leaves[2], first, length, 7, 0, 1, torch.bfloat16)
    torch.library.opcheck(torch.ops.bertsmith.depthwise.default, deep)


def test_mixed_dtypes_are_supported() -> None:
    layout, dtype = packed_layout([12, 9]).to(DEVICE), torch.bfloat16
    value, scores = numbers(21, 2, 16, dtype=dtype).requires_grad_(), numbers(2, 3).requires_grad_()
    mixed = light_conv(value, scores, layout, backend="triton")
    exact = light_conv(value.double(), scores.double(), layout)
    assert mixed.dtype == dtype
    # rounded once, at the end: the scores are not rounded; the interpreter truncates instead
    rounding = {"rtol": 2**-8 if value.is_cuda else 2**-7, "atol": 1e-6}
    torch.testing.assert_close(mixed.double(), exact, **rounding)
    to_value, to_scores = torch.autograd.grad(mixed.float().sum(), [value, scores])
    assert (to_value.dtype, to_scores.dtype) == (dtype, torch.float32)
    hidden, kernel = numbers(21, 32).requires_grad_(), numbers(32, 3).requires_grad_()
    deep = depthwise(hidden, kernel, layout, backend="triton")
    with torch.autocast(DEVICE, dtype):
        rounded = depthwise(hidden, kernel, layout, backend="triton")
    assert rounded.dtype == dtype
    torch.testing.assert_close(rounded.float(), deep, **rounding)
    upstream = numbers(21, 32, dtype=dtype)
    ours, theirs = (torch.autograd.grad(x, [hidden, kernel], upstream.to(x.dtype)) for x in (rounded, deep))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("how", ["packed", "padded"])
def test_model_outputs_and_gradients_equal_taps_backend(how: str) -> None:
    model, (layout, shape) = tiny_model("convbert-small", layers=1).float().to(DEVICE), make_layout([9, 4], how)
    real = torch.ones(shape, dtype=torch.bool) if layout.is_token is None else layout.is_token
    tokens, found = torch.randint(0, 50, shape, device=DEVICE), []
    for backend in ("triton", "taps"):
        model.zero_grad()
        states = model.encoder(tokens, layout, backend=backend)[real]
        states.square().sum().backward()
        found.append([states, *(p.grad for p in model.encoder.parameters() if p.grad is not None)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.slow  # several backward passes in Triton's interpreter
def test_gradients_are_deterministic() -> None:
    layout = packed_layout([70, 30]).to(DEVICE)
    for op, tensors in (
        (light_conv, [numbers(100, 2, 16), numbers(100, 2, 9)]),
        (depthwise, [numbers(100, 32), numbers(32, 9)]),
    ):
        first, second = (results(partial(op, layout=layout), tensors, "triton", torch.float32) for _ in range(2))
        assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_unsupported_inputs_raise_with_the_reason() -> None:
    layout, value = packed_layout([5]).to(DEVICE), numbers(5, 2, 16)
    with pytest.raises(InputError, match="float64, but the kernel supports float16"):
        light_conv(value.double(), numbers(2, 3), layout, backend="triton")
    with pytest.raises(InputError, match="the kernel size is 33, but this backend supports at most 31"):
        light_conv(value, numbers(2, 33), layout, backend="triton")
    with pytest.raises(InputError, match="the head width is 2000, but this backend supports at most 1024"):
        light_conv(numbers(5, 1, 2000), numbers(1, 3), layout, backend="triton")
    inputs = LightConvInputs(value, numbers(2, 3), layout)
    assert fused.preferred(inputs) == value.is_cuda
    assert (choose(BACKENDS, "auto", inputs) is BACKENDS["triton"]) == value.is_cuda


def test_empty_inputs_give_empty_outputs() -> None:
    layout = SequenceLayout.packed(torch.zeros(3, dtype=torch.int32, device=DEVICE), 0)
    op = partial(light_conv, layout=layout)
    mixed, *gradients = results(op, [numbers(0, 2, 16), numbers(2, 3)], "triton", torch.float32)
    assert mixed.shape == (0, 2, 16)
    assert (gradients[1] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("head_width", [32, 48, 64, 128])
@pytest.mark.parametrize("how", ["packed", "padded"])
@pytest.mark.parametrize("lengths", MIXES, ids=lambda lengths: "-".join(map(str, lengths))[:24])
def test_every_length_on_a_gpu(lengths: list[int], how: str, head_width: int, dtype: torch.dtype) -> None:
    for is_causal in (False, True):
        compare(lengths, how, heads=3, head_width=head_width, kernel_size=9, dtype=dtype, is_causal=is_causal)
    compare(
        lengths, how, heads=1, head_width=head_width, kernel_size=13, dtype=dtype, is_fixed=True, legacy_padding=True
    )


@pytest.mark.gpu
def test_offsets_beyond_31_bits() -> None:
    value = torch.zeros(2**31 // 8192 + 9, 128, 64, device="cuda", dtype=torch.bfloat16)
    value[-9:] = torch.randn(9, 128, 64, device="cuda")
    layout, scores, kernel = packed_layout([len(value)]).to("cuda"), numbers(128, 3), numbers(8192, 3)
    few = packed_layout([9]).to("cuda")
    upstream = torch.zeros_like(value)
    upstream[-9:] = torch.randn(9, 128, 64, device="cuda")
    for op, kernel_size in ((light_conv, scores), (lambda v, k, at, **o: depthwise(v.flatten(1), k, at, **o), kernel)):
        ends = []
        for leaf, at in ((value, layout), (value[-9:].clone(), few)):
            leaf.requires_grad_()
            mixed = op(leaf, kernel_size, at, backend="triton").view_as(leaf)
            (gradient,) = torch.autograd.grad(mixed, leaf, upstream[-len(leaf) :])
            ends.append((mixed[-8:].detach(), gradient[-8:]))
        assert all(torch.equal(far, near) for far, near in zip(*ends, strict=True))

"""The linear form of FAVOR+ against the quadratic one and token by token; what must never matter; precision."""

import pytest
import torch
from cases import packed_layout, padded_layout
from torch import Tensor

from bertsmith.batches.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.ops.favor import (
    KERNELS,
    draw,
    favor,
    favor_map,
    favor_memory,
    favor_read,
    favor_start,
    favor_step,
)

HEADS, HEAD_WIDTH, FEATURES = 3, 8, 20
LENGTHS = [1, 2, 15, 16, 17, 63, 65, 100]
POSITIVE = [name for name, kernel in KERNELS.items() if kernel.is_positive]


def inputs(*shape: int, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> list[Tensor]:
    tensors = [scale * torch.randn(*shape, HEADS, HEAD_WIDTH, dtype=dtype) for _ in range(3)]
    return [tensor.requires_grad_() for tensor in tensors]


def matrix(kernel: str = "softmax", dtype: torch.dtype = torch.float64) -> Tensor:
    return draw(FEATURES, HEAD_WIDTH, has_constant_norms=KERNELS[kernel].has_constant_norms).to(dtype)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_reference_is_the_formula(kernel: str) -> None:
    """φ written down once more, from the table of the paper, without any stabiliser."""
    query, key, value = (tensor[0, :, 0] for tensor in inputs(1, 5, scale=0.5))
    w = matrix(kernel)
    x, y = query / HEAD_WIDTH**0.25, key / HEAD_WIDTH**0.25
    small = {"softmax": -0.5, "regularised": -0.5, "hyperbolic": -0.5, "trigonometric": 0.5}

    def phi(vector: Tensor) -> Tensor:
        u, h = w @ vector, (small.get(kernel, 0.0) * vector @ vector).exp()
        curves = {
            "relu": lambda u: u.clamp(min=0),
            "relu_squared": lambda u: u.clamp(min=0) ** 2,
            "elu": lambda u: torch.where(u > 0, u + 1, u.exp()),
            "gelu": torch.nn.GELU(),
            "sigmoid": lambda u: 1 / (1 + (-u).exp()),
            "abs": torch.abs,
            "tanh": torch.tanh,
            "cos": torch.cos,
            "identity": lambda u: u,
            "hyperbolic": lambda u: torch.cat([u.exp(), (-u).exp()]),
            "trigonometric": lambda u: torch.cat([u.sin(), u.cos()]),
        }
        return h * curves.get(kernel, torch.exp)(u)

    expected = []
    for i in range(5):
        weights = torch.stack([phi(x[i]) @ phi(y[j]) for j in range(5)])
        expected.append(sum(weights[j] * value[j] for j in range(5)) / weights.sum())
    layout = SequenceLayout.full(1, 5)
    mixed = favor(query[None, :, None], key[None, :, None], value[None, :, None], w, layout, kernel=kernel, epsilon=0.0)
    torch.testing.assert_close(mixed[0, :, 0], torch.stack(expected), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("kernel", ["softmax", "hyperbolic", "relu"])
def test_chunked_quadratic_and_stepwise_agree(kernel: str, dtype: torch.dtype, tolerance: float) -> None:
    projection = matrix(kernel, dtype)
    for length in LENGTHS:
        query, key, value = (tensor.detach() for tensor in inputs(2, length, dtype=dtype))
        layout = SequenceLayout.full(2, length)
        options = {"kernel": kernel, "is_causal": True}
        expected = favor(query, key, value, projection, layout, **options, backend="reference")
        for chunk in (1, 3, 16, 64):
            mixed = favor(query, key, value, projection, layout, **options, chunk=chunk)
            torch.testing.assert_close(mixed, expected, rtol=0, atol=tolerance)
        state, steps = favor_start(2, HEADS, projection, kernel=kernel), []
        for place in range(length):
            mixed, state = favor_step(query[:, place], key[:, place], value[:, place], state, projection, kernel=kernel)
            steps.append(mixed)
        torch.testing.assert_close(torch.stack(steps, 1), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_linear_equals_the_reference_with_gradients(kernel: str, is_causal: bool) -> None:
    lengths, projection = [9, 4, 1], matrix(kernel)
    layouts = {
        (14,): packed_layout(lengths, empty=1),
        (3, 11): padded_layout(lengths, extra=2),
        (2, 7): SequenceLayout.full(2, 7),
    }
    for shape, layout in layouts.items():
        tensors = inputs(*shape, scale=0.7)
        real = torch.ones(shape, dtype=torch.bool) if layout.is_token is None else layout.is_token
        results = []
        for backend in ("linear", "reference"):
            mixed = favor(*tensors, projection, layout, kernel=kernel, is_causal=is_causal, chunk=4, backend=backend)
            gradients = torch.autograd.grad(mixed[real].square().sum(), tensors)
            results.append([mixed[real], *gradients])
        for fast, slow in zip(*results, strict=True):
            torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kernel", ["softmax", "hyperbolic", "trigonometric", "elu", "relu"])
def test_gradcheck(kernel: str, is_causal: bool) -> None:
    projection, layout = matrix(kernel), padded_layout([5, 3])

    def compute(*tensors: Tensor) -> Tensor:
        mixed = favor(*tensors, projection, layout, kernel=kernel, is_causal=is_causal, chunk=2)
        return mixed[layout.is_token]

    assert torch.autograd.gradcheck(compute, inputs(2, 5, scale=0.5))


def test_nothing_but_the_inputs_is_kept_for_the_backward_pass() -> None:
    length = 512
    tensors, projection = inputs(1, length), matrix()
    for is_causal in (False, True):
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, into=sizes: (into.append(t.numel()), t)[1], lambda t: t
        ):
            favor(*tensors, projection, SequenceLayout.full(1, length), is_causal=is_causal)
        # query, key, value and the output, and one row sum for each of their heads
        assert sum(sizes) <= length * HEADS * (4 * HEAD_WIDTH + 1) + projection.numel()


@pytest.mark.parametrize("backend", ["linear", "reference"])
@pytest.mark.parametrize("kernel", POSITIVE)
def test_the_future_changes_nothing(kernel: str, backend: str) -> None:
    query, key, value = (tensor.detach() for tensor in inputs(1, 20))
    options = {"kernel": kernel, "is_causal": True, "chunk": 6, "backend": backend}
    projection, layout = matrix(kernel), SequenceLayout.full(1, 20)
    before = favor(query, key, value, projection, layout, **options)
    later = [torch.cat([tensor[:, :13], 5 * torch.randn_like(tensor[:, 13:])], 1) for tensor in (query, key, value)]
    after = favor(*later, projection, layout, **options)
    assert torch.equal(before[:, :13], after[:, :13])
    assert not torch.equal(before[:, 13:], after[:, 13:])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kernel", POSITIVE)
def test_pads_never_matter(kernel: str, is_causal: bool) -> None:
    tensors = [tensor.detach() for tensor in inputs(1, 6)]
    projection = matrix(kernel)
    expected = favor(*tensors, projection, SequenceLayout.full(1, 6), kernel=kernel, is_causal=is_causal)
    for filling in (0.0, 1e3):
        longer = [torch.cat([tensor, torch.full_like(tensor[:, :3], filling)], 1) for tensor in tensors]
        mixed = favor(*longer, projection, padded_layout([6], extra=3), kernel=kernel, is_causal=is_causal, chunk=4)
        torch.testing.assert_close(mixed[:, :6], expected, rtol=0, atol=1e-13)
        assert mixed.isfinite().all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_constant_in_the_exponents_cancels(is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from bertsmith.ops.favor import features

    query, key, value = (tensor.detach() for tensor in inputs(1, 9))
    projection, layout = matrix(), SequenceLayout.full(1, 9)
    plain = favor(query, key, value, projection, layout, is_causal=is_causal)

    project = features.project

    def moved(*arguments: object) -> features.Projected:
        projected = project(*arguments)
        return projected._replace(exponent=projected.exponent + 300.0)

    monkeypatch.setattr(features, "project", moved)
    torch.testing.assert_close(
        favor(query, key, value, projection, layout, is_causal=is_causal), plain, rtol=1e-11, atol=1e-11
    )


def test_keys_of_another_length() -> None:
    query, memory = inputs(2, 4)[0], inputs(2, 7)
    key, value = memory[1:]
    layout, key_layout, projection = padded_layout([4, 2]), padded_layout([5, 7]), matrix()
    mixed = favor(query, key, value, projection, layout, key_layout=key_layout)
    for row, length in enumerate([5, 7]):
        alone = favor(
            query[row : row + 1],
            key[row : row + 1, :length],
            value[row : row + 1, :length],
            projection,
            SequenceLayout.full(1, 4),
            key_layout=SequenceLayout.full(1, length),
        )
        torch.testing.assert_close(mixed[row], alone[0], rtol=0, atol=1e-12)
    packed = favor(
        query,
        key[key_layout.is_token],
        value[key_layout.is_token],
        projection,
        layout,
        key_layout=packed_layout([5, 7]),
    )
    torch.testing.assert_close(packed, mixed, rtol=0, atol=1e-12)
    assert favor_map(query, key, projection, layout, key_layout=key_layout).shape == (2, HEADS, 4, 7)
    state = favor_memory(key, value, projection, key_layout)
    torch.testing.assert_close(favor_read(query[:, 1], state, projection), mixed[:, 1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_empty_sequences_give_no_nan(is_causal: bool) -> None:
    layout = SequenceLayout.padded(torch.tensor([[True, True, False], [False, False, False]]))
    for backend in ("linear", "reference"):
        tensors = inputs(2, 3)
        mixed = favor(*tensors, matrix(), layout, is_causal=is_causal, backend=backend)
        gradients = torch.autograd.grad(mixed.square().sum(), tensors)
        assert all(tensor.isfinite().all() for tensor in (mixed, *gradients)), backend


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_thirty_two_thousand_tokens_in_half_precision(dtype: torch.dtype, scale: float, is_causal: bool) -> None:
    """The plain sums of keys pass the largest float16 number long before."""
    length = 32_768
    query, key = (scale * torch.randn(1, length, 1, 16) for _ in range(2))
    value = 1 + 0.1 * torch.randn(1, length, 1, 16)
    layout, projection = SequenceLayout.full(1, length), draw(32, 16).float()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = favor(query.to(dtype), key.to(dtype), value.to(dtype), projection, layout, is_causal=is_causal)
    assert mixed.dtype == dtype
    assert mixed.isfinite().all()
    # an average of values that all lie near 1
    assert (mixed - 1).abs().max() < 0.7
    if scale == 0.01:
        assert (mixed[:, -1] - value[:, :].mean(1)).abs().max() < 0.01


def test_half_precision_accumulates_in_float32() -> None:
    query, key, value = (tensor.detach() for tensor in inputs(1, 300, dtype=torch.bfloat16))
    projection, layout = matrix(dtype=torch.float32), SequenceLayout.full(1, 300)
    for is_causal in (False, True):
        exact = favor(query.float(), key.float(), value.float(), projection, layout, is_causal=is_causal)
        for backend in ("linear", "reference"):
            with torch.autocast("cpu", torch.bfloat16):
                mixed = favor(query, key, value, projection, layout, is_causal=is_causal, backend=backend)
            torch.testing.assert_close(mixed.float(), exact, rtol=2**-8, atol=1e-6)


def test_what_cannot_be_is_said() -> None:
    tensors, layout, projection = inputs(1, 3), SequenceLayout.full(1, 3), matrix()
    with pytest.raises(InputError, match="kernel is 'softmx'; did you mean 'softmax'"):
        favor(*tensors, projection, layout, kernel="softmx")
    with pytest.raises(InputError, match="projection has 7 columns; allowed: the head width 8"):
        favor(*tensors, projection[:, :7], layout)
    with pytest.raises(InputError, match="the keys have a layout of their own"):
        favor(*tensors, projection, layout, key_layout=SequenceLayout.full(1, 3), is_causal=True)
    with pytest.raises(InputError, match="backend is 'linera'; did you mean 'linear'"):
        favor(*tensors, projection, layout, backend="linera")

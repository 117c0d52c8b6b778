"""FAVOR+: linear against quadratic and step-by-step computation, invariances, precision."""

import pytest
import torch
from cases import packed_layout, padded_layout
from torch import Tensor

from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.ops.favor import (
    FEATURE_MAPS,
    RandomFeatures,
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
# with negative features a row sum near 0 amplifies rounding beyond the tolerances of these tests
POSITIVE = sorted(FEATURE_MAPS.keys() - {"trigonometric", "gelu", "tanh", "cos", "identity"})


def inputs(*shape: int, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> list[Tensor]:
    tensors = [scale * torch.randn(*shape, HEADS, HEAD_WIDTH, dtype=dtype) for _ in range(3)]
    return [tensor.requires_grad_() for tensor in tensors]


def random_features(
    feature_map: str = "softmax", dtype: torch.dtype = torch.float64, epsilon: float | None = None
) -> RandomFeatures:
    matrix = draw(FEATURES, HEAD_WIDTH, has_constant_norms=FEATURE_MAPS[feature_map].has_constant_norms)
    return RandomFeatures(matrix.to(dtype), feature_map, epsilon)


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_reference_matches_the_formula(feature_map: str) -> None:
    """Compare with φ from the table of the paper, without a stabiliser."""
    query, key, value = (tensor[0, :, 0] for tensor in inputs(1, 5, scale=0.5))
    features = random_features(feature_map, epsilon=0.0)
    x, y = query / HEAD_WIDTH**0.25, key / HEAD_WIDTH**0.25
    small = {"softmax": -0.5, "regularised": -0.5, "hyperbolic": -0.5, "trigonometric": 0.5}

    def phi(vector: Tensor) -> Tensor:
        u, h = features.random_matrix @ vector, (small.get(feature_map, 0.0) * vector @ vector).exp()
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
        return h * curves.get(feature_map, torch.exp)(u)

    expected = []
    for i in range(5):
        weights = torch.stack([phi(x[i]) @ phi(y[j]) for j in range(5)])
        expected.append(sum(weights[j] * value[j] for j in range(5)) / weights.sum())
    layout = SequenceLayout.full(1, 5)
    mixed = favor(query[None, :, None], key[None, :, None], value[None, :, None], features, layout)
    torch.testing.assert_close(mixed[0, :, 0], torch.stack(expected), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("feature_map", ["softmax", "hyperbolic", "relu"])
def test_chunked_quadratic_and_stepwise_agree(feature_map: str, dtype: torch.dtype, tolerance: float) -> None:
    features = random_features(feature_map, dtype)
    for length in LENGTHS:
        query, key, value = (tensor.detach() for tensor in inputs(2, length, dtype=dtype))
        layout = SequenceLayout.full(2, length)
        expected = favor(query, key, value, features, layout, is_causal=True, backend="reference")
        for chunk in (1, 3, 16, 64):
            mixed = favor(query, key, value, features, layout, is_causal=True, chunk=chunk)
            torch.testing.assert_close(mixed, expected, rtol=0, atol=tolerance)
        state, steps = favor_start(2, HEADS, features), []
        for position in range(length):
            mixed, state = favor_step(query[:, position], key[:, position], value[:, position], state, features)
            steps.append(mixed)
        torch.testing.assert_close(torch.stack(steps, 1), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "feature_map",
    [
        "softmax",
        pytest.param("hyperbolic", marks=pytest.mark.slow),
        "trigonometric",
        pytest.param("elu", marks=pytest.mark.slow),
        "relu",
    ],
)
def test_gradcheck(feature_map: str, is_causal: bool) -> None:
    features, layout = random_features(feature_map), padded_layout([5, 3])

    def compute(*tensors: Tensor) -> Tensor:
        mixed = favor(*tensors, features, layout, is_causal=is_causal, chunk=2)
        return mixed[layout.is_token]

    assert torch.autograd.gradcheck(compute, inputs(2, 5, scale=0.5))


def test_only_inputs_and_output_are_saved_for_backward() -> None:
    length = 512
    tensors, features = inputs(1, length), random_features()
    for is_causal in (False, True):
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, into=sizes: (into.append(t.numel()), t)[1], lambda t: t
        ):
            favor(*tensors, features, SequenceLayout.full(1, length), is_causal=is_causal)
        # query, key, value, the output, and one row sum per head
        assert sum(sizes) <= length * HEADS * (4 * HEAD_WIDTH + 1) + features.random_matrix.numel()


@pytest.mark.parametrize("backend", ["linear", "reference"])
@pytest.mark.parametrize("feature_map", POSITIVE)
def test_causal_output_ignores_future_tokens(feature_map: str, backend: str) -> None:
    query, key, value = (tensor.detach() for tensor in inputs(1, 20))
    options = {"is_causal": True, "chunk": 6, "backend": backend}
    features, layout = random_features(feature_map), SequenceLayout.full(1, 20)
    before = favor(query, key, value, features, layout, **options)
    later = [torch.cat([tensor[:, :13], 5 * torch.randn_like(tensor[:, 13:])], 1) for tensor in (query, key, value)]
    after = favor(*later, features, layout, **options)
    assert torch.equal(before[:, :13], after[:, :13])
    assert not torch.equal(before[:, 13:], after[:, 13:])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("feature_map", POSITIVE)
def test_padding_is_ignored(feature_map: str, is_causal: bool) -> None:
    tensors = [tensor.detach() for tensor in inputs(1, 6)]
    features = random_features(feature_map)
    expected = favor(*tensors, features, SequenceLayout.full(1, 6), is_causal=is_causal)
    for filling in (0.0, 1e3):
        longer = [torch.cat([tensor, torch.full_like(tensor[:, :3], filling)], 1) for tensor in tensors]
        mixed = favor(*longer, features, padded_layout([6], extra=3), is_causal=is_causal, chunk=4)
        torch.testing.assert_close(mixed[:, :6], expected, rtol=0, atol=1e-13)
        assert mixed.isfinite().all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_constant_in_the_exponents_cancels(is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from bertsmith.ops.favor import features as module

    query, key, value = (tensor.detach() for tensor in inputs(1, 9))
    features, layout = random_features(), SequenceLayout.full(1, 9)
    plain = favor(query, key, value, features, layout, is_causal=is_causal)

    project = module.project

    def shifted_project(*arguments: object) -> module.Projected:
        projected = project(*arguments)
        return projected._replace(exponent=projected.exponent + 300.0)

    monkeypatch.setattr(module, "project", shifted_project)
    torch.testing.assert_close(
        favor(query, key, value, features, layout, is_causal=is_causal), plain, rtol=1e-11, atol=1e-11
    )


def test_keys_may_have_another_length() -> None:
    query, memory = inputs(2, 4)[0], inputs(2, 7)
    key, value = memory[1:]
    layout, key_layout, features = padded_layout([4, 2]), padded_layout([5, 7]), random_features()
    mixed = favor(query, key, value, features, layout, key_layout=key_layout)
    for row, length in enumerate([5, 7]):
        alone = favor(
            query[row : row + 1],
            key[row : row + 1, :length],
            value[row : row + 1, :length],
            features,
            SequenceLayout.full(1, 4),
            key_layout=SequenceLayout.full(1, length),
        )
        torch.testing.assert_close(mixed[row], alone[0], rtol=0, atol=1e-12)
    packed = favor(
        query,
        key[key_layout.is_token],
        value[key_layout.is_token],
        features,
        layout,
        key_layout=packed_layout([5, 7]),
    )
    torch.testing.assert_close(packed, mixed, rtol=0, atol=1e-12)
    assert favor_map(query, key, features, layout, key_layout=key_layout).shape == (2, HEADS, 4, 7)
    state = favor_memory(key, value, features, key_layout)
    torch.testing.assert_close(favor_read(query[:, 1], state, features), mixed[:, 1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_empty_sequences_give_no_nan(is_causal: bool) -> None:
    layout = SequenceLayout.padded(torch.tensor([[True, True, False], [False, False, False]]))
    for backend in ("linear", "reference"):
        tensors = inputs(2, 3)
        mixed = favor(*tensors, random_features(), layout, is_causal=is_causal, backend=backend)
        gradients = torch.autograd.grad(mixed.square().sum(), tensors)
        assert all(tensor.isfinite().all() for tensor in (mixed, *gradients)), backend


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_32k_tokens_in_half_precision_are_finite(dtype: torch.dtype, scale: float, is_causal: bool) -> None:
    """Unnormalised sums over this many keys would overflow float16."""
    length = 32_768
    query, key = (scale * torch.randn(1, length, 1, 16) for _ in range(2))
    value = 1 + 0.1 * torch.randn(1, length, 1, 16)
    layout, features = SequenceLayout.full(1, length), RandomFeatures(draw(32, 16).float())
    with torch.autocast("cpu", torch.bfloat16):
        mixed = favor(query.to(dtype), key.to(dtype), value.to(dtype), features, layout, is_causal=is_causal)
    assert mixed.dtype == dtype
    assert mixed.isfinite().all()
    # a mean of values near 1
    assert (mixed - 1).abs().max() < 0.7
    if scale == 0.01:
        assert (mixed[:, -1] - value[:, :].mean(1)).abs().max() < 0.01


def test_half_precision_accumulates_in_float32() -> None:
    query, key, value = (tensor.detach() for tensor in inputs(1, 300, dtype=torch.bfloat16))
    features, layout = random_features(dtype=torch.float32), SequenceLayout.full(1, 300)
    for is_causal in (False, True):
        exact = favor(query.float(), key.float(), value.float(), features, layout, is_causal=is_causal)
        for backend in ("linear", "reference"):
            with torch.autocast("cpu", torch.bfloat16):
                mixed = favor(query, key, value, features, layout, is_causal=is_causal, backend=backend)
            torch.testing.assert_close(mixed.float(), exact, rtol=2**-8, atol=1e-6)


def test_invalid_arguments_raise() -> None:
    tensors, layout, features = inputs(1, 3), SequenceLayout.full(1, 3), random_features()
    with pytest.raises(InputError, match="feature_map is 'softmx'; did you mean 'softmax'"):
        RandomFeatures(features.random_matrix, "softmx")
    narrow = RandomFeatures(features.random_matrix[:, :7])
    with pytest.raises(InputError, match="random_matrix has 7 columns; allowed: the head width 8"):
        favor(*tensors, narrow, layout)
    with pytest.raises(InputError, match="random_matrix has 7 columns; allowed: the head width 8"):
        favor_read(tensors[0][:, 0], favor_start(1, HEADS, features), narrow)
    with pytest.raises(InputError, match="chunk is 0; allowed: 1 or more"):
        favor(*tensors, features, layout, chunk=0)
    with pytest.raises(InputError, match="backend is 'linera'; did you mean 'linear'"):
        favor(*tensors, features, layout, backend="linera")

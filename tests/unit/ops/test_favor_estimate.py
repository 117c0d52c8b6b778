"""FAVOR+ as an estimator of exp(xᵀy) and of softmax attention: bias and variance by the number of features."""

import math

import pytest
import torch
from torch import Tensor

from bertsmith.data.layout import SequenceLayout
from bertsmith.ops.attention import attention
from bertsmith.ops.favor import FEATURE_MAPS, RandomFeatures, draw, favor, favor_map
from bertsmith.ops.favor.features import project, without_epsilon

HEAD_WIDTH = 16


def pair(norm: float = 0.8, head_width: int = HEAD_WIDTH) -> Tensor:
    """Return two random vectors of this norm."""
    vectors = torch.randn(2, head_width, dtype=torch.float64)
    return norm * vectors / vectors.norm(dim=-1, keepdim=True)


def estimates(feature_map: str, x: Tensor, y: Tensor, matrices: Tensor) -> Tensor:
    """Return the estimate of exp(xᵀy) for each matrix of (draws, features, head_width)."""
    rule, (draws, features, head_width) = FEATURE_MAPS[feature_map], matrices.shape
    rows = rule.widened(matrices.flatten(0, 1))
    # (copies · draws · features, …) -> (draws, copies · features, …)
    rows = rows.unflatten(0, (-1, draws, features)).transpose(0, 1).reshape(draws, -1, head_width)
    zero = torch.zeros((), dtype=torch.float64)
    left, right = (without_epsilon(project(vector.expand(draws, 1, -1), rows, rule), zero) for vector in (x, y))
    halves = 2 if feature_map == "hyperbolic" else 1  # h(x) = exp(−‖x‖²/2)/√2
    return (left * right).sum((-2, -1)) / (features * halves)


def orthogonal(draws: int, features: int, head_width: int = HEAD_WIDTH, feature_map: str = "softmax") -> Tensor:
    constant = FEATURE_MAPS[feature_map].has_constant_norms
    return torch.stack([draw(features, head_width, has_constant_norms=constant) for _ in range(draws)])


def independent(draws: int, features: int, head_width: int = HEAD_WIDTH) -> Tensor:
    return draw(draws * features, head_width, is_orthogonal=False).unflatten(0, (draws, features))


def square_error(values: Tensor, truth: Tensor) -> float:
    return (values - truth).square().mean().item()


@pytest.mark.parametrize("feature_map", ["softmax", "hyperbolic", "trigonometric"])
def test_softmax_estimates_are_unbiased(feature_map: str) -> None:
    for _ in range(3):
        x, y = pair()
        values = estimates(feature_map, x, y, orthogonal(2000, 24))
        error = (values.mean() - (x @ y).exp()) / (values.std() / 2000**0.5)
        assert abs(error) < 3


def test_regularised_estimate_is_biased_low() -> None:
    x, y = pair(1.0)
    values = estimates("regularised", x, y, orthogonal(2000, 24, feature_map="regularised"))
    error = (values.mean() - (x @ y).exp()) / (values.std() / 2000**0.5)
    assert error < -3
    assert square_error(values, (x @ y).exp()) < square_error(
        estimates("softmax", x, y, orthogonal(2000, 24)), (x @ y).exp()
    )


def test_variances_match_the_formulas() -> None:
    features, draws = 8, 40_000
    matrices = independent(draws, features)
    for _ in range(3):
        x, y = pair(0.6)
        truth = (x @ y).exp()
        far, near = (x + y).square().sum(), (x - y).square().sum()
        softmax = far.exp() * truth**2 * (1 - (-far).exp()) / features
        expected = {
            "softmax": softmax,
            "hyperbolic": 0.5 * (1 - (-far).exp()) * softmax,
            "trigonometric": far.exp() * truth**-2 * (1 - (-near).exp()) ** 2 / (2 * features),
        }
        for feature_map, formula in expected.items():
            measured = square_error(estimates(feature_map, x, y, matrices), truth)
            assert measured == pytest.approx(formula.item(), rel=0.06), feature_map


@pytest.mark.parametrize("features", [4, HEAD_WIDTH])
def test_orthogonal_features_have_lower_variance(features: int) -> None:
    draws = 8000
    for _ in range(2):
        x, y = pair(1.0)
        truth = (x @ y).exp()
        together = square_error(estimates("softmax", x, y, orthogonal(draws, features)), truth)
        apart = square_error(estimates("softmax", x, y, independent(draws, features)), truth)
        # the minimum gain of theorem 2, minus the error of the two measurements
        gain = 2 * (features - 1) / (features * (HEAD_WIDTH + 2)) * (truth - math.exp(-1)) ** 2
        assert together < apart - 0.5 * gain.item()


def test_hyperbolic_features_have_lower_variance_than_softmax() -> None:
    x, y = pair(1.0)
    truth = (x @ y).exp()
    matrices = independent(20_000, 16)
    assert square_error(estimates("hyperbolic", x, y, matrices[:, :8]), truth) < square_error(
        estimates("softmax", x, y, matrices), truth
    )


def test_output_error_decreases_with_the_root_of_the_features() -> None:
    length, head_width, counts = 256, 64, [256, 1024, 4096]
    layout = SequenceLayout.full(1, length)
    query, key = (0.5 * torch.randn(1, length, 1, head_width, dtype=torch.float64) for _ in range(2))
    value = torch.randn(1, length, 1, head_width, dtype=torch.float64)
    exact = attention(query, key, value, layout)
    errors = []
    for features in counts:
        squares = [
            (favor(query, key, value, RandomFeatures(draw(features, head_width)), layout) - exact).square().sum()
            for _ in range(6)
        ]
        errors.append((torch.stack(squares).mean() / exact.square().sum()).sqrt().log().item())
    slope = (errors[-1] - errors[0]) / math.log(counts[-1] / counts[0])
    assert -0.6 < slope < -0.4
    assert errors[-1] < math.log(0.2)


def test_map_estimates_the_probabilities() -> None:
    layout = SequenceLayout.full(1, 6)
    query, key = (0.3 * torch.randn(1, 6, 2, 8, dtype=torch.float64) for _ in range(2))
    exact = torch.einsum("bqhd,bkhd->bhqk", query, key).div(8**0.5).softmax(-1)
    estimate = favor_map(query, key, RandomFeatures(draw(20_000, 8)), layout)
    torch.testing.assert_close(estimate, exact, rtol=0.03, atol=0)


def test_random_matrix_has_orthogonal_blocks() -> None:
    matrix = draw(20, 8)
    for block in (matrix[:8], matrix[8:16], matrix[16:]):
        products = block @ block.T
        torch.testing.assert_close(products, products.diagonal().diag(), rtol=0, atol=1e-12)
    assert matrix.norm(dim=-1).std() > 0.1
    torch.testing.assert_close(
        draw(20, 8, has_constant_norms=True).norm(dim=-1), torch.full((20,), 8**0.5, dtype=torch.float64)
    )
    assert torch.equal(draw(0, 8), torch.eye(8, dtype=torch.float64))


def test_directions_are_uniform() -> None:
    """Without the sign correction, the first entry of QR would never be positive."""
    matrices = torch.stack([draw(4, 4) for _ in range(3000)])
    assert (matrices.mean(0).abs() < 4 / 3000**0.5).all()
    torch.testing.assert_close(
        matrices.square().mean(0), torch.ones(4, 4, dtype=torch.float64), rtol=0, atol=4 * 2**0.5 / 3000**0.5
    )


def test_same_seed_gives_the_same_matrix() -> None:
    first, second, other = (draw(9, 4, torch.Generator().manual_seed(seed)) for seed in (5, 5, 6))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)

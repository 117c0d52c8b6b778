"""Sparse attention weights against brute force over all supports, their gradients, limits and masks."""

from itertools import combinations

import pytest
import torch
from torch import Tensor

from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.ops.attention import BACKENDS, attention, attention_map
from bertsmith.ops.sparse import SparseMap, sparse_probabilities

ALPHAS = (1.1, 1.5, 1.7, 2.0)


def rows(*shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(1, 1, *shape, dtype=torch.float64)


def weights_of(scores: Tensor, alpha: float | Tensor, allowed: Tensor | None = None, scale: float = 1.0) -> Tensor:
    return sparse_probabilities(scores, allowed, SparseMap(alpha, scale))


def brute_force(scores: Tensor, alpha: float) -> Tensor:
    """Try every support: solve for τ on it, and return the weights that satisfy the optimality conditions."""
    levels = (alpha - 1) * scores
    for size in range(1, len(scores) + 1):
        for support in map(list, combinations(range(len(scores)), size)):
            low, high = float(levels[support].min()) - 1, float(levels[support].max())
            for _ in range(200):  # the sum falls in τ
                middle = (low + high) / 2
                total = (levels[support] - middle).clamp_min(0).pow(1 / (alpha - 1)).sum()
                low, high = (middle, high) if total > 1 else (low, middle)
            is_outside = torch.ones(len(scores), dtype=torch.bool)
            is_outside[support] = False
            if (levels[support] > low).all() and (levels[is_outside] <= low + 1e-12).all():
                found = torch.zeros_like(scores)
                found[support] = (levels[support] - low).pow(1 / (alpha - 1))
                return found
    raise AssertionError("no support is optimal")


@pytest.mark.parametrize("alpha", ALPHAS)
def test_weights_equal_brute_force(alpha: float) -> None:
    for size in range(1, 7):
        for scale in (0.3, 1.0, 4.0):
            scores = scale * torch.randn(size, dtype=torch.float64)
            found = weights_of(scores.view(1, 1, 1, -1), alpha).flatten()
            torch.testing.assert_close(found, brute_force(scores, alpha), rtol=0, atol=1e-9)


def test_sparsemax_is_the_nearest_distribution() -> None:
    scores = torch.randn(5, dtype=torch.float64)
    others = torch.distributions.Dirichlet(torch.full((5,), 0.3, dtype=torch.float64)).sample((20_000,))
    for sparsity in (-4.0, -1.0, 0.0, 0.5):  # SSAF: the objective ‖p − z‖² − λ‖p‖²
        found = weights_of(scores.view(1, 1, 1, -1), 2.0, scale=1 / (1 - sparsity)).flatten()
        cost = lambda p, share=sparsity: (p - scores).square().sum(-1) - share * p.square().sum(-1)  # noqa: E731
        assert cost(found) <= cost(others).min()


def test_limits_of_sparsity() -> None:
    scores = rows(3, 6)
    uniform = torch.full_like(scores, 1 / 6)
    torch.testing.assert_close(weights_of(scores, 2.0, scale=1e-9), uniform, rtol=0, atol=1e-8)
    one = weights_of(scores, 2.0, scale=1e9)
    assert torch.equal(one.argmax(-1), scores.argmax(-1))
    torch.testing.assert_close(one.amax(-1), torch.ones(1, 1, 3, dtype=torch.float64))
    torch.testing.assert_close(weights_of(scores, 1.0001), scores.softmax(-1), rtol=0, atol=1e-3)
    torch.testing.assert_close(weights_of(scores, 1.5 + 1e-9), weights_of(scores, 1.5), rtol=0, atol=1e-8)
    torch.testing.assert_close(weights_of(scores, 2 - 1e-9), weights_of(scores, 2.0), rtol=0, atol=1e-8)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_weights_are_distributions_and_ignore_shifts(alpha: float) -> None:
    scores = rows(20, 30, scale=3.0)
    found = weights_of(scores, alpha)
    assert (found >= 0).all()
    assert (found == 0).any()
    torch.testing.assert_close(found.sum(-1), torch.ones(1, 1, 20, dtype=torch.float64))
    torch.testing.assert_close(weights_of(scores + 100, alpha), found, rtol=0, atol=1e-10)
    # a key so far below the maximum has weight 0 exactly
    assert (found[scores <= scores.amax(-1, keepdim=True) - 1 / (alpha - 1)] == 0).all()


@pytest.mark.parametrize("alpha", ALPHAS)
def test_ties_get_equal_weights(alpha: float) -> None:
    scores = torch.tensor([0.3, 0.0, 0.3, 0.0, -9.0, 0.3], dtype=torch.float64).view(1, 1, 1, -1)
    found = weights_of(scores, alpha).flatten()
    assert found[0] == found[2] == found[5]
    assert found[1] == found[3]


@pytest.mark.parametrize("alpha", ALPHAS)
def test_masked_keys_do_not_matter(alpha: float) -> None:
    scores, allowed = rows(4, 6), torch.ones(1, 1, 4, 6, dtype=torch.bool)
    allowed[..., 4:], allowed[..., 3, :] = False, False
    scores[..., 5] = torch.tensor(float("nan"))
    scores[..., 4] = 1e30
    found = weights_of(scores, alpha, allowed)
    torch.testing.assert_close(found[..., :3, :4], weights_of(scores[..., :3, :4], alpha), rtol=0, atol=1e-12)
    assert (found[..., 4:] == 0).all()
    assert (found[..., 3, :] == 0).all()  # a query without any key


@pytest.mark.parametrize("alpha", ALPHAS)
def test_gradients_of_scores(alpha: float) -> None:
    scores, allowed = rows(3, 5).requires_grad_(), torch.rand(1, 1, 3, 5) < 0.7
    allowed[..., 0, :] = False
    assert torch.autograd.gradcheck(lambda z: weights_of(z, alpha, allowed), scores)
    assert torch.autograd.gradgradcheck(lambda z: weights_of(z, alpha, allowed), scores)


def test_gradients_of_alpha() -> None:
    scores = torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    alpha = torch.tensor([1.1, 1.5, 1.95], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(weights_of, (scores, alpha))
    assert torch.autograd.gradgradcheck(weights_of, (scores, alpha), atol=1e-4)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_half_precision_is_computed_in_float32(alpha: float) -> None:
    scores = rows(8, 64).bfloat16()
    found = weights_of(scores, alpha)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, weights_of(scores.float(), alpha).bfloat16())
    single = weights_of(scores.float(), alpha)
    torch.testing.assert_close(single.double(), weights_of(scores.double(), alpha), rtol=0, atol=2e-6)


def test_equal_scores_give_the_softmax() -> None:
    query, value = torch.zeros(2, 5, 3, 8, dtype=torch.float64), torch.randn(2, 5, 3, 8, dtype=torch.float64)
    layout = SequenceLayout.padded(torch.tensor([[True] * 5, [True] * 3 + [False] * 2]))
    dense = attention(query, query, value, layout)
    for alpha in ALPHAS:
        torch.testing.assert_close(attention(query, query, value, layout, sparse=SparseMap(alpha)), dense)


def test_fused_backends_refuse_and_auto_uses_another() -> None:
    tensors, layout = torch.randn(3, 2, 5, 3, 8), SequenceLayout.full(2, 5)
    for backend in ("short", "sdpa", "varlen"):
        with pytest.raises(InputError, match=f"backend '{backend}' cannot compute this: .*the kernel has softmax only"):
            attention(*tensors, layout, sparse=SparseMap(2.0), backend=backend)
    for dropout in (0.0, 0.1):
        assert attention(*tensors, layout, sparse=SparseMap(2.0), dropout=dropout).shape == (2, 5, 3, 8)
    assert set(BACKENDS) == {"short", "varlen", "grouped", "sdpa", "products", "reference"}


def test_grouped_backend_with_dropout_preserves_the_expectation() -> None:
    tensors, layout = torch.randn(3, 4, 6, 2, 8, dtype=torch.float64), SequenceLayout.full(4, 6)
    alpha = torch.tensor([1.2, 1.8], dtype=torch.float64)
    options = {"sparse": SparseMap(alpha), "is_causal": True}
    expected = attention(*tensors, layout, **options)
    drawn = torch.stack([attention(*tensors, layout, dropout=0.2, backend="grouped", **options) for _ in range(2000)])
    error = (drawn.mean(0) - expected).abs() / (drawn.std(0) / 2000**0.5 + 1e-9)
    assert error.mean() < 1.0
    assert drawn.std() > 0


def test_maps_have_exact_zeros() -> None:
    query, key = 3 * torch.randn(2, 7, 4, 8), torch.randn(2, 7, 4, 8)
    layout = SequenceLayout.full(2, 7)
    weights = attention_map(query, key, layout, sparse=SparseMap(2.0))
    assert (weights == 0).float().mean() > 0.2
    assert not (attention_map(query, key, layout) == 0).any()


@pytest.mark.slow
def test_sparse_weights_compile() -> None:
    torch.compiler.reset()
    scores, alpha = torch.randn(2, 3, 4, 5, requires_grad=True), torch.tensor([1.2, 1.5, 1.8], requires_grad=True)
    compiled = torch.compile(weights_of, fullgraph=True, backend="aot_eager")
    found, expected = compiled(scores, alpha), weights_of(scores, alpha)
    torch.testing.assert_close(found, expected)
    for own, other in zip(
        torch.autograd.grad(found.square().sum(), (scores, alpha)),
        torch.autograd.grad(expected.square().sum(), (scores, alpha)),
        strict=True,
    ):
        torch.testing.assert_close(own, other)

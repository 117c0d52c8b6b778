"""Cross-entropy over the vocabulary against plain PyTorch, sampling against the softmax, and compiled graphs."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from bertsmith.answers.sequences import IGNORED
from bertsmith.data.random import uniform
from bertsmith.ops.token_loss import Sampling, TokenLoss, fused, sample, token_loss

SIZES = [(33, 64), (300, 128), (1024, 64)]


def given(vocabulary: int, width: int, *, has_bias: bool = True, rows: int = 11) -> tuple[list[Tensor], Tensor]:
    """Return hidden states, table and, with `has_bias`, bias in float64, and targets, some of them IGNORED."""
    shapes = [(rows, width), (vocabulary, width), (vocabulary,)][: 3 if has_bias else 2]
    tensors = [(0.3 * torch.randn(shape, dtype=torch.float64)).requires_grad_() for shape in shapes]
    targets = torch.randint(0, vocabulary, (rows,))
    targets[[0, 4, rows - 1]] = IGNORED
    return tensors, targets


def loss_of(tensors: list[Tensor], targets: Tensor, backend: str = "chunked", smoothing: float = 0.0) -> TokenLoss:
    hidden, table, *bias = tensors
    return token_loss(hidden, table, bias[0] if bias else None, targets, smoothing=smoothing, backend=backend)


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("vocabulary", "width"), SIZES)
def test_loss_and_gradients_match_pytorch(
    vocabulary: int, width: int, has_bias: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fused.MAX_SCORES, "cpu", 4 * vocabulary)  # three chunks
    tensors, targets = given(vocabulary, width, has_bias=has_bias)
    scores = linear(*tensors)
    expected = cross_entropy(scores, targets, ignore_index=IGNORED, reduction="sum")
    found = loss_of(tensors, targets, backend)
    torch.testing.assert_close(found.loss, expected, rtol=1e-13, atol=0)
    assert found.hits == (scores.argmax(-1) == targets).sum()
    assert found.targets == len(targets) - 3
    gradients = (torch.autograd.grad(2.5 * loss, tensors) for loss in (found.loss, expected))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_label_smoothing_is_tensor2tensors(backend: str) -> None:
    tensors, targets = given(40, 16)
    logs = linear(*tensors).log_softmax(-1)
    wanted = torch.full_like(logs, 0.1 / 39).scatter(-1, targets.clamp(min=0)[:, None], 0.9)
    expected = -(wanted * logs)[targets != IGNORED].sum()
    found = loss_of(tensors, targets, backend, smoothing=0.1)
    torch.testing.assert_close(found.loss, expected)
    torch.testing.assert_close(found.nll, loss_of(tensors, targets, backend).loss.detach())
    gradients = (torch.autograd.grad(loss, tensors) for loss in (found.loss, expected))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_ignored_rows_alone_give_zeros(backend: str) -> None:
    tensors, targets = given(40, 16)
    found = loss_of(tensors, torch.full_like(targets, IGNORED), backend)
    assert [value.item() for value in (found.loss.detach(), found.nll, found.hits, found.targets)] == [0.0] * 4
    assert not any(gradient.any() for gradient in torch.autograd.grad(found.loss, tensors))


def test_first_of_equal_scores_is_the_highest() -> None:
    hidden, table = torch.ones(2, 4), torch.ones(5, 4)
    for backend in ("chunked", "reference"):
        assert token_loss(hidden, table, None, torch.tensor([0, 3]), backend=backend).hits == 1


def test_autocast_computes_products_in_its_dtype_and_returns_gradients_in_the_weights() -> None:
    tensors, targets = given(300, 128)
    wide = [tensor.detach().float().requires_grad_() for tensor in tensors]
    with torch.autocast("cpu", torch.bfloat16):
        found = loss_of(wide, targets)
    expected = loss_of(tensors, targets)
    assert found.loss.dtype == torch.float32
    torch.testing.assert_close(found.loss.double(), expected.loss, rtol=1e-3, atol=0)
    gradients = torch.autograd.grad(found.loss, wide)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected.loss, tensors), strict=True):
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() < 0.02 * theirs.norm()


def test_evaluation_computes_no_gradients() -> None:
    tensors, targets = given(40, 16)
    expected = loss_of(tensors, targets).loss.detach()
    with torch.no_grad():
        found = loss_of(tensors, targets)
    assert torch.equal(found.loss, expected)
    assert not found.loss.requires_grad


def test_second_derivatives_raise() -> None:
    tensors, targets = given(40, 16)
    gradients = torch.autograd.grad(loss_of(tensors, targets).loss, tensors, create_graph=True)
    with pytest.raises(RuntimeError, match="token_loss_backward"):
        gradients[0].sum().backward()
    gradients = torch.autograd.grad(loss_of(tensors, targets, "reference").loss, tensors, create_graph=True)
    assert torch.autograd.grad(gradients[0].square().sum(), tensors[0])[0].any()


@pytest.mark.parametrize("has_bias", [True, False])
def test_op_compiles_as_one_graph(has_bias: bool) -> None:
    tensors, targets = given(40, 16, has_bias=has_bias)
    draw = torch.rand(len(targets))

    def compute(tensors: list[Tensor], targets: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        hidden, table, *bias = tensors
        sampling = Sampling(draw, 1.0, 38)
        found = token_loss(hidden * 2, table, bias[0] if bias else None, targets, smoothing=0.1, sampling=sampling)
        return found.loss, found.hits, found.samples

    compiled = torch.compile(compute, fullgraph=True, backend="aot_eager")
    results = []
    for form in (compute, compiled):
        loss, hits, samples = form(tensors, targets)
        results.append([loss.detach(), hits, samples, *torch.autograd.grad(loss, tensors)])
    for plain, graph in zip(*results, strict=True):
        torch.testing.assert_close(graph, plain)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("needs_gradients", [True, False])
def test_op_is_registered_consistently(has_bias: bool, needs_gradients: bool) -> None:
    (hidden, table, *bias), targets = given(40, 16, has_bias=has_bias)
    tensors = [tensor.detach().requires_grad_(needs_gradients) for tensor in (hidden, table, *bias)]
    arguments = (*tensors[:2], tensors[2] if has_bias else None, targets, torch.rand(len(targets)))
    checks = ("test_schema", "test_faketensor")
    for smoothing in (0.0, 0.1):
        settings = (38, 1.0, smoothing, torch.float64, False, needs_gradients)
        torch.library.opcheck(torch.ops.bertsmith.token_loss, (*arguments, *settings), test_utils=checks)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_samples_follow_the_softmax(temperature: float, backend: str) -> None:
    scores = torch.tensor([0.3, -1.0, 2.0, -math.inf, 0.0, 1.1, -2.0, 9.0])  # the last entry may not be sampled
    draws, vocabulary = 50_000, 7
    sampling = Sampling(uniform(17, torch.arange(draws)), temperature, vocabulary)
    hidden, table, targets = torch.zeros(draws, 1), torch.zeros(8, 1), torch.zeros(draws, dtype=torch.int64)
    samples = token_loss(hidden, table, scores, targets, sampling=sampling, backend=backend).samples
    assert samples is not None
    expected = draws * (scores[:vocabulary] / temperature).softmax(-1)
    counts = torch.bincount(samples, minlength=vocabulary)
    assert len(counts) == vocabulary
    assert counts[3] == 0
    possible = expected > 0
    spread = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert spread < 20.5  # χ² with 5 degrees of freedom, p = 0.001


def test_samples_do_not_depend_on_the_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    (hidden, table, bias), targets = given(300, 16, rows=20)
    draw = torch.rand(20)
    whole = token_loss(hidden, table, bias, targets, sampling=Sampling(draw, 1.0, 300)).samples
    monkeypatch.setitem(fused.MAX_SCORES, "cpu", 3 * 300)
    order = torch.randperm(20)
    other = token_loss(hidden[order], table, bias, targets[order], sampling=Sampling(draw[order], 1.0, 300)).samples
    assert whole is not None
    assert other is not None
    assert torch.equal(whole[order], other)


def test_extreme_draws_give_valid_tokens() -> None:
    scores = torch.tensor([[-math.inf, 0.0, 0.0, -math.inf]]).expand(2, -1)
    assert sample(scores, torch.tensor([0.0, 1 - 2.0**-24]), 1.0).tolist() == [1, 2]
    wide = torch.randn(64, 30522, generator=torch.Generator().manual_seed(0))
    assert bool((sample(wide, torch.full((64,), 1 - 2.0**-24), 1.0) > 30400).all())
    assert sample(wide, torch.zeros(64), 1.0).tolist() == [0] * 64

"""The kernel of the cross-entropy over the vocabulary against the reference in float64."""

import pytest
import torch
from helpers_gpu import no_synchronisation
from helpers_kernels import DEVICE, assert_close_to_truth, needs_triton
from torch import Tensor

from bertsmith.answers.sequences import IGNORED
from bertsmith.data.random import uniform
from bertsmith.ops.dispatch import choose
from bertsmith.ops.token_loss import BACKENDS, Sampling, fused, token_loss
from bertsmith.ops.token_loss.reference import TokenLossInputs

pytestmark = needs_triton
VOCABULARIES = [30522, 24576, 33, 64, 4097]
WIDTHS = [64, 128, 768, 1024]


def numbers(*shape: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, dtype=torch.float64)).to(DEVICE)


def compare(
    rows: int, vocabulary: int, width: int, dtype: torch.dtype, *, smoothing: float = 0.0, has_bias: bool = True
) -> None:
    """Compare loss and gradients; scores have a standard deviation of 2."""
    tensors = [numbers(rows, width), numbers(vocabulary, width, scale=2 * width**-0.5)]
    tensors += [numbers(vocabulary)] if has_bias else []
    targets = torch.randint(0, vocabulary, (rows,), device=DEVICE)
    targets[::3] = IGNORED

    def op(hidden: Tensor, table: Tensor, bias: Tensor | None = None, *, backend: str) -> Tensor:
        return token_loss(hidden, table, bias, targets, smoothing=smoothing, backend=backend).loss.to(hidden.dtype)

    # gradients are rounded once, where the reference rounds them after it added up; the interpreter truncates
    assert_close_to_truth(op, tensors, dtype, room=4.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("vocabulary", "smoothing", "has_bias"), [(33, 0.1, False), (300, 0.0, True), (64, 0.1, True)])
def test_loss_and_gradients_equal_the_reference(
    vocabulary: int, smoothing: float, has_bias: bool, dtype: torch.dtype
) -> None:
    compare(7, vocabulary, 64, dtype, smoothing=smoothing, has_bias=has_bias)


def test_rows_longer_than_a_tile_and_chunks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "MAX_SCORES", dict.fromkeys(fused.MAX_SCORES, 3 * 9024))
    compare(8, 9001, 32, torch.float32, smoothing=0.1)


def test_hits_and_ignored_rows() -> None:
    hidden, table = torch.ones(4, 64, device=DEVICE), torch.ones(70, 64, device=DEVICE)
    bias = torch.zeros(70, device=DEVICE)
    bias[[5, 9]] = 1.0  # of equal scores the first is the highest
    targets = torch.tensor([5, 9, 0, IGNORED], device=DEVICE)
    found = token_loss(hidden, table, bias, targets, backend="triton")
    assert [found.hits.item(), found.targets.item()] == [1.0, 3.0]
    leaf = table.clone().requires_grad_()
    nothing = token_loss(hidden, leaf, bias, torch.full_like(targets, IGNORED), backend="triton")
    assert nothing.loss.item() == nothing.targets.item() == 0.0
    assert not torch.autograd.grad(nothing.loss, leaf)[0].any()


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_samples_equal_the_reference_and_skip_entries_beyond_the_vocabulary(temperature: float) -> None:
    rows, vocabulary = 60, 5000
    hidden, table = numbers(rows, 16).float(), numbers(vocabulary, 16, scale=0.5).float()
    bias = torch.zeros(vocabulary, device=DEVICE)
    bias[4900:] = 50.0  # would be sampled if they were allowed
    targets = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    draw = torch.cat([uniform(3, torch.arange(rows - 2)), torch.tensor([0.0, 1 - 2.0**-24])]).to(DEVICE)
    found = [
        token_loss(hidden, table, bias, targets, sampling=Sampling(draw, temperature, 4900), backend=backend).samples
        for backend in ("triton", "reference")
    ]
    assert found[0] is not None
    assert int(found[0].max()) < 4900
    # draws at the edge of an interval may round to its neighbour
    assert (found[0] != found[1]).sum() <= 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_every_size_on_a_gpu(vocabulary: int, width: int, dtype: torch.dtype) -> None:
    compare(1000, vocabulary, width, dtype)
    compare(77, vocabulary, width, dtype, smoothing=0.1, has_bias=False)


@pytest.mark.gpu
def test_samples_follow_the_softmax_on_a_gpu() -> None:
    rows, vocabulary = 400_000, 200
    bias = 2 * torch.randn(256, device="cuda")
    sampling = Sampling(uniform(5, torch.arange(rows)).cuda(), 0.7, vocabulary)
    zeros = torch.zeros(rows, 8, device="cuda"), torch.zeros(256, 8, device="cuda")
    targets = torch.zeros(rows, dtype=torch.int64, device="cuda")
    found = token_loss(*zeros, bias, targets, sampling=sampling, backend="triton").samples
    assert found is not None
    expected = rows * (bias[:vocabulary].double() / 0.7).softmax(-1)
    counts = torch.bincount(found, minlength=vocabulary)
    assert len(counts) == vocabulary
    is_frequent = expected >= 5
    spread = ((counts - expected)[is_frequent] ** 2 / expected[is_frequent]).sum().item()
    freedom = int(is_frequent.sum())
    assert spread < freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.gpu
def test_auto_uses_the_kernel_on_a_gpu_without_synchronising() -> None:
    hidden = torch.randn(500, 128, device="cuda", requires_grad=True)
    table = torch.randn(30522, 128, device="cuda", requires_grad=True)
    bias, targets = torch.zeros(30522, device="cuda"), torch.randint(0, 30522, (500,), device="cuda")
    inputs = TokenLossInputs(hidden, table, bias, targets)
    assert choose(BACKENDS, "auto", inputs) is BACKENDS["triton"]
    sampling = Sampling(torch.rand(500, device="cuda"), 1.0, 30522)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = token_loss(hidden, table, bias, targets, sampling=sampling).loss
        torch.autograd.grad(loss / 500, [hidden, table])

    step()
    with no_synchronisation():
        step()


@pytest.mark.gpu
def test_memory_is_bounded_by_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "MAX_SCORES", dict.fromkeys(fused.MAX_SCORES, 2**26))
    hidden = torch.randn(20_000, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    table = torch.randn(30522, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 30522, (20_000,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(token_loss(hidden, table, None, targets).loss, [hidden, table])
    assert torch.cuda.max_memory_allocated() - before < 2 * 2**26 + 6 * table.numel() * 4


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_graphs_on_a_gpu(mode: str) -> None:
    hidden, table = numbers(300, 128).float().requires_grad_(), numbers(30522, 128, scale=0.1).float().requires_grad_()
    bias, targets = numbers(30522).float().requires_grad_(), torch.randint(0, 30522, (300,), device="cuda")
    sampling = Sampling(torch.rand(300, device="cuda"), 1.0, 30522)

    def compute(hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        with torch.autocast("cuda", torch.bfloat16):
            found = token_loss(hidden, table, bias, targets, sampling=sampling)
        return found.loss, found.samples

    compiled = torch.compile(compute, fullgraph=True, mode=mode)
    for _ in range(3):
        results = []
        for form in (compute, compiled):
            loss, samples = form(hidden)
            gradients = torch.autograd.grad(loss, [hidden, table, bias])
            results.append([loss.detach().clone(), samples.clone(), *(gradient.clone() for gradient in gradients)])
        for plain, graph in zip(*results, strict=True):
            torch.testing.assert_close(graph, plain)

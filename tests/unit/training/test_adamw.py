"""AdamW without bias correction and StableAdamW against plain loops in float64; their checkpoints."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import bertsmith
from bertsmith.objectives.base import Portion
from bertsmith.training.checkpoint import Progress, RunConditions, load_checkpoint, save_checkpoint
from bertsmith.training.optimizer import Adam, OptimizerConfig

RATES = [1e-2 * min(1, (step + 1) / 10) * (1 - step / 60) for step in range(50)]


def gradients(shape: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(shape))
    found = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(50)]
    found[30] *= 20  # a jump, which StableAdamW clips
    return found


def plain_loop(weight: Tensor, decay: float, *, config: OptimizerConfig) -> Tensor:
    """The formulas, one line each: Devlin et al.'s code without correction, Wortsman et al. 2023 for StableAdamW."""
    (first, second), moment, square = config.betas, torch.zeros_like(weight), torch.zeros_like(weight)
    for step, (gradient, rate) in enumerate(zip(gradients(tuple(weight.shape)), RATES, strict=True), start=1):
        moment = first * moment + (1 - first) * gradient
        square = second * square + (1 - second) * gradient**2
        mean, spread = moment, square
        if config.bias_correction:
            mean, spread = moment / (1 - first**step), square / (1 - second**step)
        if config.kind == "stable_adamw":
            ratio = (gradient**2 / spread.clamp(min=config.epsilon**2)).mean().sqrt()
            rate = rate / max(1.0, ratio.item())
        weight = weight - rate * (mean / (spread.sqrt() + config.epsilon) + decay * weight)
    return weight


@pytest.mark.parametrize("kind", ["adamw", "stable_adamw"])
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.98)])
def test_optimizer_equals_plain_loop(kind: str, bias_correction: bool, betas: tuple[float, float]) -> None:
    config = OptimizerConfig(
        kind=kind, bias_correction=bias_correction, betas=betas, weight_decay=0.1, epsilon=1e-3, clip=0
    )
    starts = [torch.randn(shape, dtype=torch.float64) for shape in ((3, 4), (5,))]
    weights = [torch.nn.Parameter(start.clone()) for start in starts]
    optimizer = config.build([Portion.of(tuple(weights))])
    for step, rate in enumerate(RATES):
        for weight in weights:
            weight.grad = gradients(tuple(weight.shape))[step].clone()
        config.set_rate(optimizer, rate)
        optimizer.step()
        assert optimizer.param_groups[0]["lr"] == rate
    for start, weight, decay in zip(starts, weights, (0.1, 0.0), strict=True):
        expected = plain_loop(start, decay, config=config)
        assert (weight - expected).abs().max() < 1e-12
        assert (weight - start).abs().max() > 0.01


def test_stable_adamw_equals_adamw_for_falling_gradients() -> None:
    """With r < 1 the update is not scaled; after a jump, it is scaled to nearly nothing."""
    start, gradient = torch.randn(7, 5, dtype=torch.float64), torch.randn(7, 5, dtype=torch.float64)
    for sizes, is_same in (((1.0, 0.5, 0.2), True), ((0.2, 0.2, 500.0), False)):
        weights = []
        for kind in ("adamw", "stable_adamw"):
            config = OptimizerConfig(kind=kind)
            weight = torch.nn.Parameter(start.clone())
            optimizer = config.build([Portion.of((weight,))])
            for size in sizes:
                weight.grad = gradient * size
                optimizer.step()
            weights.append(weight.detach())
        assert torch.allclose(*weights, rtol=0, atol=1e-15) == is_same


def test_plain_settings_build_pytorch_adamw() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    assert type(OptimizerConfig().build([Portion.of((weight,))])) is torch.optim.AdamW
    assert isinstance(OptimizerConfig(bias_correction=False).build([Portion.of((weight,))]), Adam)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["adamw", "stable_adamw"])
def test_fused_optimizer_equals_plain_loop(kind: str) -> None:
    config = OptimizerConfig(kind=kind, bias_correction=False, betas=(0.9, 0.999), weight_decay=0.1, epsilon=1e-3)
    start = torch.randn(3, 4, dtype=torch.float64)
    weight = torch.nn.Parameter(start.cuda())
    optimizer = config.build([Portion.of((weight,))])
    assert optimizer.param_groups[0]["fused"]
    for step, rate in enumerate(RATES):
        weight.grad = gradients((3, 4))[step].cuda()
        config.set_rate(optimizer, rate)
        optimizer.step()
    assert (weight.cpu() - plain_loop(start, 0.1, config=config)).abs().max() < 1e-12


@pytest.mark.parametrize("kind", ["adamw", "stable_adamw"])
def test_optimizer_resumes_from_checkpoint(kind: str, tmp_path: Path) -> None:
    """Ten steps equal five steps, a checkpoint, and five steps of a restored optimiser."""
    config = OptimizerConfig(kind=kind, bias_correction=False)

    def fresh() -> tuple[bertsmith.Model, torch.optim.Optimizer]:
        network = bertsmith.preset("electra-small", layers=1, width=16, heads=2, embedding_width=8, vocabulary=40)
        model = bertsmith.build(network, seed=0)
        return model, config.build([Portion.of(tuple(model.parameters()))])

    def train(model: bertsmith.Model, optimizer: torch.optim.Optimizer, begin: int, end: int) -> None:
        for step in range(begin, end):
            torch.manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            config.set_rate(optimizer, 1e-2)
            optimizer.step()

    uninterrupted, optimizer = fresh()
    train(uninterrupted, optimizer, 0, 10)
    first, optimizer = fresh()
    train(first, optimizer, 0, 5)
    path = save_checkpoint(tmp_path, first, optimizer, Progress(step=5), RunConditions("same"))
    second, optimizer = fresh()
    load_checkpoint(path, second, optimizer, RunConditions("same"))
    assert {group["steps"] for group in optimizer.param_groups} == {5}
    train(second, optimizer, 5, 10)
    for name, parameter in uninterrupted.named_parameters():
        assert parameter.equal(second.get_parameter(name)), name

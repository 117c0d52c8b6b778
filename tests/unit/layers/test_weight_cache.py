"""Projections of a relative table are cached in eval mode and invalidated when weights change."""

import copy
from collections.abc import Callable, Iterator
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import bertsmith
from bertsmith import Subnet
from bertsmith.layers.mixers.disentangled import DisentangledAttention
from bertsmith.models.model import Model

SIZE = {"width": 12, "layers": 2, "heads": 2, "vocabulary": 40, "max_length": 16, "init_std": 0.4}
TOKENS = torch.arange(20).view(2, 10)


@pytest.fixture
def count() -> Iterator[Callable[[], int]]:
    """A function that returns how often positions were projected since its last call."""
    project = DisentangledAttention._project_positions
    with patch.object(DisentangledAttention, "_project_positions", autospec=True, side_effect=project) as spy:

        def since() -> int:
            calls = spy.call_count
            spy.reset_mock()
            return calls

        yield since


def make(name: str = "deberta-v3-base") -> Model:
    return bertsmith.build(bertsmith.preset(name, **SIZE), seed=0).eval()


def uncached(model: Model, **options: object) -> Tensor:
    """Return the output of a copy of the model, whose cache is empty."""
    with torch.no_grad():
        return copy.deepcopy(model)(TOKENS, **options)


@pytest.mark.parametrize("name", ["deberta-base", "deberta-v3-base"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_cache_is_used_in_eval_mode(name: str, mode: Callable, count: Callable[[], int]) -> None:
    model = make(name)
    expected = uncached(model)
    assert count() == 2
    with mode():
        for calls in (2, 0, 0):
            assert torch.equal(model(TOKENS), expected)
            assert count() == calls
        model.eval()
        model(TOKENS)
        assert count() == 0


@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("second", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_cache_works_across_grad_modes(first: Callable, second: Callable) -> None:
    model = make()
    expected = uncached(model)
    for mode in (first, second):
        with mode():  # with gradients another kernel is used
            torch.testing.assert_close(model(TOKENS), expected, rtol=0, atol=1e-5)
    model(TOKENS).sum().backward()
    assert model.encoder.relative.table.grad.abs().sum() > 0


def changes(model: Model) -> dict[str, Callable[[], object]]:
    mixer, relative = model.encoder.blocks[1].mixer, model.encoder.relative
    other = make()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step() -> None:
        model(TOKENS).square().sum().backward()
        optimizer.step()

    def through_data() -> None:
        model.train()
        mixer.project.weight.data.add_(0.1)
        model.eval()

    def swap() -> None:
        for _ in range(3):  # the third may reuse the address of the first
            mixer.project.weight.data = torch.randn_like(mixer.project.weight)

    return {
        "projection": lambda: mixer.project.weight.mul_(1.5),
        "bias": lambda: mixer.project.bias.add_(torch.arange(36) / 36),
        "table": lambda: relative.table.add_(torch.randn_like(relative.table)),
        "norm": lambda: relative.norm.weight.mul_(torch.arange(12)),
        "load": lambda: model.load_state_dict(other.state_dict()),
        "optimizer": torch.enable_grad()(step),
        "reorder": lambda: mixer.reorder(torch.tensor([1, 0])),
        "through data": through_data,
        "swap": swap,
        "another parameter": lambda: setattr(mixer.project, "weight", torch.nn.Parameter(torch.randn(36, 12))),
    }


@pytest.mark.parametrize("name", changes(make()))
def test_cache_is_invalidated_by_changes(name: str) -> None:
    model = make()
    with torch.no_grad():
        before = model(TOKENS)
        changes(model)[name]()
        after = model(TOKENS)
        assert torch.equal(after, uncached(model))
        assert name == "reorder" or not torch.equal(after, before)


def test_cache_separates_cuts_dtypes_and_copies(count: Callable[[], int]) -> None:
    model = make()
    half = Subnet(width=0.5)
    with torch.no_grad():
        whole, small = uncached(model), uncached(model, subnet=half)
        assert torch.equal(model(TOKENS), whole)
        assert torch.equal(model(TOKENS, subnet=half), small)
        assert torch.equal(model(TOKENS), whole)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rough = model(TOKENS)
        assert rough.dtype == torch.bfloat16
        assert torch.equal(model(TOKENS), whole)
        copied = copy.deepcopy(model)
        count()
        assert torch.equal(copied(TOKENS), whole)
        assert count() == 2
        double = model.double()(TOKENS)
        assert double.dtype == torch.float64
        torch.testing.assert_close(double.float(), whole, rtol=0, atol=1e-5)


def test_cache_is_not_used_in_training(count: Callable[[], int]) -> None:
    model = make().train()
    with torch.no_grad():
        first, second = model(TOKENS), model(TOKENS)
    assert count() == 4
    assert not torch.equal(first, second)

"""Matrices laid out for inference: the same products, made anew when weights change, and never for training."""

import copy

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from bertsmith.layers.elementwise import ACTIVATIONS
from bertsmith.layers.linear import ElasticLinear, WeightSlice

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch was built without oneDNN")


@pytest.fixture
def layer() -> ElasticLinear:
    made = ElasticLinear(160, 192, units_out=4)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made.eval()


def is_laid_out(layer: ElasticLinear) -> bool:
    return layer.packed._entry is not None


def plain(layer: ElasticLinear, hidden: Tensor) -> Tensor:
    return linear(hidden, layer.weight, layer.bias)


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (2, 64), (0,)])
@torch.no_grad()
def test_products_are_the_same(layer: ElasticLinear, shape: tuple[int, ...]) -> None:
    hidden = torch.randn(*shape, 2, 160)[..., 0, :]  # strided
    torch.testing.assert_close(layer(hidden), plain(layer, hidden), rtol=1e-5, atol=1e-4)
    assert is_laid_out(layer) == (0 not in shape)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@torch.no_grad()
def test_activations_are_the_same(layer: ElasticLinear, activation: str) -> None:
    hidden = torch.randn(9, 160) / 12
    expected = ACTIVATIONS[activation](plain(layer, hidden))
    torch.testing.assert_close(layer.activated(hidden, activation), expected, rtol=1e-5, atol=1e-5)
    assert is_laid_out(layer)
    part = ACTIVATIONS[activation](linear(hidden, layer.weight[:96], layer.bias[:96]))
    torch.testing.assert_close(layer.activated(hidden, activation, keep_out=2), part, rtol=1e-5, atol=1e-5)


def test_changed_weights_are_laid_out_anew(layer: ElasticLinear) -> None:
    hidden = torch.randn(4, 160)
    with torch.no_grad():
        layer(hidden)
        layer.weight.mul_(2)
        torch.testing.assert_close(layer(hidden), plain(layer, hidden), rtol=1e-5, atol=1e-4)
        layer.load_state_dict({name: torch.randn_like(tensor) for name, tensor in layer.state_dict().items()})
        torch.testing.assert_close(layer(hidden), plain(layer, hidden), rtol=1e-5, atol=1e-4)
        twin = copy.deepcopy(layer)
        twin.weight.zero_()
        torch.testing.assert_close(twin(hidden), layer.bias.expand(4, -1))
        torch.testing.assert_close(layer(hidden), plain(layer, hidden), rtol=1e-5, atol=1e-4)


def test_nothing_is_laid_out_for_training_or_small_matrices(layer: ElasticLinear) -> None:
    hidden = torch.randn(4, 160)
    layer(hidden)
    assert not is_laid_out(layer)  # gradients may be asked for
    with torch.no_grad():
        layer.train()(hidden)
        assert not is_laid_out(layer)
        layer.eval()(hidden, WeightSlice(keep_out=2))
        assert not is_laid_out(layer)
        layer(hidden)
        assert is_laid_out(layer)
        assert not is_laid_out(layer.train())
        small = ElasticLinear(8, 8).eval()
        torch.nn.init.zeros_(small.weight)
        torch.nn.init.zeros_(small.bias)
        small(torch.randn(2, 8))
        assert not is_laid_out(small)
        double = copy.deepcopy(layer).eval().double()
        double(hidden.double())
        assert not is_laid_out(double)


def test_it_is_no_part_of_the_weights(layer: ElasticLinear) -> None:
    with torch.no_grad():
        layer(torch.randn(4, 160))
    assert set(layer.state_dict()) == {"weight", "bias"}

"""Packed weight matrices for inference: equal products, repacked when weights change, never used in training."""

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
    layer = ElasticLinear(160, 192, units_out=4)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer.eval()


def is_packed(layer: ElasticLinear) -> bool:
    return layer.packed._entry is not None


def plain(layer: ElasticLinear, hidden: Tensor) -> Tensor:
    return linear(hidden, layer.weight, layer.bias)


@pytest.mark.parametrize(("shape", "packs"), [((0,), False), ((1,), False), ((18,), True), ((3, 7), True)])
@torch.no_grad()
def test_packed_products_equal_plain_products(layer: ElasticLinear, shape: tuple[int, ...], packs: bool) -> None:
    hidden = torch.randn(*shape, 2, 160)[..., 0, :]  # strided
    torch.testing.assert_close(layer(hidden), plain(layer, hidden), rtol=1e-5, atol=1e-4)
    assert is_packed(layer) == packs


@pytest.mark.parametrize("activation", ACTIVATIONS)
@torch.no_grad()
def test_fused_activations_equal_plain_activations(layer: ElasticLinear, activation: str) -> None:
    hidden = torch.randn(18, 160) / 12
    expected = ACTIVATIONS[activation](plain(layer, hidden))
    torch.testing.assert_close(layer.activated(hidden, activation), expected, rtol=1e-5, atol=1e-5)
    assert is_packed(layer)
    part = ACTIVATIONS[activation](linear(hidden, layer.weight[:96], layer.bias[:96]))
    torch.testing.assert_close(layer.activated(hidden, activation, keep_out=2), part, rtol=1e-5, atol=1e-5)


def test_changed_weights_are_packed_again(layer: ElasticLinear) -> None:
    hidden = torch.randn(18, 160)
    with torch.no_grad():
        layer(hidden)
        layer.weight.mul_(2)
        torch.testing.assert_close(layer(hidden), plain(layer, hidden), rtol=1e-5, atol=1e-4)
        layer.load_state_dict({name: torch.randn_like(tensor) for name, tensor in layer.state_dict().items()})
        torch.testing.assert_close(layer(hidden), plain(layer, hidden), rtol=1e-5, atol=1e-4)
        copied = copy.deepcopy(layer)
        copied.weight.zero_()
        torch.testing.assert_close(copied(hidden), layer.bias.expand(18, -1))
        torch.testing.assert_close(layer(hidden), plain(layer, hidden), rtol=1e-5, atol=1e-4)


def test_no_packing_for_training_or_small_matrices(layer: ElasticLinear) -> None:
    hidden = torch.randn(18, 160)
    layer(hidden)
    assert not is_packed(layer)  # gradients are enabled
    with torch.no_grad():
        layer.train()(hidden)
        assert not is_packed(layer)
        layer.eval()(hidden, WeightSlice(keep_out=2))
        assert not is_packed(layer)
        layer(hidden)
        assert is_packed(layer)
        assert not is_packed(layer.train())
        small = ElasticLinear(8, 8).eval()
        torch.nn.init.zeros_(small.weight)
        torch.nn.init.zeros_(small.bias)
        small(torch.randn(2, 8))
        assert not is_packed(small)
        double = copy.deepcopy(layer).eval().double()
        double(hidden.double())
        assert not is_packed(double)


def test_packed_matrix_is_not_in_the_state_dict(layer: ElasticLinear) -> None:
    with torch.no_grad():
        layer(torch.randn(4, 160))
    assert set(layer.state_dict()) == {"weight", "bias"}


@pytest.mark.parametrize("keep", [None, 2])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu"])
def test_bias_in_the_activation_op_changes_nothing(
    layer: ElasticLinear, activation: str, keep: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, parameters = torch.randn(5, 160), list(layer.train().parameters())
    expected = layer.activated(hidden, activation, keep_out=keep)
    monkeypatch.setattr("bertsmith.layers.linear.is_faster", lambda *_: True)  # as on a GPU
    actual = layer.activated(hidden, activation, keep_out=keep)
    torch.testing.assert_close(actual, expected)
    gradients = [torch.autograd.grad(output.square().sum(), parameters) for output in (actual, expected)]
    torch.testing.assert_close(*gradients)

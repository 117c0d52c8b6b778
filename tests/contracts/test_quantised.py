"""Contract of quantised encoders, for one preset of each family."""

from pathlib import Path

import pytest
import torch
from cases import FAMILIES, padded_layout, tiny_model

import bertsmith
from bertsmith import Subnet
from bertsmith.layers.quantised import QuantisationConfig
from bertsmith.models.model import Model
from bertsmith.models.published import preset
from bertsmith.models.quantise import dequantised, measuring, quantised

SUBNETS = {"width": Subnet(width=0.5), "by layer": Subnet(layers=(0, 2), heads=(1, 2), neurons=(6, 20))}
ENCODERS = [name for name in FAMILIES if preset(name.split()[0]).decoder is None]
ENCODERS = [name for name in ENCODERS if not name.endswith((" reversible", " equilibrium"))]


def rounding_model(name: str, *subnets: Subnet, **settings: object) -> Model:
    """Build a tiny quantised model with ranges measured for the whole model and some sub-networks."""
    model = quantised(tiny_model(name), QuantisationConfig(**settings))
    with measuring(model), torch.no_grad():
        for _ in range(2):
            for subnet in (None, *subnets):
                model(torch.randint(0, 50, (4, 9)), subnet=subnet)
    return model


@pytest.mark.parametrize("name", ENCODERS)
def test_quantised_extract_equals_subnet(name: str, tmp_path: Path) -> None:
    ids, mask = torch.randint(0, 50, (3, 9)), padded_layout([9, 4, 1]).is_token
    ranges = ("matrix", "row", "group")[ENCODERS.index(name) % 3]
    model = rounding_model(name, SUBNETS["width"], weight_ranges=ranges, groups=5)
    for subnet in SUBNETS.values():  # one with measured widths, one with other widths
        small = bertsmith.extract(model, subnet)
        torch.testing.assert_close(small(ids, mask), model(ids, mask, subnet=subnet), rtol=0, atol=1e-11)
    bertsmith.save(small, tmp_path / "small")
    bertsmith.save(model, tmp_path / "large")
    assert torch.equal(bertsmith.load(tmp_path / "small")(ids, mask), small(ids, mask))
    assert torch.equal(bertsmith.load(tmp_path / "large")(ids, mask), model(ids, mask))
    assert torch.equal(bertsmith.load(tmp_path / "large", subnet=subnet)(ids, mask), small(ids, mask))


@pytest.mark.parametrize("name", ENCODERS)
def test_quantisation_changes_outputs_and_can_be_removed(name: str) -> None:
    plain, ids = tiny_model(name), torch.randint(0, 50, (2, 9))
    model = rounding_model(name)
    difference = (model(ids) - plain(ids)).abs().max()
    assert 1e-6 < difference < 1.0
    coarse = rounding_model(name, weight_bits=3, activation_bits=4)
    assert (coarse(ids) - plain(ids)).abs().max() > difference
    assert torch.equal(dequantised(model)(ids), plain(ids))


@pytest.mark.parametrize("name", ENCODERS)
def test_every_matrix_gets_a_gradient_through_quantisation(name: str) -> None:
    model = rounding_model(name).train()
    model(torch.randint(0, 50, (2, 9))).square().sum().backward()
    encoder = dict(model.encoder.named_parameters())
    plain = tiny_model(name)
    plain(torch.randint(0, 50, (2, 9))).square().sum().backward()
    for name_of, parameter in plain.encoder.named_parameters():
        if parameter.grad is not None and parameter.grad.abs().max() > 0:
            assert encoder[name_of].grad.abs().max() > 0, name_of

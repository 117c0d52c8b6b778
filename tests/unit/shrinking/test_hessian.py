"""Power iteration against the eigenvalues of a full Hessian, and bit widths within a budget."""

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from bertsmith.errors import InputError
from bertsmith.models.build import build
from bertsmith.models.model import Model
from bertsmith.models.published import preset
from bertsmith.shrinking.hessian import Sharpness, allotted_bits, layer_sharpness, matrices, top_eigenvalue


def tiny() -> Model:
    sizes = {"width": 4, "layers": 2, "heads": 2, "vocabulary": 20, "max_length": 8, "dropout": 0.0, "init_std": 0.5}
    return build(preset("bert-tiny", **sizes), seed=0).double()


def loss_of(states: Tensor) -> Tensor:
    return (states * torch.linspace(-1, 1, states.numel(), dtype=torch.float64).view_as(states)).sum().square()


def full_hessian(model: Model, ids: Tensor, layer: int) -> Tensor:
    """Return the Hessian of the loss with respect to the matrices of one layer."""
    names = [name for name, p in model.named_parameters() if f"blocks.{layer}." in name and p.dim() > 1]
    own = dict(model.named_parameters())
    sizes = [own[name].numel() for name in names]

    def loss(flat: Tensor) -> Tensor:
        parts = (part.view_as(own[name]) for name, part in zip(names, flat.split(sizes), strict=True))
        return loss_of(functional_call(model, dict(zip(names, parts, strict=True)), (ids,), {"backend": "reference"}))

    flat = torch.cat([own[name].detach().flatten() for name in names])
    return torch.autograd.functional.hessian(loss, flat)


def test_top_eigenvalue_equals_that_of_the_full_hessian() -> None:
    model, ids = tiny(), torch.randint(0, 20, (2, 5))
    found = layer_sharpness(model, [lambda: loss_of(model(ids, backend="reference"))], steps=500)
    for layer, sharpness in enumerate(found):
        values = torch.linalg.eigvalsh(full_hessian(model, ids, layer))
        expected = values[values.abs().argmax()].item()
        assert sharpness.eigenvalues == (pytest.approx(expected, rel=2e-2),)


def test_negative_curvature_keeps_its_sign() -> None:
    weights = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    loss = (torch.tensor([1.0, -5.0, 2.0], dtype=torch.float64) * weights.square()).sum() / 2
    generator = torch.Generator().manual_seed(0)
    assert top_eigenvalue(loss, [weights], generator, steps=100, tolerance=1e-9) == pytest.approx(-5.0)


def test_omega_is_absolute_mean_plus_standard_deviation() -> None:
    assert Sharpness((-1.0, -3.0)).omega == pytest.approx(2.0 + 1.0)
    assert len(matrices(tiny().encoder.blocks[0])) == 4  # query-key-value, output, two of the feed-forward


def test_most_sensitive_layers_get_more_bits_within_the_budget() -> None:
    omegas, sizes = [0.1, 9.0, 3.0, 0.5], [10, 10, 10, 10]
    assert allotted_bits(omegas, sizes, [2, 4], 3.0) == (2, 4, 4, 2)
    assert allotted_bits(omegas, sizes, [4, 2, 8, 3], 4.0) == (2, 8, 4, 2)
    assert allotted_bits(omegas, sizes, [2, 4], 2.0) == (2, 2, 2, 2)
    assert allotted_bits(omegas, sizes, [2, 4], 9.0) == (4, 4, 4, 4)
    assert allotted_bits(omegas, [10, 30, 10, 10], [2, 4], 3.0) == (2, 4, 2, 2)
    with pytest.raises(InputError, match=r"average is 1.5 bits; allowed: at least the lowest of the choices \[2, 4\]"):
        allotted_bits(omegas, sizes, [2, 4], 1.5)

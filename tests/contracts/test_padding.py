"""Padding must be at the end of rows, for every family and backend; rows of padding only have no effect."""

import pytest
import torch
from cases import FAMILIES, tiny_model

from bertsmith.errors import InputError
from bertsmith.models.model import Model
from bertsmith.models.published import preset
from bertsmith.ops import attention, conv, disentangled, favor

ENCODERS = [name for name in FAMILIES if preset(name.partition(" ")[0]).decoder is None]
OPS = (attention.BACKENDS, conv.BACKENDS, conv.DEPTHWISE_BACKENDS, disentangled.BACKENDS, favor.BACKENDS)
BACKENDS = ("auto", *dict.fromkeys(name for backends in OPS for name in backends))
WRONG = {"left": [0, 0, 1, 1, 1], "interior": [1, 1, 0, 1, 1], "between": [1, 0, 1, 0, 0]}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

pytestmark = [pytest.mark.parametrize("name", ENCODERS), pytest.mark.parametrize("device", DEVICES)]


def supported(model: Model) -> list[str]:
    """Return the backends that support the model's padded inputs on its device."""
    ids, mask = torch.zeros(2, 3, dtype=torch.long), torch.tensor([[1, 1, 1], [1, 1, 0]])
    names = []
    for name in BACKENDS:
        if name == "triton" and model.device.type == "cpu":
            continue  # interpreted on a CPU: tests/kernels covers it
        try:
            model(ids.to(model.device), mask.to(model.device), backend=name)
        except InputError:
            continue
        names.append(name)
    assert {"auto", "reference"} <= set(names)
    return names


def family_model(name: str, device: str) -> Model:
    """Build a tiny model; in float32 on a GPU, because the kernels do not support float64."""
    model = tiny_model(name)
    return model if device == "cpu" else model.float().to(device)


@pytest.mark.parametrize("wrong", WRONG)
def test_padding_before_a_token_raises(name: str, device: str, wrong: str) -> None:
    model = family_model(name, device)
    mask = torch.tensor([[1, 1, 1, 1, 0], WRONG[wrong]], device=device)
    for backend in supported(model):
        with pytest.raises(InputError, match="padding before a token in row 1; pad at the end"):
            model(torch.randint(0, 50, (2, 5), device=device), mask, backend=backend)


def test_rows_of_padding_change_nothing(name: str, device: str) -> None:
    model = family_model(name, device)
    ids = torch.randint(0, 50, (3, 5), device=device)
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], device=device)
    for backend in supported(model):
        hidden = model(ids, mask, backend=backend)
        assert hidden.isfinite().all()
        others = model(ids[[0, 2]], mask[[0, 2]], backend=backend)
        is_token = mask[[0, 2]].bool()
        tolerance = 1e-12 if device == "cpu" else 1e-4
        torch.testing.assert_close(hidden[[0, 2]][is_token], others[is_token], rtol=0, atol=tolerance)


def test_batch_of_padding_only_is_finite(name: str, device: str) -> None:
    model = family_model(name, device)
    ids, mask = torch.randint(0, 50, (2, 4), device=device), torch.zeros(2, 4, dtype=torch.long, device=device)
    for backend in supported(model):
        assert model(ids, mask, backend=backend).isfinite().all()


def test_gradients_of_rows_of_padding_are_finite(name: str, device: str) -> None:
    model = family_model(name, device)
    ids = torch.randint(0, 50, (2, 4), device=device)
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0]], device=device)
    for backend in supported(model):
        model.zero_grad()
        model(ids, mask, backend=backend)[mask.bool()].square().sum().backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert gradients
        assert all(gradient.isfinite().all() for gradient in gradients)

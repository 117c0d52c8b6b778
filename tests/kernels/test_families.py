"""Every family on a GPU: the same states and gradients as on the CPU, compiled too, finite under bfloat16."""

import pytest
import torch
from cases import FAMILIES, packed_layout, padded_layout, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("name", FAMILIES)]

LENGTHS = [7, 1, 16, 3]


def states_and_gradients(name: str, device: str, dtype: torch.dtype, *, compiled: bool = False) -> list[torch.Tensor]:
    model = tiny_model(name).to(device, dtype)
    tokens = torch.randint(0, 50, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3)).to(device)
    encoder = torch.compile(model.encoder) if compiled else model.encoder
    states = encoder(tokens, packed_layout(LENGTHS).to(device))
    states.square().sum().backward()
    return [states, *(parameter.grad for parameter in model.encoder.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize("compiled", [False, True])
def test_the_device_does_not_matter(name: str, compiled: bool) -> None:
    truth = states_and_gradients(name, "cpu", torch.float64)
    found = states_and_gradients(name, "cuda", torch.float64, compiled=compiled)
    assert len(truth) == len(found)
    # the angles of rotary positions are float32 everywhere, and a GPU rounds its powers, sines and cosines otherwise
    room = 1e-4 if name.startswith("modern") else 1e-7
    for there, here in zip(found, truth, strict=True):
        torch.testing.assert_close(there.cpu(), here, rtol=room, atol=room)


def test_half_precision_is_finite_and_near(name: str) -> None:
    model = tiny_model(name).float().cuda()
    layout = padded_layout(LENGTHS).to("cuda")
    tokens = torch.randint(0, 50, layout.is_token.shape, device="cuda")
    exact = model.encoder(tokens, layout)[layout.is_token]
    with torch.autocast("cuda", torch.bfloat16):
        states = model.encoder(tokens, layout)
        states[layout.is_token].float().square().mean().backward()
    error = (states[layout.is_token].float() - exact).norm() / exact.norm()
    assert error < 0.3, error
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())

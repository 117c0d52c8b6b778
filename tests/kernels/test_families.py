"""Every family on a GPU: hidden states and gradients equal those on the CPU, eager and compiled; bfloat16 is finite."""

import pytest
import torch
from cases import FAMILIES, packed_layout, padded_layout, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("name", FAMILIES)]

LENGTHS = [7, 1, 16, 3]


def states_and_gradients(name: str, device: str, dtype: torch.dtype, *, compiled: bool = False) -> list[torch.Tensor]:
    model = tiny_model(name).to(device, dtype)
    tokens = torch.randint(0, 50, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3)).to(device)
    torch._dynamo.reset()  # integers that differ from the last family would become symbols
    encoder = torch.compile(model.encoder) if compiled else model.encoder
    states = encoder(tokens, packed_layout(LENGTHS).to(device))
    states.square().sum().backward()
    return [states, *(parameter.grad for parameter in model.encoder.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize("compiled", [False, True])
def test_gpu_equals_cpu(name: str, compiled: bool) -> None:
    truth = states_and_gradients(name, "cpu", torch.float64)
    actual = states_and_gradients(name, "cuda", torch.float64, compiled=compiled)
    assert len(truth) == len(actual)
    # rotary angles are always float32, and a GPU rounds powers, sines and cosines differently
    tolerance = 1e-4 if name.startswith("modern") else 1e-7
    for gpu, cpu in zip(actual, truth, strict=True):
        torch.testing.assert_close(gpu.cpu(), cpu, rtol=tolerance, atol=tolerance)


def test_bfloat16_is_finite_and_close(name: str) -> None:
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

"""Compiled encoders: one graph without a break, the same states and the same gradient of every weight."""

import pytest
import torch
from cases import packed_layout, tiny_model

FAMILIES = ["bert-base", "convbert-base", "deberta-v3-base", "performer-base"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_compiled_encoder_learns_the_same(family: str) -> None:
    encoder = tiny_model(family).encoder
    layout = packed_layout([7, 12, 3])
    tokens = torch.randint(0, 50, (22,))

    def run(compute: torch.nn.Module) -> list[torch.Tensor]:
        encoder.zero_grad()
        states = compute(tokens, layout)
        (states * torch.linspace(-1, 1, states.numel()).view_as(states)).sum().backward()
        return [states.detach(), *(weight.grad for weight in encoder.parameters() if weight.grad is not None)]

    plain = run(encoder)
    # what is lost here is lost by any compiler that follows: PyTorch 2.11 dropped gradients of copies made in place
    compiled = run(torch.compile(encoder, fullgraph=True, backend="aot_eager"))
    assert len(plain) == len(compiled)
    for ours, expected in zip(compiled, plain, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)

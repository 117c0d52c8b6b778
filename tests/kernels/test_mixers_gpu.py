"""Every mixer on a GPU: packed and padded outputs and gradients in float32 equal those of a CPU in float64."""

from dataclasses import replace

import pytest
import torch
from cases import MIXER_CASES, WIDTH, forward_context, packed_layout, padded_layout
from torch import Tensor

from bertsmith.layers.context import ForwardContext
from bertsmith.layers.mixers import Mixer

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("name", MIXER_CASES)]

LENGTHS = [5, 12, 1, 9]


def make(name: str) -> Mixer:
    mixer = MIXER_CASES[name].build(WIDTH).double().eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return mixer


def on_gpu(context: ForwardContext) -> ForwardContext:
    """Return the context of a CPU on a GPU, in float32."""
    table = context.relative_positions
    assert table is not None
    return replace(
        context,
        layout=context.layout.to("cuda"),
        relative_positions=replace(table, vectors=table.vectors.float().cuda(), slots=table.slots.cuda()),
        rotations={
            rotary: type(rotation)(*(angles.cuda() for angles in rotation))
            for rotary, rotation in context.rotations.items()
        },
    )


def results(mixer: Mixer, hidden: Tensor, context: ForwardContext, is_token: Tensor | None) -> list[Tensor]:
    """Return the output at real tokens and the gradients of input and weights."""
    hidden = hidden.clone().requires_grad_()
    mixed = mixer(hidden, context)
    real = mixed if is_token is None else mixed[is_token]
    weight = torch.randn(real.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64).to(real)
    mixer.zero_grad()
    (real * weight).sum().backward()
    assert hidden.grad is not None
    by_hidden = hidden.grad if is_token is None else hidden.grad[is_token]
    gradients = [parameter.grad for parameter in mixer.parameters() if parameter.grad is not None]
    return [tensor.detach().double().cpu() for tensor in (real, by_hidden, *gradients)]


def test_gpu_equals_cpu_packed_and_padded(name: str) -> None:
    mixer = make(name)
    hidden = torch.randn(sum(LENGTHS), WIDTH, dtype=torch.float64)
    packed, padded = packed_layout(LENGTHS, empty=1), padded_layout(LENGTHS, 2)
    expected = results(mixer, hidden, forward_context(packed), None)
    rows = torch.zeros(*padded.is_token.shape, WIDTH, dtype=torch.float64)
    rows[padded.is_token] = hidden
    contexts = [on_gpu(forward_context(layout)) for layout in (packed, padded)]
    mixer = mixer.float().cuda()
    actual = [
        results(mixer, hidden.float().cuda(), contexts[0], None),
        results(mixer, rows.float().cuda(), contexts[1], padded.is_token.cuda()),
    ]
    for gpu in actual:
        assert len(gpu) == len(expected)
        for ours, exact in zip(gpu, expected, strict=True):
            assert (ours - exact).norm() <= 1e-4 * (exact.norm() + 0.01 * exact.numel() ** 0.5)

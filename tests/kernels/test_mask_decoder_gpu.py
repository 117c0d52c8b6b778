"""The mask decoder on a GPU never synchronises with the host and equals the CPU."""

from dataclasses import replace

import pytest
import torch
from cases import packed_layout, tiny_model
from helpers_gpu import no_synchronisation

from bertsmith.models.encoder import EncoderInputs, Want

pytestmark = pytest.mark.gpu

LENGTHS = [7, 1, 12, 3]


@pytest.mark.parametrize("name", ["deberta-base", "deberta-v2-xlarge"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_mask_decoder_never_synchronises(name: str, is_causal: bool) -> None:
    model, layout = tiny_model(name), packed_layout(LENGTHS, empty=2)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 50, (sum(LENGTHS),), generator=generator)
    positions = torch.randperm(sum(LENGTHS), generator=generator)[:9]
    inputs = EncoderInputs(tokens, layout, is_causal=is_causal)
    expected = model.run(inputs, Want(masked_positions=positions)).masked_states
    model, want = model.cuda(), Want(masked_positions=positions.cuda())
    inputs = replace(inputs, tokens=tokens.cuda(), layout=layout.to("cuda"))
    model.run(inputs, want)  # the first call may synchronise
    with no_synchronisation():
        states = model.run(inputs, want).masked_states
    torch.testing.assert_close(states.cpu(), expected, rtol=1e-7, atol=1e-7)

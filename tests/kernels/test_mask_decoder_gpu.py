"""The mask decoder on a GPU: it never makes the host wait, and gives what it gives on the CPU."""

import pytest
import torch
from cases import packed_layout, tiny_model

pytestmark = pytest.mark.gpu

LENGTHS = [7, 1, 12, 3]


@pytest.mark.parametrize("name", ["deberta-base", "deberta-v2-xlarge"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_host_never_waits(name: str, is_causal: bool) -> None:
    model, layout = tiny_model(name), packed_layout(LENGTHS, empty=2)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 50, (sum(LENGTHS),), generator=generator)
    places = torch.randperm(sum(LENGTHS), generator=generator)[:9]
    expected, _ = model.masked_states(tokens, layout, None, places, is_causal=is_causal)
    model, given = model.cuda(), (tokens.cuda(), layout.to("cuda"), None, places.cuda())
    model.masked_states(*given, is_causal=is_causal)  # what is set up once may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        states, _ = model.masked_states(*given, is_causal=is_causal)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(states.cpu(), expected, rtol=1e-7, atol=1e-7)

"""Replayed random draws."""

import pytest
import torch

from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.layers.elementwise import TokenDropout
from bertsmith.layers.replay import GeneratorStates

CPU = torch.device("cpu")


def test_replay_draws_the_same_numbers_any_number_of_times() -> None:
    states = GeneratorStates.capture(CPU)
    first = torch.rand(5)
    torch.rand(3)
    for _ in range(2):
        with states.replayed():
            assert torch.equal(torch.rand(5), first)


def test_replay_leaves_the_generator_where_it_was() -> None:
    states = GeneratorStates.capture(CPU)
    torch.rand(5)
    before = torch.get_rng_state()
    with states.replayed():
        torch.rand(100)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(TypeError), states.replayed():
        torch.rand("none")
    assert torch.equal(torch.get_rng_state(), before)


def test_differ_tells_whether_numbers_were_drawn() -> None:
    states = GeneratorStates.capture(CPU)
    dropout, hidden = TokenDropout(0.5), torch.ones(4, 8)
    dropout.eval()(hidden, SequenceLayout.full(1, 4))
    assert not states.differ()
    with states.replayed():
        torch.rand(1)
    assert not states.differ()
    dropout.train()(hidden, SequenceLayout.full(1, 4))
    assert states.differ()


def test_dropout_of_padded_and_packed_tokens_repeats() -> None:
    dropout = TokenDropout(0.5).train()
    padded = SequenceLayout.padded(torch.tensor([[True, True, False], [True, False, False]]))
    states = GeneratorStates.capture(CPU)
    rows = dropout(torch.ones(2, 3, 16), padded)
    with states.replayed():
        assert torch.equal(dropout(torch.ones(2, 3, 16), padded), rows)
    with states.replayed():
        packed = dropout(torch.ones(3, 16), SequenceLayout.packed(torch.tensor([0, 2, 3], dtype=torch.int32), 2))
    assert torch.equal(rows[padded.is_token], packed)


def test_compiled_code_is_refused() -> None:
    def drop(hidden: torch.Tensor) -> torch.Tensor:
        GeneratorStates.capture(hidden.device)
        return hidden

    with pytest.raises((InputError, torch._dynamo.exc.Unsupported), match="compiled code cannot replay"):
        torch.compile(drop, fullgraph=True, backend="eager")(torch.ones(2))


@pytest.mark.gpu
def test_replay_on_a_gpu() -> None:
    device = torch.device("cuda", 0)
    states = GeneratorStates.capture(device)
    first = torch.rand(5, device=device), torch.rand(5)
    assert states.differ()
    with states.replayed():
        assert all(torch.equal(torch.rand(5, device=number.device), number) for number in first)

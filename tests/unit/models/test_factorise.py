"""Factorised token tables."""

from pathlib import Path

import pytest
import torch

import bertsmith
from bertsmith import InputError, factorise
from bertsmith.models.cost import parameters
from bertsmith.models.model import Model


def model_of(name: str) -> Model:
    more = {"embedding_width": 12} if name == "albert-base" else {}
    sizes = {"width": 24, "heads": 4, "layers": 2, "vocabulary": 60, "max_length": 16, "dropout": 0.0, "init_std": 0.3}
    return bertsmith.build(bertsmith.preset(name, **sizes, **more), seed=0).double().eval()


def outputs(model: Model, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    states = model(ids)
    return states, model.head("masked_tokens")(states, model.token_table)


@pytest.mark.parametrize("name", ["bert-tiny", "albert-base"])
def test_full_rank_preserves_outputs(name: str, tmp_path: Path) -> None:
    model, ids = model_of(name), torch.randint(0, 60, (3, 9))
    whole = factorise(model, model.config.encoder.embedding_width)
    expected = outputs(model, ids)
    for got, want in zip(outputs(whole, ids), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
    bertsmith.save(whole, tmp_path / "whole")
    for got, want in zip(outputs(bertsmith.load(tmp_path / "whole"), ids), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


def test_lower_rank_is_the_best_approximation() -> None:
    model = model_of("bert-tiny")
    small = factorise(model, 8)
    sizes = torch.linalg.svdvals(model.token_table)
    error = torch.linalg.matrix_norm(small.token_table - model.token_table)
    torch.testing.assert_close(error, sizes[8:].square().sum().sqrt())  # Eckart and Young 1936
    count = sum(parameter.numel() for parameter in small.parameters())
    assert count == parameters(small.config)
    assert count == sum(parameter.numel() for parameter in model.parameters()) - 60 * 24 + 8 * (60 + 24)
    again = factorise(small, 8)
    torch.testing.assert_close(again.token_table, small.token_table, rtol=0, atol=1e-10)


def test_both_factors_get_gradients_from_embedding_and_head() -> None:
    small, ids = factorise(model_of("bert-tiny"), 8), torch.randint(0, 60, (3, 9))
    states = small(ids)
    by_input = torch.autograd.grad(states.square().mean(), small.encoder.embedding.token_factor, retain_graph=True)[0]
    by_output = torch.autograd.grad(
        small.head("masked_tokens")(states.detach(), small.token_table).square().mean(),
        small.encoder.embedding.token_factor,
    )[0]
    assert by_input.abs().max() > 0
    assert by_output.abs().max() > 0


def test_invalid_inputs_raise(tmp_path: Path) -> None:
    model = model_of("bert-tiny")
    with pytest.raises(InputError, match="rank is 25; allowed: 1 to 24"):
        factorise(model, 25)
    with pytest.raises(InputError, match=r"encoder\.embedding\.rank is 4 and would be read back as None"):
        bertsmith.export(factorise(model, 4), tmp_path / "hf", native="always")

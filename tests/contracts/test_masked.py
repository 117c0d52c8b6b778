"""Contract of masked weights, for one preset of each family: every mixer, grouped and gated feed-forwards."""

import copy

import pytest
import torch
from cases import FAMILIES, padded_layout, tiny_model
from choosing import slow_unless

import bertsmith
from bertsmith import Subnet
from bertsmith.models.masks import (
    kept_count,
    masked_weights,
    masks_of,
    prunable_weights,
    prune_weights,
    put_masks,
    unmasked,
)
from bertsmith.models.model import Model
from bertsmith.models.published import preset

SUBNETS = {"width": Subnet(width=0.5), "by layer": Subnet(layers=(0, 2), heads=(1, 2), neurons=(6, 18))}
ENCODERS = [name for name in FAMILIES if preset(name.split()[0]).decoder is None]
QUICK = ("bert-tiny", "convbert-small", "deberta-v3-xsmall", "performer-small")
IDS, MASK = torch.arange(27).view(3, 9) + 11, padded_layout([9, 4, 1]).is_token


def pruned_model(name: str, sparsity: float = 0.6) -> Model:
    """Build a tiny model with masks on all prunable weights, the token table included."""
    model = tiny_model(name)
    weights = prunable_weights(model, token_table=True)
    put_masks(model, {key: torch.ones_like(weight, dtype=torch.bool) for key, weight in weights.items()})
    prune_weights(model, sparsity)
    return model


@pytest.mark.parametrize("name", slow_unless(QUICK, ENCODERS))
def test_every_matrix_has_the_exact_count(name: str) -> None:
    model = pruned_model(name)
    matrices = [matrix for masked in masked_weights(model) for matrix in masked.matrices]
    assert len(matrices) > 4
    for matrix in matrices:
        assert matrix.kept == kept_count(matrix.mask.numel(), 0.6)
        assert not matrix.weight[~matrix.mask].any()
        if not matrix.is_table:
            dropped = tiny_weights(name, matrix.name, matrix.mask)
            assert matrix.weight[matrix.mask].abs().min() >= dropped


def tiny_weights(name: str, matrix: str, mask: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude that was pruned from a matrix."""
    model = tiny_model(name)
    weights = prunable_weights(model)
    put_masks(model, {key: torch.ones_like(weight, dtype=torch.bool) for key, weight in weights.items()})
    (same,) = [one for masked in masked_weights(model) for one in masked.matrices if one.name == matrix]
    return same.weight[~mask].abs().max()


@pytest.mark.parametrize("name", ENCODERS)
def test_masked_model_equals_dense_weights_times_mask(name: str) -> None:
    model, dense = pruned_model(name), tiny_model(name)
    masks = masks_of(model)
    with torch.no_grad():
        for key, parameter in dense.named_parameters():
            if key in masks:
                parameter.mul_(masks[key])
    assert torch.equal(model(IDS, MASK), dense(IDS, MASK))
    assert torch.equal(unmasked(model)(IDS, MASK), dense(IDS, MASK))
    assert not masks_of(unmasked(model))
    with torch.no_grad():  # even if something else has written to the pruned weights
        for masked in masked_weights(model):
            masked.weight.masked_fill_(~masked.mask, 5.0)
    assert torch.equal(model(IDS, MASK), dense(IDS, MASK))


@pytest.mark.parametrize("name", ENCODERS)
def test_extract_equals_subnet_and_cuts_masks(name: str) -> None:
    model = pruned_model(name)
    for subnet in SUBNETS.values():
        small = bertsmith.extract(model, subnet)
        torch.testing.assert_close(small(IDS, MASK), model(IDS, MASK, subnet=subnet), rtol=0, atol=1e-11)
        masks = masks_of(small)
        assert masks.keys() == prunable_weights(small, token_table=True).keys()
        for masked in masked_weights(small):
            assert torch.equal(masked.weight != 0, masked.mask)


@pytest.mark.parametrize("name", ENCODERS)
def test_reorder_permutes_masks_with_weights(name: str) -> None:
    model = pruned_model(name)
    before = model(IDS, MASK)
    draw = torch.Generator().manual_seed(1)
    units = model.encoder.units
    is_shared = model.config.encoder.sharing != "none"
    sizes = [units[0]] * len(units) if is_shared else units
    heads = [torch.randperm(own.heads, generator=draw) for own in sizes]
    neurons = [torch.randperm(own.neurons, generator=draw) for own in sizes]
    if is_shared:
        heads, neurons = [heads[0]] * len(heads), [neurons[0]] * len(neurons)
    masks = copy.deepcopy(masks_of(model))
    model.encoder.reorder(heads, neurons)
    torch.testing.assert_close(model(IDS, MASK), before, rtol=0, atol=1e-10)
    for masked in masked_weights(model):
        assert torch.equal(masked.weight != 0, masked.mask)
    assert any(not torch.equal(masks[key], mask) for key, mask in masks_of(model).items())


@pytest.mark.parametrize("name", ENCODERS)
def test_pruned_weights_get_no_gradient(name: str) -> None:
    model = pruned_model(name).train()
    model(IDS).square().sum().backward()
    for masked in masked_weights(model):
        if masked.weight.grad is not None:  # the pooler is not used
            assert not masked.weight.grad[~masked.mask].any()
            assert masked.weight.grad[masked.mask].any()

"""Choosing masks by magnitude, the packed file, and the token table."""

import copy
from pathlib import Path

import pytest
import torch

import bertsmith
from bertsmith.checkpoint.masks import MASKS_FILE, pack, read_masks, unpack
from bertsmith.checkpoint.store import write_model
from bertsmith.errors import InputError
from bertsmith.layers.quantised import QuantisationConfig
from bertsmith.models.build import rebuild
from bertsmith.models.masks import (
    has_masks,
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
from bertsmith.models.quantise import quantised

TINY = {"width": 16, "layers": 2, "heads": 2, "vocabulary": 40, "max_length": 16, "dropout": 0.0}


def masked_model(*, token_table: bool = False, name: str = "bert-tiny", **changes: object) -> Model:
    """Build a tiny model with open masks."""
    model = bertsmith.build(preset(name, **{**TINY, **changes}), seed=0)
    weights = prunable_weights(model, token_table=token_table)
    put_masks(model, {key: torch.ones_like(weight, dtype=torch.bool) for key, weight in weights.items()})
    return model


def test_prunable_are_linear_matrices_and_the_pooler() -> None:
    names = set(prunable_weights(bertsmith.build(preset("bert-tiny", **TINY), seed=0)))
    block = "encoder.blocks.0."
    layer = {f"{block}mixer.project.weight", f"{block}mixer.output.weight"}
    layer |= {f"{block}feedforward.expand.weight", f"{block}feedforward.contract.weight"}
    assert layer <= names
    assert len([name for name in names if name.startswith("encoder.")]) == 8
    assert {name for name in names if name.startswith("heads.")} <= {"heads.pooler.project.weight"}


def test_query_key_and_value_are_pruned_separately() -> None:
    model = masked_model()
    project = model.encoder.blocks[0].mixer.project
    with torch.no_grad():
        project.weight[:16] *= 100  # the queries would keep everything if the three were one matrix
    prune_weights(model, 0.75)
    assert [int(part.sum()) for part in project.mask.chunk(3)] == [64, 64, 64]


@pytest.mark.parametrize(
    ("weights", "sparsity", "kept"), [(10, 0.9, 1), (10, 0.0, 10), (3, 0.5, 1), (1000, 0.3, 700), (7, 0.99, 0)]
)
def test_kept_count_rounds_down(weights: int, sparsity: float, kept: int) -> None:
    assert kept_count(weights, sparsity) == kept


def test_global_scope_counts_over_all_matrices() -> None:
    model = masked_model()
    with torch.no_grad():
        model.encoder.blocks[0].mixer.output.weight.mul_(1e-3)
    prune_weights(model, 0.5, scope="global")
    masks = masks_of(model)
    total = sum(mask.numel() for mask in masks.values())
    assert sum(int(mask.sum()) for mask in masks.values()) == total // 2
    assert not masks["encoder.blocks.0.mixer.output.weight"].any()


def test_equal_magnitudes_are_pruned_in_order_of_memory() -> None:
    model = masked_model()
    output = model.encoder.blocks[0].mixer.output
    with torch.no_grad():
        output.weight.fill_(-0.5)
    prune_weights(model, 0.5)
    assert torch.equal(output.mask.flatten(), torch.arange(256) >= 128)


def test_pruned_weights_stay_pruned() -> None:
    model = masked_model()
    prune_weights(model, 0.5)
    before = copy.deepcopy(masks_of(model))
    with torch.no_grad():
        for masked in masked_weights(model):
            masked.weight.normal_()  # pruned ones included
    prune_weights(model, 0.3)
    assert all(torch.equal(mask, before[name]) for name, mask in masks_of(model).items())
    prune_weights(model, 0.7)
    assert not any((mask & ~before[name]).any() for name, mask in masks_of(model).items())


def test_two_of_every_four_inputs_are_kept() -> None:
    model = masked_model(token_table=True)
    weights = {name: weight.detach().clone() for name, weight in prunable_weights(model, token_table=True).items()}
    prune_weights(model, 0.5, pattern="2:4")
    for name, mask in masks_of(model).items():
        fours, sizes = mask.unflatten(-1, (-1, 4)), weights[name].abs().unflatten(-1, (-1, 4))
        assert (fours.sum(-1) == 2).all()
        assert (sizes.masked_fill(~fours, torch.inf).amin(-1) >= sizes.masked_fill(fours, 0).amax(-1)).all()


def test_two_of_four_needs_a_multiple_of_four() -> None:
    with pytest.raises(InputError, match=r"has 18 inputs; allowed: a multiple of 4"):
        prune_weights(masked_model(width=18), 0.5, pattern="2:4")


def test_sparsity_0_equals_unmasked_model() -> None:
    model, plain = masked_model(token_table=True), bertsmith.build(preset("bert-tiny", **TINY), seed=0)
    prune_weights(model, 0.0)
    tokens = torch.arange(5, 15).view(2, 5)
    assert all(mask.all() for mask in masks_of(model).values())
    assert torch.equal(model(tokens), plain(tokens))
    for one in (model, plain):
        one(tokens).square().sum().backward()
    theirs = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (theirs[name].grad is None)
        assert parameter.grad is None or torch.equal(parameter.grad, theirs[name].grad)


def test_tied_table_is_masked_once_in_both_uses() -> None:
    model = masked_model(token_table=True)
    prune_weights(model, 0.8)
    (table,) = [masked for masked in masked_weights(model) if masked.is_table]
    assert table.weight is model.encoder.embedding.token_table
    assert int(table.mask.sum()) == kept_count(40 * 16, 0.8)
    assert table.mask.any(1).all()  # no token vanishes
    assert torch.equal(model.token_table != 0, table.mask)
    table.weight.grad = None
    hidden = model(torch.arange(40).view(4, 10))
    model.heads["masked_tokens"](hidden.flatten(0, 1), model.token_table).square().sum().backward()
    assert table.weight.grad is not None
    assert not table.weight.grad[~table.mask].any()


def test_table_keeps_one_weight_of_every_token() -> None:
    with pytest.raises(InputError, match=r"keeps 6 weights .* 40 rows; allowed: at least one weight of every token"):
        prune_weights(masked_model(token_table=True), 0.99)


def test_shared_layers_are_masked_once() -> None:
    model = masked_model(name="albert-base", embedding_width=8)
    prune_weights(model, 0.5)
    assert len([name for name in masks_of(model) if name.startswith("encoder.blocks.")]) == 4
    assert model.encoder.blocks[0].mixer.project is model.encoder.blocks[1].mixer.project


@pytest.mark.parametrize("shape", [(1,), (8,), (3, 5), (2, 3, 7)])
def test_packed_masks_are_read_back(shape: tuple[int, ...]) -> None:
    mask = torch.rand(shape) > 0.5
    packed = pack(mask)
    assert packed.dtype == torch.uint8
    assert packed.shape == (-(-mask.numel() // 8),)
    assert torch.equal(unpack(packed, mask.shape), mask)


def test_saved_folder_has_dense_weights_and_masks(tmp_path: Path) -> None:
    model = masked_model(token_table=True)
    prune_weights(model, 0.5)
    bertsmith.save(model, tmp_path / "model")
    plain = bertsmith.load(tmp_path / "model")
    assert not has_masks(plain)
    masked = bertsmith.load(tmp_path / "model", keep_masks=True)
    assert masks_of(masked).keys() == masks_of(model).keys()
    assert all(torch.equal(mask, masks_of(model)[name]) for name, mask in masks_of(masked).items())
    tokens = torch.arange(5, 15).view(2, 5)
    model.eval()
    assert torch.equal(plain(tokens), model(tokens))
    assert torch.equal(masked(tokens), model(tokens))
    bertsmith.save(plain, tmp_path / "plain")
    assert not (tmp_path / "plain" / MASKS_FILE).exists()
    bertsmith.save(plain, tmp_path / "model", force=True)
    assert not (tmp_path / "model" / MASKS_FILE).exists()


def test_masks_of_another_model_are_refused(tmp_path: Path) -> None:
    write_model(masked_model(), tmp_path)
    small = bertsmith.build(preset("bert-tiny", **{**TINY, "width": 8}), seed=0)
    with pytest.raises(InputError, match="the model needs"):
        read_masks(small, tmp_path)
    shallow = bertsmith.build(preset("bert-tiny", **{**TINY, "layers": 1}), seed=0)
    with pytest.raises(InputError, match="which the model does not have"):
        read_masks(shallow, tmp_path)


def test_rebuild_keeps_masks() -> None:
    model = masked_model()
    prune_weights(model, 0.5)
    layer_drop = model.config.encoder.changed(layer_drop=0.5)
    other = rebuild(model, model.config.changed(encoder=layer_drop))
    assert all(torch.equal(mask, masks_of(model)[name]) for name, mask in masks_of(other).items())
    assert len(masks_of(other)) == len(masks_of(model))


def test_quantisation_refuses_masks() -> None:
    model = masked_model()
    with pytest.raises(InputError, match="quantisation-aware training does not keep at 0"):
        quantised(model, QuantisationConfig())
    quantised(unmasked(model), QuantisationConfig())

"""Models that round all tensors: float model restored, layouts, cached decoding, sub-networks, saving, refusals."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import bertsmith
from bertsmith import Subnet
from bertsmith.data.layout import SequenceLayout
from bertsmith.engines.int8 import int8_model
from bertsmith.errors import InputError
from bertsmith.layers.context import Memory
from bertsmith.layers.mixers.sparse import SparseConfig
from bertsmith.layers.quantised import QuantisationConfig, Ranges
from bertsmith.models.build import build
from bertsmith.models.convert import with_sparse_attention
from bertsmith.models.model import Model
from bertsmith.models.published import preset
from bertsmith.models.quantise import dequantised, measuring, quantised
from bertsmith.models.seq2seq import GenerationConfig, Seq2Seq, Steps

CONFIG = QuantisationConfig(places="all", form="affine", clamps_gradient=True, decay=0.9, weight_ranges="row")
SIZES = {"width": 32, "layers": 2, "heads": 2, "vocabulary": 90, "max_length": 24, "dropout": 0.0}
PRESETS = ["bert-tiny", "modern-small", "transformer-tiny"]
LENGTHS = [5, 2, 7]


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(3, 90, (sum(LENGTHS),), generator=torch.Generator().manual_seed(seed))


def packed() -> SequenceLayout:
    return SequenceLayout.packed(torch.tensor([0, *LENGTHS]).cumsum(0).int(), max(LENGTHS))


def run(model: Model, seed: int = 0, layout: str = "packed", **options: object) -> Tensor:
    """Return the final hidden states of three sequences, packed; of the decoder if there is one."""
    rows, lies = tokens(seed), packed()
    inputs, given = (rows, lies) if layout == "packed" else lies.pad(rows)
    hidden = model.encoder(inputs, given, **options)
    if isinstance(model, Seq2Seq):
        hidden = model.decode(inputs, given, Memory(hidden, given), **options)
    return hidden if layout == "packed" else lies.unpad(hidden, rows)


def plain(name: str, **changes: object) -> Model:
    return build(preset(name, **{**SIZES, **changes}, init_std=0.3), seed=0).double().eval()


def rounding(name: str, *subnets: Subnet, **settings: object) -> Model:
    """Return a model that rounds all tensors, with ranges measured on other tokens than the tests'."""
    model = quantised(plain(name), CONFIG.changed(**settings))
    with measuring(model), torch.no_grad():
        for seed in (1, 2):
            for subnet in (None, *subnets):
                run(model, seed, subnet=subnet)
    return model


@pytest.mark.parametrize("name", PRESETS)
@torch.no_grad()
def test_removing_the_rounding_restores_the_model_bit_by_bit(name: str) -> None:
    model, float_model = rounding(name), plain(name)
    assert [key for key, _ in dequantised(model).named_modules()] == [key for key, _ in float_model.named_modules()]
    assert torch.equal(run(dequantised(model)), run(float_model))
    fine = (run(model) - run(float_model)).abs().max()
    coarse = (run(rounding(name, weight_bits=4, activation_bits=5)) - run(float_model)).abs().max()
    assert 1e-4 < fine < coarse


@pytest.mark.parametrize("name", PRESETS)
@torch.no_grad()
def test_alone_padded_and_packed_are_equal(name: str) -> None:
    model = rounding(name)
    together = run(model)
    torch.testing.assert_close(run(model, layout="padded"), together, rtol=0, atol=1e-10)
    alone = tokens()[:5][None]
    layout = SequenceLayout.full(1, 5)
    hidden = model.encoder(alone, layout)
    if isinstance(model, Seq2Seq):
        hidden = model.decode(alone, layout, Memory(hidden, layout))
    torch.testing.assert_close(hidden[0], together[:5], rtol=0, atol=1e-10)


@torch.no_grad()
def test_cached_equals_uncached() -> None:
    model = rounding("transformer-tiny")
    assert isinstance(model, Seq2Seq)
    source, target = tokens(3)[:5][None], torch.tensor([[1, 7, 20, 33, 4]])
    memory = Memory(model(source), SequenceLayout.full(1, 5))
    steps = Steps(model.decoder, model.scores, memory, table=model.borrowed_table)
    cached = torch.stack([steps.next(token) for token in target.T], dim=1)
    whole = model.scores(model.decode(target, SequenceLayout.full(1, 5), memory)).log_softmax(-1)
    torch.testing.assert_close(cached, whole.float(), rtol=0, atol=1e-5)
    greedy = GenerationConfig(method="greedy", extra_length=3)
    assert model.generate(source, None, greedy, start=1, end=2) == model.generate(
        source, None, greedy.changed(method="beam", beam=1), start=1, end=2
    )


@pytest.mark.parametrize("name", PRESETS)
@torch.no_grad()
def test_extract_equals_subnet_and_survives_saving(name: str, tmp_path: Path) -> None:
    subnet = Subnet(width=0.5)
    for model in (rounding(name, subnet), rounding(name)):  # ranges of this width, or of the whole model
        small = bertsmith.extract(model, subnet)
        torch.testing.assert_close(run(small), run(model, subnet=subnet), rtol=0, atol=1e-10)
        for folder, saved in (("small", small), ("large", model)):
            bertsmith.save(saved, tmp_path / folder, force=True)
            loaded = bertsmith.load(tmp_path / folder)
            assert torch.equal(run(loaded), run(saved))


@pytest.mark.parametrize("name", PRESETS)
def test_all_tensors_have_ranges_and_all_weights_gradients(name: str) -> None:
    model = quantised(plain(name), CONFIG).train()
    run(model).square().sum().backward()
    run(model).square().sum().backward()
    names = {
        key: part for key, part in model.named_modules() if isinstance(part, Ranges) and not key.startswith("head")
    }
    for key, part in names.items():
        assert part.lows is not None
        assert bool((part.limits > part.lows).any()), key
    kinds = {key.split(".")[-1] for key in names}
    expected = {"summed", "leaving", "entering", "numerators", "denominators", "weights", "deviation", "quotient"}
    assert kinds - {"centred"} == expected  # RMSNorm subtracts no mean
    for key, parameter in model.named_parameters():
        if not key.startswith("heads") and not key.endswith("bias"):
            assert parameter.grad is not None, key
            assert parameter.grad.abs().max() > 0, key


def test_relu_outputs_have_the_minimum_zero() -> None:
    model = rounding("transformer-tiny")
    entering = model.encoder.blocks[0].feedforward.contract.entering
    assert not entering.lows.any()
    assert entering.limits.any()
    gelu = rounding("bert-tiny").encoder.blocks[0].feedforward.contract.entering
    assert gelu.lows.min() < 0


def test_padded_training_batches_raise() -> None:
    model = quantised(plain("bert-tiny"), CONFIG).train()
    with pytest.raises(InputError, match="the batch is padded"):
        run(model, layout="padded")


def test_fused_backends_and_int8_are_refused(tmp_path: Path) -> None:
    model = rounding("bert-tiny")
    with pytest.raises(InputError, match="the parts of the softmax are rounded, but this backend fuses them"):
        run(model, backend="sdpa")
    with pytest.raises(InputError, match=r"codes are symmetric, but the model has quantisation\.form = 'affine'"):
        int8_model(model, "int8")
    with (
        pytest.raises(InputError, match=r"kind is 'kl', but the model has quantisation\.form = 'affine'"),
        measuring(model, "kl"),
    ):
        pass


def test_networks_with_other_tensors_raise() -> None:
    bert = preset("bert-tiny", **SIZES)
    layers = tuple(layer.changed(feedforward={"neurons": 64, "groups": 2}) for layer in bert.encoder.layers)
    cases = {
        "encoder.layers.0 has a mixer of kind 'favor'; use 'linear'": preset("performer-small", **SIZES),
        "encoder.layers.0 has sparse attention": with_sparse_attention(bert, SparseConfig()),
        "encoder.layers.0 has a grouped feed-forward": bert.changed(encoder=bert.encoder.changed(layers=layers)),
        "encoder.embedding.rank is given": bert.changed(
            encoder=bert.encoder.changed(embedding=bert.encoder.embedding.changed(rank=4))
        ),
    }
    for message, config in cases.items():
        with pytest.raises(InputError, match=f"quantisation.places is 'all'.*{message}"):
            config.changed(quantisation=CONFIG)

"""8-bit artefacts: exact round trip, calibrated or trained ranges, small files."""

from functools import partial
from pathlib import Path

import pytest
import torch

import bertsmith
from bertsmith.checkpoint.files import read_tensors
from bertsmith.data.layout import SequenceLayout
from bertsmith.engines.artefact import open_runner, write_artefact
from bertsmith.engines.base import Artefact, Inputs, Precision
from bertsmith.engines.int8 import Int8Linear, int8_model, int_product, open_int8, products_are_exact
from bertsmith.errors import InputError
from bertsmith.layers.quantised import QuantisationConfig
from bertsmith.models.build import build
from bertsmith.models.heads.task import ClassifierConfig
from bertsmith.models.model import Model
from bertsmith.models.published import overridable, preset
from bertsmith.models.quantise import measuring, quantised

SIZES = {"width": 32, "layers": 2, "heads": 2, "vocabulary": 200, "max_length": 16, "span": 6, "dropout": 0.0}
NAMES = ["bert-tiny", "convbert-medium-small", "deberta-v3-base", "deberta-base", "performer-base", "dynamicconv-base"]
PRECISIONS: list[Precision] = ["int8_weights", "int8", "int8_static"]


def classifier(name: str = "bert-tiny") -> Model:
    sizes = {key: value for key, value in {**SIZES, "init_std": 0.2}.items() if key in overridable(name)}
    config = preset(name, **sizes)
    head = ClassifierConfig(labels=("no", "yes", "maybe"), pooling="mean")
    return build(config.changed(heads=(head,), generator=None), seed=0).eval()


def inputs(seed: int = 0) -> Inputs:
    ids = torch.randint(0, 200, (5, 12), generator=torch.Generator().manual_seed(seed))
    return Inputs(ids, SequenceLayout.rows(ids, None))


def rounding_classifier(**settings: object) -> Model:
    model = quantised(classifier(), QuantisationConfig(**settings))
    with measuring(model), torch.no_grad():
        model.outputs(*inputs())
    return model


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_round_trip_is_exact(name: str, precision: Precision, tmp_path: Path) -> None:
    model, samples = classifier(name), [inputs(1), inputs(2)]
    before = int8_model(model, precision, samples)
    write_artefact(model, tmp_path, Artefact(engine="torch", precision=precision), samples)
    opened = open_runner(tmp_path)
    assert isinstance(opened, Model)
    written, read = dict(before.named_buffers()), dict(opened.named_buffers())
    codes = [key for key in written if key.endswith(".codes")]
    assert len(codes) > 8
    assert all(torch.equal(written[key], read[key]) for key in written)
    assert {written[key].dtype for key in codes} == {torch.int8}
    assert torch.equal(opened.outputs(*inputs()), before.outputs(*inputs()))
    expected = model.outputs(*inputs())
    assert (opened.outputs(*inputs()) - expected).abs().max() < 0.15 * expected.abs().max()


@torch.no_grad()
def test_file_is_a_quarter_of_float32(tmp_path: Path) -> None:
    model = build(preset("bert-tiny", vocabulary=2000), seed=0)
    (tmp_path / "whole").mkdir()
    (tmp_path / "codes").mkdir()
    for folder, precision in (("whole", "float32"), ("codes", "int8_weights")):
        write_artefact(model, tmp_path / folder, Artefact(engine="torch", precision=precision))
    sizes = [(tmp_path / folder / "model.safetensors").stat().st_size for folder in ("whole", "codes")]
    assert sizes[1] < 0.45 * sizes[0]
    floats = {name: t for name, t in read_tensors(tmp_path / "codes" / "model.safetensors").items() if t.dim() > 1}
    assert {name for name, tensor in floats.items() if tensor.dtype == torch.float32 and tensor.shape[-1] > 1} == {
        "encoder.embedding.position.table",
        "encoder.embedding.type_table",
    }


@torch.no_grad()
def test_layer_equals_its_integer_formula() -> None:
    layer = classifier().encoder._blocks()[0].feedforward.expand
    hidden = torch.randn(3, 32)
    weights = layer.weight.double()
    steps = weights.abs().amax(1) / 127
    codes = (weights / steps[:, None]).round()
    entering = hidden.double().abs().amax(1) / 127
    sums = (hidden.double() / entering[:, None]).round() @ codes.T
    expected = sums * entering[:, None] * steps + layer.bias
    torch.testing.assert_close(Int8Linear(layer, "token")(hidden).double(), expected, rtol=0, atol=1e-6)
    exact = hidden.double() @ (codes * steps[:, None]).T + layer.bias
    torch.testing.assert_close(Int8Linear(layer, "float")(hidden).double(), exact, rtol=0, atol=1e-6)


@pytest.mark.parametrize("ranges", ["matrix", "group"])
@torch.no_grad()
def test_quantisation_aware_model_keeps_its_ranges(ranges: str) -> None:
    model = rounding_classifier(weight_ranges=ranges, weight_bits=6, groups=7)
    small = int8_model(model, "int8_static")
    for (name, rounding), (_, codes) in zip(
        ((n, p) for n, p in model.named_modules() if hasattr(p, "entering")),
        ((n, p) for n, p in small.named_modules() if isinstance(p, Int8Linear)),
        strict=True,
    ):
        assert torch.equal(codes.codes * codes.steps[:, None], rounding.prefix(None, None)[0]), name
        uses = range(len(rounding.entering.limits))
        limits = torch.cat([rounding.entering.effective_limits(use) for use in uses])
        assert torch.equal(codes.entering.limits, limits), name
        assert torch.equal(limits[0], rounding.entering.limits[0, 0, -1]), name
    tokens = inputs(3).tokens
    table = model.encoder.embedding.rows(tokens, model.encoder.embedding.token_table)
    assert torch.equal(small.encoder.embedding.rows(tokens, None), table)
    # both quantise the same way; they differ by floating-point rounding and the codes that it changes
    torch.testing.assert_close(small.outputs(*inputs(3)), model.outputs(*inputs(3)), rtol=0, atol=2e-2)


@torch.no_grad()
def test_compiled_layers_are_one_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = classifier()
    # full graph, but the eager backend, because generating code takes long
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager", fullgraph=True))
    write_artefact(model, tmp_path, Artefact(engine="compiled", precision="int8"))
    compiled = open_runner(tmp_path)
    torch.testing.assert_close(compiled.outputs(*inputs()), open_int8(tmp_path, "int8").outputs(*inputs()))


def test_integer_products_do_not_overflow() -> None:
    assert products_are_exact()
    codes = torch.randint(-127, 128, (7, 3072), dtype=torch.int8)
    weights = torch.randint(-127, 128, (5, 3072), dtype=torch.int8)
    assert torch.equal(int_product(codes, weights).double(), codes.double() @ weights.double().T)


def test_unsupported_models_raise(tmp_path: Path) -> None:
    model = classifier()
    with pytest.raises(InputError, match="needs samples"):
        int8_model(model, "int8_static")
    with pytest.raises(InputError, match="does not quantise activations; allowed: int8_weights"):
        int8_model(quantised(model, QuantisationConfig(rounds_activations=False)), "int8_static")
    with pytest.raises(InputError, match="activation_bits is 12"):
        int8_model(rounding_classifier(activation_bits=12), "int8_static")
    static = Artefact(engine="torch", precision="int8_static")
    with pytest.raises(InputError, match="was never measured"):
        write_artefact(quantised(model, QuantisationConfig()), tmp_path, static)
    with pytest.raises(InputError, match="one size"):
        int8_model(model, "int8").outputs(*inputs(), subnet=bertsmith.Subnet(width=0.5))
    write_artefact(model, tmp_path, Artefact(engine="torch", precision="int8"))
    with pytest.raises(InputError, match="int8 codes instead of weights"):
        bertsmith.load(tmp_path)

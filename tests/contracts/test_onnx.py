"""Every mixer, family and head, cut down at random and written as ONNX, says what PyTorch says, at any shape."""

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from cases import MIXER_CASES, TINY, padded_layout, tiny_model
from torch import Tensor

from bertsmith.batches.layout import SequenceLayout
from bertsmith.engines.artefact import open_runner, write_artefact
from bertsmith.engines.base import Artefact
from bertsmith.engines.onnx_graph import OPSET
from bertsmith.layers.branch import BranchConfig
from bertsmith.layers.feedforward import FeedForwardConfig
from bertsmith.layers.relative import RelativeConfig
from bertsmith.layers.subnet import Subnet
from bertsmith.models.build import build, extract
from bertsmith.models.config import LayerConfig
from bertsmith.models.factorise import factorise
from bertsmith.models.heads import HeadConfig
from bertsmith.models.heads.features import FeaturesConfig
from bertsmith.models.heads.pretraining import PoolerConfig
from bertsmith.models.heads.task import ClassifierConfig, EmbedderConfig, SpansConfig, TaggerConfig
from bertsmith.models.model import Model

LONGEST = TINY["longest"]
HEAD_KINDS = {"classifier", "tagger", "spans", "embedder"}
HEADS: dict[str, tuple[HeadConfig, ...]] = {
    "classifier": (ClassifierConfig(labels=("a", "b", "c"), hidden="gelu"),),
    "classifier of the pooler": (PoolerConfig(), ClassifierConfig(labels=("a", "b"), pooling="pooler")),
    "regression over layers": (
        ClassifierConfig(labels=("score",), pooling="mean", features=FeaturesConfig(layers=2, combine="weighted")),
    ),
    "tagger": (TaggerConfig(labels=("O", "B", "I")),),
    "spans": (SpansConfig(),),
    "embedder": (EmbedderConfig(),),
    "none": (),
}


def _stack(*mixers: str) -> Callable[[], Model]:
    """An encoder with a layer of each of the mixers, with what belongs beside them."""

    def made() -> Model:
        config = tiny_model("bert-tiny", layers=1).config
        relative = RelativeConfig(span=8, farthest=10, has_norm=True)
        layers = []
        for index, name in enumerate(mixers):
            feedforward = FeedForwardConfig(neurons=24, groups=1 + index % 2)
            branch = BranchConfig(taps=3, dropout=0.0) if index == 0 else None
            layers.append(LayerConfig(mixer=MIXER_CASES[name], feedforward=feedforward, dropout=0.0, branch=branch))
        encoder = config.encoder.changed(layers=tuple(layers), relative=relative)
        return build(config.changed(encoder=encoder), seed=0)

    return made


def _family(name: str) -> Callable[[], Model]:
    return lambda: tiny_model(name, layers=2)


CASES: dict[str, tuple[Callable[[], Model], str]] = {
    "attention": (_stack("full", "full in a window", "full rotary with wider values"), "classifier"),
    "causal": (_stack("full rotary in a window, causal", "disentangled causal", "favor causal"), "tagger"),
    "disentangled": (_stack("disentangled", "disentangled v1", "disentangled c2p"), "regression over layers"),
    "span_conv": (_stack("span_conv", "span_conv wide, one value"), "spans"),
    "dynamic_conv": (_stack("dynamic_conv", "dynamic_conv depthwise", "dynamic_conv causal"), "embedder"),
    "favor": (_stack("favor", "favor relu", "favor hyperbolic with wider values"), "classifier"),
    "albert-base": (_family("albert-base"), "classifier of the pooler"),
    "universal-base": (_family("universal-base"), "tagger"),
    "modern-small": (_family("modern-small"), "embedder"),
    "pre-norm, factorised": (lambda: factorise(tiny_model("bert-tiny pre-norm", layers=2), 5), "none"),
}


def _with_heads(model: Model, heads: tuple[HeadConfig, ...]) -> Model:
    """The model in float32 with other heads, all weights large enough to matter."""
    made = build(model.config.changed(heads=heads), seed=1)
    made.encoder = model.encoder
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in made.heads.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return made.float().eval()


def _random_cut(model: Model) -> Model:
    """A sub-network of its own heads and neurons in every layer; the same in layers that share them."""
    units = model.encoder.units
    heads = [int(torch.randint(1, unit.heads + 1, ())) for unit in units]
    neurons = [unit.groups * int(torch.randint(1, unit.neurons // unit.groups + 1, ())) for unit in units]
    if model.config.encoder.sharing != "none":
        heads, neurons = heads[:1] * len(units), neurons[:1] * len(units)
    return extract(model, Subnet(heads=tuple(heads), neurons=tuple(neurons)))


def _said(model: Model, tokens: Tensor, layout: SequenceLayout, types: Tensor | None) -> Tensor:
    with torch.no_grad():
        says = model.outputs if HEAD_KINDS & set(model.heads) else model.encoder
        return says(tokens, layout, types)


# the mixers of the three families that are exported most have a quick one
SLOW = {"causal", "pre-norm, factorised", "albert-base", "modern-small", "universal-base", "dynamic_conv", "favor"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in CASES]
)
def test_a_cut_model_says_the_same_as_onnx(name: str, tmp_path: Path) -> None:
    torch.manual_seed(7)
    make, head = CASES[name]
    model = _random_cut(_with_heads(make(), HEADS[head]))
    write_artefact(model, tmp_path, Artefact(engine="onnxruntime"))
    runner = open_runner(tmp_path, threads=1)
    assert runner.config == model.config
    for lengths in ([1], [LONGEST], [2, 1], [7, 3, 1], [5, 12, 1, 9, 2]):
        layout = padded_layout(lengths)
        tokens = torch.randint(0, TINY["vocabulary"], layout.is_token.shape)
        types = torch.randint(0, 2, tokens.shape) if model.config.encoder.embedding.types else None
        wanted, found = _said(model, tokens, layout, types), runner.outputs(tokens, layout, types)
        assert found.shape == wanted.shape
        if runner.is_for_tokens:
            wanted, found = wanted[layout.is_token], found[layout.is_token]
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))


def test_the_file_holds_standard_operations_and_nothing_of_where_it_was_made(tmp_path: Path) -> None:
    write_artefact(tiny_model("bert-tiny", layers=1), tmp_path, Artefact(engine="onnxruntime"))
    graph = onnx.load(tmp_path / "model.onnx")
    assert [(opset.domain, opset.version) for opset in graph.opset_import] == [("", OPSET)]
    assert {node.domain for node in graph.graph.node} == {""}
    assert b".py" not in (tmp_path / "model.onnx").read_bytes()


def test_every_kind_of_mixer_and_head_has_a_case() -> None:
    kinds, heads = set(), set()
    for make, head in CASES.values():
        kinds |= {layer.mixer.kind for layer in make().config.encoder.layers}
        heads |= {config.kind for config in HEADS[head]}
    assert kinds == {config.kind for config in MIXER_CASES.values()}
    assert heads >= HEAD_KINDS

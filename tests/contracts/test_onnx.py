"""Every mixer, family and head, randomly cut and exported to ONNX, equals PyTorch at any shape."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from cases import MIXER_CASES, TINY, padded_layout, tiny_model
from choosing import slow_unless
from elastic_cases import ENCODERS, NORMED
from torch import Tensor

from bertsmith.data.layout import SequenceLayout
from bertsmith.engines import onnx_trace
from bertsmith.engines.artefact import open_runner, write_artefact
from bertsmith.engines.base import Artefact
from bertsmith.engines.onnx_engine import OnnxRunner
from bertsmith.engines.onnx_graph import write_graph
from bertsmith.engines.onnx_session import open_session
from bertsmith.engines.onnx_trace import OPSET
from bertsmith.exporting import write_onnx
from bertsmith.files import read_json
from bertsmith.layers.block import BranchConfig
from bertsmith.layers.feedforward import FeedForwardConfig
from bertsmith.layers.positions import RelativeConfig
from bertsmith.layers.subnet import Subnet
from bertsmith.models.build import build, extract
from bertsmith.models.config import LayerConfig
from bertsmith.models.convert import factorise
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.heads import HeadConfig
from bertsmith.models.heads.base import FeaturesConfig
from bertsmith.models.heads.pretraining import MaskDecoderConfig, MaskedTokensConfig, PoolerConfig
from bertsmith.models.heads.task import ClassifierConfig, EmbedderConfig, SpansConfig, TaggerConfig
from bertsmith.models.model import Model

LONGEST = TINY["max_length"]
HEAD_KINDS = {"classifier", "tagger", "spans", "embedder"}
HEADS: dict[str, tuple[HeadConfig, ...]] = {
    "classifier": (ClassifierConfig(labels=("a", "b", "c"), hidden="gelu"),),
    "classifier of the pooler": (PoolerConfig(), ClassifierConfig(labels=("a", "b"), pooling="pooler")),
    "classifier of the last token": (ClassifierConfig(labels=("a", "b"), pooling="last"),),
    "regression over layers": (
        ClassifierConfig(labels=("score",), pooling="mean", features=FeaturesConfig(layers=2, combine="weighted")),
    ),
    "classifier after a normed layer": (ClassifierConfig(labels=("a", "b"), pooling="mean", hidden=NORMED),),
    "tagger": (TaggerConfig(labels=("O", "B", "I")),),
    "tagger after a normed layer": (TaggerConfig(labels=("O", "B", "I"), hidden=NORMED),),
    "spans": (SpansConfig(),),
    "spans after a normed layer": (SpansConfig(hidden=NORMED),),
    "embedder": (EmbedderConfig(projection=6),),
    "none": (),
    "masked tokens": (MaskedTokensConfig(),),
    "mask decoder": (MaskDecoderConfig(max_length=LONGEST), MaskedTokensConfig()),
}
PAIRS = [(family, head) for family in ENCODERS for head in HEADS if head != "mask decoder" or "deberta" in family]
"""Every family with every head; the mask decoder is DeBERTa's."""


def _stack(*mixers: str) -> Callable[[], Model]:
    """Return a builder of an encoder with one layer per mixer."""

    def made() -> Model:
        config = tiny_model("bert-tiny", layers=1).config
        relative = RelativeConfig(span=8, max_distance=10, has_norm=True)
        layers = []
        for index, name in enumerate(mixers):
            feedforward = FeedForwardConfig(neurons=24, groups=1 + index % 2)
            branch = BranchConfig(kernel_size=3, dropout=0.0) if index == 0 else None
            layers.append(LayerConfig(mixer=MIXER_CASES[name], feedforward=feedforward, dropout=0.0, branch=branch))
        encoder = config.encoder.changed(layers=tuple(layers), relative=relative)
        return build(config.changed(encoder=encoder), seed=0)

    return made


def _family(name: str) -> Callable[[], Model]:
    return lambda: tiny_model(name, layers=2)


CASES: dict[str, tuple[Callable[[], Model], str]] = {
    "attention": (_stack("full", "full in a window", "full rotary with wider values"), "classifier"),
    "causal": (_stack("full rotary in a window, causal", "disentangled causal", "favor causal"), "tagger"),
    "causal, last token": (_stack("full causal", "span_conv causal"), "classifier of the last token"),
    "disentangled": (_stack("disentangled", "disentangled v1", "disentangled c2p"), "regression over layers"),
    "span_conv": (_stack("span_conv", "span_conv wide, one value"), "spans"),
    "dynamic_conv": (_stack("dynamic_conv", "dynamic_conv depthwise", "dynamic_conv causal"), "embedder"),
    "long_short": (_stack("long_short", "long_short fixed, ungated", "long_short causal"), "spans"),
    "sparse": (_stack("full sparsemax", "disentangled entmax causal", "span_conv entmax"), "classifier"),
    "sparse by sorting": (_stack("full entmax15 causal", "disentangled sparsemax"), "tagger"),
    "multi_linear": (_stack("multi_linear", "multi_linear causal"), "spans"),
    "favor": (_stack("favor", "favor relu", "favor hyperbolic with wider values"), "classifier"),
    "mpnet-base": (_family("mpnet-base"), "classifier"),
    "albert-base": (_family("albert-base"), "classifier of the pooler"),
    "universal-base": (_family("universal-base"), "tagger"),
    "modern-small": (_family("modern-small"), "embedder"),
    "modern-small, tagging": (_family("modern-small"), "tagger after a normed layer"),
    "pre-norm, factorised": (lambda: factorise(tiny_model("bert-tiny pre-norm", layers=2), 5), "none"),
}


def _with_heads(model: Model, heads: tuple[HeadConfig, ...]) -> Model:
    """Return the model in float32 with other heads and weights large enough to matter."""
    made = build(model.config.changed(heads=heads), seed=1)
    made.encoder = model.encoder
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in made.heads.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return made.float().eval()


def _random_cut(model: Model) -> Model:
    """Extract a random sub-network with different heads and neurons in every layer that shares none."""
    units = model.encoder.units
    heads = [int(torch.randint(1, unit.heads + 1, ())) for unit in units]
    neurons = [unit.groups * int(torch.randint(1, unit.neurons // unit.groups + 1, ())) for unit in units]
    if model.config.encoder.sharing != "none":
        heads, neurons = heads[:1] * len(units), neurons[:1] * len(units)
    return extract(model, Subnet(heads=tuple(heads), neurons=tuple(neurons)))


def _torch_outputs(model: Model, tokens: Tensor, layout: SequenceLayout, types: Tensor | None) -> Tensor:
    """Return PyTorch's outputs of the sequences, or of all real tokens."""
    with torch.no_grad():
        if "masked_tokens" in model.heads:
            positions = layout.is_token.flatten().nonzero().squeeze(-1)
            states = model.run(EncoderInputs(tokens, layout, types), Want(masked_positions=positions)).masked_states
            return model.heads["masked_tokens"](states, model.token_table)
        if HEAD_KINDS & set(model.heads):
            found = model.outputs(tokens, layout, types)
            return found[layout.is_token] if model.is_for_tokens else found
        return model.encoder(tokens, layout, types)[layout.is_token]


def _max_difference(model: Model, runner: OnnxRunner, lengths: list[int]) -> float:
    """Return the largest difference, relative to the largest output if that exceeds 1; NaN if shapes differ."""
    layout = padded_layout(lengths)
    tokens = torch.randint(0, TINY["vocabulary"], layout.is_token.shape)
    types = torch.randint(0, 2, tokens.shape) if model.config.encoder.embedding.types else None
    expected, found = _torch_outputs(model, tokens, layout, types), runner.outputs(tokens, layout, types)
    found = found[layout.is_token] if runner.is_for_tokens else found
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1))


# mixers of the three most exported families
QUICK = ("attention",)


@pytest.mark.parametrize("name", slow_unless(QUICK, CASES))
def test_onnx_equals_pytorch_for_cut_models(name: str, tmp_path: Path) -> None:
    torch.manual_seed(7)
    make, head = CASES[name]
    model = _random_cut(_with_heads(make(), HEADS[head]))
    _check(model, tmp_path)


def _check(model: Model, folder: Path) -> None:
    """Compare ONNX with PyTorch: single sequences of every length up to the limit, and ragged batches."""
    write_onnx(model, folder, "float32", head="masked_tokens" if "masked_tokens" in model.heads else "auto")
    runner = open_runner(folder, threads=1)
    assert isinstance(runner, OnnxRunner)
    assert runner.config == model.config
    lengths = [*([length] for length in range(1, LONGEST + 1)), [2, 1], [7, 3, 1], [5, 12, 1, 9, 2], [LONGEST] * 3]
    if runner.graph.metadata.max_length is None:
        lengths.append([3 * LONGEST, 1])
    assert max(_max_difference(model, runner, own) for own in lengths) <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("family", "head"), PAIRS)
def test_onnx_equals_pytorch_for_every_family_and_head(family: str, head: str, tmp_path: Path) -> None:
    torch.manual_seed(7)
    model = _with_heads(tiny_model(family, layers=2), HEADS[head])
    # every other pair is cut, so that each family is tested whole and cut
    _check(_random_cut(model) if PAIRS.index((family, head)) % 2 else model, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", ENCODERS)
def test_8_bit_export_reports_its_error(family: str, tmp_path: Path) -> None:
    torch.manual_seed(7)
    model = _with_heads(tiny_model(family, layers=2), HEADS["classifier"])
    write_onnx(model, tmp_path, "int8")
    notes, runner = read_json(tmp_path / "onnx.json"), open_runner(tmp_path, threads=1)
    assert isinstance(runner, OnnxRunner)
    assert 0 < notes["largest_difference"] < 0.5
    assert 0 < notes["largest_absolute_difference"] <= 0.5 * notes["largest_output"]
    # the error on other inputs is similar to the reported one
    assert max(_max_difference(model, runner, lengths) for lengths in ([1], [LONGEST], [5, 12, 1])) < 0.5


@pytest.mark.parametrize("name", ["albert-base", pytest.param("deberta-v3-small", marks=pytest.mark.slow)])
def test_stacked_layers_equal_a_graph_of_the_whole_network(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ALBERT's shared layers, and layers of two shapes: the same operators and weights, equal outputs."""
    model = tiny_model(name, layers=4)
    if name != "albert-base":
        model = extract(model, Subnet(layers=(0, 1, 3), heads=(4, 2, 4), neurons=(16, 8, 16)))
    model = model.float().eval()
    paths = [tmp_path / f"{kind}.onnx" for kind in ("stacked", "whole")]
    assert onnx_trace.has_separate_layers(model.config, None)
    write_graph(model, paths[0], None)
    with monkeypatch.context() as patch:
        patch.setattr(onnx_trace, "has_separate_layers", lambda config, head: False)
        write_graph(model, paths[1], None)
    stacked, whole = (onnx.load(path).graph for path in paths)
    assert Counter(node.op_type for node in stacked.node) == Counter(node.op_type for node in whole.node)
    assert set(map(_weight_bytes, stacked.initializer)) == set(map(_weight_bytes, whole.initializer))
    runners = [OnnxRunner(open_session(path, 1), model.config, None, None) for path in paths]
    layout = padded_layout([7, 3, 1])
    tokens = torch.randint(0, TINY["vocabulary"], layout.is_token.shape)
    assert torch.equal(*(runner.outputs(tokens, layout) for runner in runners))


def _weight_bytes(tensor: onnx.TensorProto) -> bytes:
    return onnx.numpy_helper.to_array(tensor).tobytes()


def test_graph_has_standard_ops_and_no_local_paths(tmp_path: Path) -> None:
    write_artefact(tiny_model("bert-tiny", layers=1), tmp_path, Artefact(engine="onnxruntime"))
    graph = onnx.load(tmp_path / "model.onnx")
    assert [(opset.domain, opset.version) for opset in graph.opset_import] == [("", OPSET)]
    assert {node.domain for node in graph.graph.node} == {""}
    assert b".py" not in (tmp_path / "model.onnx").read_bytes()


def test_every_mixer_and_head_has_a_case() -> None:
    kinds, heads = set(), set()
    for make, head in CASES.values():
        kinds |= {layer.mixer.kind for layer in make().config.encoder.layers}
        heads |= {config.kind for config in HEADS[head]}
    assert kinds == {config.kind for config in MIXER_CASES.values()}
    assert heads >= HEAD_KINDS
    assert {config.kind for _, head in PAIRS for config in HEADS[head]} >= {
        *HEAD_KINDS,
        "masked_tokens",
        "mask_decoder",
    }

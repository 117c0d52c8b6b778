"""DeBERTa v1 and v2/v3 against `transformers`, in float64, on tiny random models: hidden states, gradients, weights.

`transformers` computes the scale of the scores in float32 and, in v1, the norms as well. The norms are replaced by
float64 ones here; the scale is exact where head_width · terms is a square and is why the tolerance is 1e-7 elsewhere.
"""

import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from theirs import TINY as COMMON
from theirs import assert_gradients_equal, batch, compare_masked_losses, make, ours, there_and_back
from torch import Tensor
from torch.nn.functional import layer_norm

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=".*torch.jit.script")  # raised by third-party code at import
    from transformers import (
        DebertaForMaskedLM,
        DebertaModel,
        DebertaV2ForMaskedLM,
        DebertaV2Model,
        PreTrainedModel,
    )
    from transformers.models.deberta.modeling_deberta import DebertaLayerNorm

import bertsmith
from bertsmith import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.models.model import Model
from bertsmith.ops.disentangled import BACKENDS

TINY = {
    **COMMON,
    "num_attention_heads": 2,
    "initializer_range": 0.2,
    "relative_attention": True,
    "position_biased_input": False,
    "pos_att_type": ["c2p", "p2c"],
}
BUCKETS = {"position_buckets": 6, "max_relative_positions": 10, "relative_clamp": "hf"}
V3 = {**BUCKETS, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
CASES: dict[str, tuple[type[PreTrainedModel], dict]] = {
    "v1": (DebertaModel, {}),
    "v1 near": (DebertaModel, {"max_relative_positions": 4}),
    "v1 c2p": (DebertaModel, {"pos_att_type": "c2p"}),
    "v1 p2c": (DebertaModel, {"pos_att_type": ["p2c"]}),
    "v1 no terms": (DebertaModel, {"pos_att_type": []}),
    "v1 absolute": (DebertaModel, {"position_biased_input": True, "type_vocab_size": 2}),
    "v1 like BERT": (DebertaModel, {"relative_attention": False, "pos_att_type": [], "position_biased_input": True}),
    "v2 own": (DebertaV2Model, {}),
    "v2 own buckets": (DebertaV2Model, {**BUCKETS, "norm_rel_ebd": "layer_norm"}),
    "v2 shared": (DebertaV2Model, {"share_att_key": True, "max_relative_positions": 5}),
    "v2 conv": (DebertaV2Model, {**V3, "conv_kernel_size": 3, "conv_act": "gelu"}),
    "v2 conv of five, tanh": (DebertaV2Model, {"conv_kernel_size": 5}),
    "v2 c2p": (DebertaV2Model, {**V3, "pos_att_type": "c2p"}),
    "v2 p2c": (DebertaV2Model, {**BUCKETS, "pos_att_type": "p2c"}),
    "v3": (DebertaV2Model, V3),
    "v3 absolute": (DebertaV2Model, {**V3, "position_biased_input": True}),
}
TOLERANCE = 1e-7
SHAPES = [([5, 5], 5), ([14, 1, 9], 16)]


@pytest.fixture(autouse=True)
def _exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: DebertaLayerNorm, hidden: Tensor) -> Tensor:
        return layer_norm(hidden, self.weight.shape, self.weight, self.bias, self.variance_epsilon)

    monkeypatch.setattr(DebertaLayerNorm, "forward", forward)


def compare(theirs: PreTrainedModel, model: Model, inputs: dict[str, Tensor], backend: str = "auto") -> None:
    real = inputs["attention_mask"].bool()
    expected, states = theirs(**inputs).last_hidden_state[real], model(**inputs, backend=backend)[real]
    torch.testing.assert_close(states, expected, rtol=0, atol=TOLERANCE)
    torch.manual_seed(0)  # the same for every backend
    weights = torch.randn_like(states) / states.shape[0]
    for result in (states, expected):
        (result * weights).sum().backward()
    assert_gradients_equal(model, theirs, TOLERANCE)


@pytest.mark.parametrize(("lengths", "length"), SHAPES)
@pytest.mark.parametrize("name", CASES)
def test_hidden_states_and_gradients_equal_theirs(name: str, lengths: list[int], length: int, tmp_path: Path) -> None:
    kind, changes = CASES[name]
    theirs = make(kind, 3, TINY | changes)
    model = ours(theirs, tmp_path)
    inputs = batch(lengths, length)
    if model.config.encoder.relative is not None and "no terms" not in name:
        real = inputs["attention_mask"].bool()
        with torch.no_grad():
            expected, states = theirs(**inputs).last_hidden_state[real], model(**inputs, backend="blocks")[real]
        torch.testing.assert_close(states, expected, rtol=0, atol=TOLERANCE)
    for backend in set(BACKENDS) - {"blocks", "grouped", "triton"}:
        theirs.zero_grad()
        model.zero_grad()
        compare(theirs, model, inputs, backend)
    packed = SequenceLayout.packed(torch.tensor([0, *lengths]).cumsum(0).int(), max(lengths))
    real = inputs["attention_mask"].bool()
    states = model.encoder(inputs["input_ids"][real], packed, inputs["token_type_ids"][real])
    torch.testing.assert_close(states, theirs(**inputs).last_hidden_state[real], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("length", [1, 2, 17, 127, 128, 129, 255, 256, 257, 511, 512, 513, 700])
@pytest.mark.parametrize("name", ["v1", "v3"])
def test_hidden_states_equal_theirs_at_every_length(name: str, length: int, tmp_path: Path) -> None:
    """The published spans and buckets, for distances within and beyond their range."""
    kind, changes = CASES[name]
    far = {"max_relative_positions": 512, "max_position_embeddings": 1024}
    far |= {"position_buckets": 256} if name == "v3" else {}
    small = {"hidden_size": 6, "num_hidden_layers": 2, "intermediate_size": 8}
    theirs = make(kind, 3, TINY | changes | small | far)
    compare(theirs, ours(theirs, tmp_path), batch([length, max(1, length - 5)], length))


def test_official_clamp_differs_only_for_far_distances(tmp_path: Path) -> None:
    theirs = make(DebertaV2Model, 3, TINY | V3 | {"relative_clamp": "official"})
    model = ours(theirs, tmp_path)
    assert model.config.encoder.relative.clamp == "official"
    for length, is_same in ((10, True), (11, False)):
        inputs = batch([length], length)
        expected = theirs(**inputs).last_hidden_state
        assert torch.allclose(model(**inputs), expected, rtol=0, atol=TOLERANCE) == is_same


@pytest.mark.parametrize(
    ("kind", "changes"), [(DebertaForMaskedLM, {}), (DebertaV2ForMaskedLM, V3), (DebertaV2ForMaskedLM, {})]
)
def test_masked_token_loss_and_gradients_equal_theirs(kind: type, changes: dict, tmp_path: Path) -> None:
    theirs = make(kind, 3, TINY | changes)
    compare_masked_losses(ours(theirs, tmp_path), theirs, batch([9, 4], 9), TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [*CASES, "v1 scores", "v3 scores"])
def test_weights_survive_import_and_export(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    kind, changes = {**CASES, "v1 scores": (DebertaForMaskedLM, {}), "v3 scores": (DebertaV2ForMaskedLM, V3)}[name]
    there_and_back(make(kind, 3, TINY | changes), dtype, tmp_path)


@pytest.mark.parametrize(
    ("name", "kind"), [("deberta-base", DebertaForMaskedLM), ("deberta-v2-xlarge", DebertaV2ForMaskedLM)]
)
def test_every_head_survives_import_and_export(name: str, kind: type, tmp_path: Path) -> None:
    from bertsmith.models.heads import MaskDecoderConfig, MaskedTokensConfig, PoolerConfig, ReplacedTokensConfig

    config = bertsmith.preset(name, width=24, layers=2, heads=2, vocabulary=67, max_length=20, init_std=0.2)
    heads = (
        MaskDecoderConfig(max_length=20),
        MaskedTokensConfig(epsilon=1e-7),
        PoolerConfig(activation="gelu"),
        ReplacedTokensConfig(adds_first=True),
    )
    model = bertsmith.build(config.model_copy(update={"heads": heads}), seed=1).double().eval()
    bertsmith.export(model, tmp_path / "once", native="always")
    again = bertsmith.load(tmp_path / "once")
    bertsmith.export(again, tmp_path / "twice", native="always")
    assert again.config == model.config
    for folder in ("once", "twice"):
        state = bertsmith.load(tmp_path / folder).state_dict()
        assert state.keys() == model.state_dict().keys()
        assert all(torch.equal(state[key], tensor) for key, tensor in model.state_dict().items())
    # transformers expects the official names with legacy = false, so its head is ours
    theirs = kind.from_pretrained(tmp_path / "once", dtype=torch.float64).eval()
    assert not theirs.config.legacy
    inputs = batch([9], 9)
    expected = model.head("masked_tokens")(model(**inputs), model.token_table)
    torch.testing.assert_close(theirs(**inputs).logits, expected, rtol=0, atol=1e-6)


def test_old_prefixes_are_read_and_unknown_tensors_raise(tmp_path: Path) -> None:
    theirs = make(DebertaV2ForMaskedLM, 3, TINY | V3)
    model = ours(theirs, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({name.replace("deberta.", "bert."): tensor for name, tensor in tensors.items()}, path)
    inputs = batch([7], 7)
    assert torch.equal(bertsmith.load(tmp_path)(**inputs), model(**inputs))
    save_file({**tensors, "lm_predictions.lm_head.bias": tensors["cls.predictions.bias"].clone()}, path)
    with pytest.raises(InputError, match="the same tensor under another name"):
        bertsmith.load(tmp_path)
    save_file({**tensors, "classifier.weight": torch.zeros(2, 24)}, path)
    with pytest.raises(InputError, match="that a deberta-v2 model does not have here"):
        bertsmith.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pos_att_type": ["p2p"]}, "pos_att_type is .* allowed: of c2p and p2c"),
        ({"relative_attention": False}, "needs relative_attention = true"),
        ({"embedding_size": 12}, "embedding_size is 12; allowed: 24"),
        ({"conv_kernel_size": 3, "conv_groups": 2}, "conv_groups is 2; allowed: 1"),
        ({"attention_head_size": 6}, "attention_head_size is 6; allowed: 12"),
        ({"position_buckets": 30, "max_relative_positions": 10}, "span is 30 and max_distance 10"),
    ],
)
def test_unsupported_config_raises(changes: dict, reason: str, tmp_path: Path) -> None:
    import json

    make(DebertaV2Model, 3, TINY).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(InputError, match=reason):
        bertsmith.load(tmp_path)

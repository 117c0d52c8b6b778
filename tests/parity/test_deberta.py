"""DeBERTa v1 and v2/v3 against `transformers`, in float64, on tiny random models: states, gradients, weights.

`transformers` computes the scale of the scores in float32 and, in v1, the norms as well. The norms are replaced by
float64 ones here; the scale is exact where head_width · terms is a square and is why the tolerance is 1e-7 elsewhere.
"""

import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import layer_norm

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=".*torch.jit.script")  # at import, which is none of ours
    from transformers import (
        DebertaConfig,
        DebertaForMaskedLM,
        DebertaModel,
        DebertaV2Config,
        DebertaV2ForMaskedLM,
        DebertaV2Model,
        PreTrainedModel,
    )
    from transformers.models.deberta.modeling_deberta import DebertaLayerNorm

import bertsmith
from bertsmith import SequenceLayout
from bertsmith.checkpoint.hf import TWINS
from bertsmith.checkpoint.names import to_theirs
from bertsmith.errors import InputError
from bertsmith.models.model import Model
from bertsmith.ops.disentangled import FORMS

TINY = {
    "vocab_size": 67,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 20,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
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
SHAPES = [([5, 5], 5), ([14, 1, 9], 16)]


@pytest.fixture(autouse=True)
def _exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: DebertaLayerNorm, hidden: Tensor) -> Tensor:
        return layer_norm(hidden, self.weight.shape, self.weight, self.bias, self.variance_epsilon)

    monkeypatch.setattr(DebertaLayerNorm, "forward", forward)


def make(kind: type[PreTrainedModel], **changes: object) -> PreTrainedModel:
    torch.manual_seed(3)
    config = (DebertaV2Config if "V2" in kind.__name__ else DebertaConfig)(**{**TINY, **changes})
    model = kind(config).double().eval()
    with torch.no_grad():  # fresh biases and norms are 0 and 1, which would hide a mistake
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def ours(theirs: PreTrainedModel, folder: Path) -> Model:
    theirs.save_pretrained(folder)
    return bertsmith.load(folder)


def batch(lengths: list[int], length: int) -> tuple[Tensor, Tensor]:
    # id 0 is the pad: transformers gives its row no gradient, so it must not stand for a real token
    mask = (torch.arange(length) < torch.tensor(lengths)[:, None]).long()
    return torch.randint(1, 67, mask.shape) * mask, mask


def gradients_as_theirs(model: Model) -> dict[str, Tensor]:
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    twin = TWINS[model.config.family]
    parts = frozenset(f"heads.{kind}" for kind in model.heads)
    rows = [row for row in twin.rows(model.config, parts) if row.ours in gradients]
    assert len(rows) == len(gradients)
    return to_theirs(rows, gradients)


def assert_gradients_equal(model: Model, theirs: PreTrainedModel) -> None:
    mine, compared = gradients_as_theirs(model), 0
    for name, parameter in theirs.named_parameters():
        name = name if name.startswith(("deberta.", "cls.")) else f"deberta.{name}"
        if parameter.grad is None:
            assert name not in mine
            continue
        torch.testing.assert_close(mine[name], parameter.grad, rtol=0, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")
        compared += 1
    assert compared == len(mine)


def compare(theirs: PreTrainedModel, model: Model, ids: Tensor, mask: Tensor, backend: str = "auto") -> None:
    real = mask.bool()
    types = torch.randint(0, 2, ids.shape) if theirs.config.type_vocab_size else torch.zeros_like(ids)
    expected = theirs(input_ids=ids, attention_mask=mask, token_type_ids=types).last_hidden_state[real]
    states = model(ids, mask, types, backend=backend)[real]
    torch.testing.assert_close(states, expected, rtol=0, atol=1e-7)
    weights = torch.randn_like(states) / states.shape[0]
    for result in (states, expected):
        (result * weights).sum().backward()
    assert_gradients_equal(model, theirs)


@pytest.mark.parametrize(("lengths", "length"), SHAPES)
@pytest.mark.parametrize("name", CASES)
def test_states_and_every_gradient(name: str, lengths: list[int], length: int, tmp_path: Path) -> None:
    kind, changes = CASES[name]
    theirs = make(kind, **changes)
    model = ours(theirs, tmp_path)
    ids, mask = batch(lengths, length)
    for backend in FORMS:
        theirs.zero_grad()
        model.zero_grad()
        compare(theirs, model, ids, mask, backend)
    packed = SequenceLayout.packed(torch.tensor([0, *lengths]).cumsum(0).int(), max(lengths))
    real, types = mask.bool(), torch.zeros_like(ids)
    expected = theirs(input_ids=ids, attention_mask=mask, token_type_ids=types).last_hidden_state[real]
    torch.testing.assert_close(model.encoder(ids[real], packed, types[real]), expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("length", [1, 2, 17, 127, 128, 129, 255, 256, 257, 511, 512, 513, 700])
@pytest.mark.parametrize("name", ["v1", "v3"])
def test_lengths(name: str, length: int, tmp_path: Path) -> None:
    """The published spans and buckets, up to and beyond what they tell apart."""
    kind, changes = CASES[name]
    far = {"max_relative_positions": 512, "max_position_embeddings": 1024}
    far |= {"position_buckets": 256} if name == "v3" else {}
    small = {"hidden_size": 6, "num_hidden_layers": 2, "intermediate_size": 8}
    theirs = make(kind, **{**changes, **small, **far})
    compare(theirs, ours(theirs, tmp_path), *batch([length, max(1, length - 5)], length))


def test_the_official_clamp_differs_only_where_it_should(tmp_path: Path) -> None:
    theirs = make(DebertaV2Model, **{**V3, "relative_clamp": "official"})
    model = ours(theirs, tmp_path)
    assert model.config.encoder.relative.clamp == "official"
    for length, is_same in ((10, True), (11, False)):
        ids, mask = batch([length], length)
        expected = theirs(input_ids=ids, attention_mask=mask).last_hidden_state
        assert torch.allclose(model(ids, mask), expected, rtol=0, atol=1e-7) == is_same


@pytest.mark.parametrize(
    ("kind", "changes"), [(DebertaForMaskedLM, {}), (DebertaV2ForMaskedLM, V3), (DebertaV2ForMaskedLM, {})]
)
def test_masked_tokens_with_every_gradient(kind: type, changes: dict, tmp_path: Path) -> None:
    theirs = make(kind, **changes)
    model = ours(theirs, tmp_path)
    ids, mask = batch([9, 4], 9)
    labels = torch.where((torch.rand(ids.shape) < 0.5) & mask.bool(), torch.randint(0, 67, ids.shape), -100)
    labels[:, 0] = 5
    expected = theirs(input_ids=ids, attention_mask=mask, labels=labels).loss
    places = (labels >= 0).flatten().nonzero().squeeze(-1)
    states, _ = model.masked_states(ids, SequenceLayout.padded(mask.bool()), None, places)
    scores = model.head("masked_tokens")(states, model.token_table)
    loss = torch.nn.functional.cross_entropy(scores, labels.flatten()[places])
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-7)
    expected.backward()
    loss.backward()
    assert_gradients_equal(model, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [*CASES, "v1 scores", "v3 scores"])
def test_weights_there_and_back(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    kind, changes = {**CASES, "v1 scores": (DebertaForMaskedLM, {}), "v3 scores": (DebertaV2ForMaskedLM, V3)}[name]
    theirs = make(kind, **changes).to(dtype)
    model = ours(theirs, tmp_path / "theirs")
    bertsmith.save(model, tmp_path / "ours")
    bertsmith.export(bertsmith.load(tmp_path / "ours"), tmp_path / "back")
    back = kind.from_pretrained(tmp_path / "back", dtype=dtype)
    assert back.config.architectures == [kind.__name__]
    assert back.state_dict().keys() == theirs.state_dict().keys()
    for key, tensor in theirs.state_dict().items():
        # whatever the dtype, their v1 makes its query and value biases in float32
        assert torch.equal(back.state_dict()[key], tensor.to(back.state_dict()[key].dtype)), key
    written, sent = load_file(tmp_path / "back/model.safetensors"), load_file(tmp_path / "theirs/model.safetensors")
    for key, tensor in sent.items():
        key = key if key.startswith(("deberta.", "cls.")) else f"deberta.{key}"
        assert torch.equal(written.pop(key), tensor), key
    assert not written
    assert bertsmith.load(tmp_path / "back").config == model.config


@pytest.mark.parametrize(
    ("name", "kind"), [("deberta-base", DebertaForMaskedLM), ("deberta-v2-xlarge", DebertaV2ForMaskedLM)]
)
def test_every_head_survives_the_exchange(name: str, kind: type, tmp_path: Path) -> None:
    from bertsmith.models.heads import MaskDecoderConfig, MaskedTokensConfig, PoolerConfig, ReplacedTokensConfig

    config = bertsmith.preset(name, width=24, layers=2, heads=2, vocabulary=67, longest=20, deviation=0.2)
    heads = (
        MaskDecoderConfig(longest=20),
        MaskedTokensConfig(epsilon=1e-7),
        PoolerConfig(activation="gelu"),
        ReplacedTokensConfig(adds_first=True),
    )
    model = bertsmith.build(config.model_copy(update={"heads": heads}), seed=1).double().eval()
    bertsmith.export(model, tmp_path / "once")
    again = bertsmith.load(tmp_path / "once")
    bertsmith.export(again, tmp_path / "twice")
    assert again.config == model.config
    for folder in ("once", "twice"):
        state = bertsmith.load(tmp_path / folder).state_dict()
        assert state.keys() == model.state_dict().keys()
        assert all(torch.equal(state[key], tensor) for key, tensor in model.state_dict().items())
    # the official names are the ones transformers wants with legacy = false, so its head is ours
    theirs = kind.from_pretrained(tmp_path / "once", dtype=torch.float64).eval()
    assert not theirs.config.legacy
    ids, mask = batch([9], 9)
    expected = model.head("masked_tokens")(model(ids, mask), model.token_table)
    torch.testing.assert_close(theirs(input_ids=ids, attention_mask=mask).logits, expected, rtol=0, atol=1e-6)


def test_old_prefixes_and_foreign_tensors(tmp_path: Path) -> None:
    theirs = make(DebertaV2ForMaskedLM, **V3)
    model = ours(theirs, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({name.replace("deberta.", "bert."): tensor for name, tensor in tensors.items()}, path)
    ids, mask = batch([7], 7)
    assert torch.equal(bertsmith.load(tmp_path)(ids, mask), model(ids, mask))
    save_file({**tensors, "lm_predictions.lm_head.bias": tensors["cls.predictions.bias"].clone()}, path)
    with pytest.raises(InputError, match="the same tensor under another name"):
        bertsmith.load(tmp_path)
    save_file({**tensors, "classifier.weight": torch.zeros(2, 24)}, path)
    with pytest.raises(InputError, match="no place in a deberta-v2 model here"):
        bertsmith.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pos_att_type": ["p2p"]}, "pos_att_type is .* allowed: of c2p and p2c"),
        ({"relative_attention": False}, "needs relative_attention = true"),
        ({"embedding_size": 12}, "embedding_size is 12; allowed: 24"),
        ({"conv_kernel_size": 3, "conv_groups": 2}, "conv_groups is 2; allowed: 1"),
        ({"attention_head_size": 6}, "attention_head_size is 6; allowed: 12"),
        ({"position_buckets": 30, "max_relative_positions": 10}, "span is 30 and farthest 10"),
    ],
)
def test_what_has_no_place_is_refused(changes: dict, reason: str, tmp_path: Path) -> None:
    import json

    make(DebertaV2Model).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(InputError, match=reason):
        bertsmith.load(tmp_path)

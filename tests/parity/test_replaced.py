"""Encoders and generators after replaced-token detection, in `transformers`: hidden states, logits, weights."""

import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import (
    BertModel,
    ConvBertForMaskedLM,
    ConvBertModel,
    ElectraForMaskedLM,
    ElectraForPreTraining,
    PreTrainedModel,
)

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=".*torch.jit.script")  # raised by third-party code at import
    from transformers import DebertaV2ForMaskedLM, DebertaV2Model

import bertsmith
from bertsmith.checkpoint.hf.reading import ADAPTERS
from bertsmith.checkpoint.hf.writing import first_difference, native_export
from bertsmith.checkpoint.source import GeneratorSource, ModelSource
from bertsmith.errors import InputError
from bertsmith.models.build import build
from bertsmith.models.generator import Part, part_of
from bertsmith.models.heads import HEADS, ReplacedTokensConfig
from bertsmith.models.heads.task import TASK_HEADS
from bertsmith.models.model import Model
from bertsmith.models.published import PRESETS, preset
from bertsmith.training.starting_model import pretraining_config

# heads 12 wide: their DeBERTa computes 1 / √(3 · head_width) in float32, which is exact for squares
RECIPE = """
[model]
preset = "{preset}"
overrides = {{ width = 48, layers = 2, heads = 4, max_length = 32, init_std = 0.2, {more} }}
[generator]
sharing = "{sharing}"
[sequences]
length = 32
micro_tokens = 256
[objective]
kind = "replaced_tokens"
[batch]
tokens = 256
[optimizer]
learning_rate = 1e-2
[run]
steps = 2
evaluate_batches = 1
"""


@dataclass(frozen=True)
class Case:
    """A run, and their classes that read its encoder and generator."""

    sharing: str
    more: str
    encoder: type[PreTrainedModel]
    generator: type[PreTrainedModel]


CASES = {
    "electra-small": Case("full", "embedding_width = 16", ElectraForPreTraining, ElectraForMaskedLM),
    "convbert-small": Case("none", "embedding_width = 16", ConvBertModel, ConvBertForMaskedLM),
    "deberta-v3-small": Case("gradient_disentangled", "span = 8, max_distance = 16", DebertaV2Model, DebertaV2Model),
    "bert-tiny": Case("full", "", BertModel, ElectraForMaskedLM),
}


@pytest.fixture(scope="module", params=CASES)
def trained(
    request: pytest.FixtureRequest, corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Case, Model]:
    """Return a model after two steps, in float64."""
    case, folder = CASES[request.param], tmp_path_factory.mktemp("run")
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(preset=request.param, sharing=case.sharing, more=case.more).replace(",  }", " }"))
    bertsmith.pretrain(recipe, data=corpus_folder, out=folder / "run", device="cpu")
    return case, bertsmith.load(folder / "run").double()


def inputs(model: Model) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, model.config.encoder.vocabulary, (2, 9), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("part", ["encoder", "generator"])
def test_encoder_and_generator_equal_theirs(part: Part, trained: tuple[Case, Model], tmp_path: Path) -> None:
    case, whole = trained
    kind, model = getattr(case, part), part_of(whole, part)
    bertsmith.export(whole, tmp_path / "hf", part=part, native="always")
    back = bertsmith.load(tmp_path / "hf")
    assert first_difference(model.config, back.config) is None
    tensors = back.state_dict()
    assert tensors.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensors[name], tensor), name
    theirs = kind.from_pretrained(tmp_path / "hf", dtype=torch.float64).eval()
    given = inputs(model)
    outputs = theirs(**given, output_hidden_states=True)
    states = model(**given)
    torch.testing.assert_close(states, outputs.hidden_states[-1], rtol=0, atol=1e-10)
    if kind is ElectraForPreTraining:
        torch.testing.assert_close(model.head("replaced_tokens")(states), outputs.logits, rtol=0, atol=1e-10)
    elif kind in (ElectraForMaskedLM, ConvBertForMaskedLM):
        scores = model.head("masked_tokens")(states, model.token_table)
        torch.testing.assert_close(scores, outputs.logits, rtol=0, atol=1e-10)


@pytest.mark.parametrize("sharing", ["none", "full", "gradient_disentangled"])
def test_export_does_not_change_the_model(sharing: str, tmp_path: Path) -> None:
    size = {"width": 16, "layers": 1, "heads": 2, "embedding_width": 8}
    choice, generator = ModelSource(preset="electra-small", overrides=size), GeneratorSource(sharing=sharing)
    model = build(pretraining_config(choice, generator, ("replaced_tokens",), 50), seed=0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = model.config
    for part in ("encoder", "generator"):
        bertsmith.export(model, tmp_path / part, part=part)
    assert model.config == config
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(InputError, match="part is 'decoder'; allowed: 'encoder', 'generator'"):
        bertsmith.export(model, tmp_path / "none", part="decoder")


EXPORTED_HEADS = {
    "bert": {"masked_tokens", "pooler", "next_sentence", "replaced_tokens"},
    "electra": {"masked_tokens", "replaced_tokens"},
    "albert": {"masked_tokens", "pooler"},
    "convbert": {"masked_tokens", "replaced_tokens"},
    "deberta": {"masked_tokens", "pooler", "replaced_tokens", "mask_decoder"},
    "deberta-v2": {"masked_tokens", "pooler", "replaced_tokens", "mask_decoder"},
    "modernbert": {"masked_tokens"},
    "marian": {"next_token"},
    "mpnet": {"masked_tokens", "pooler"},
}


# heads that cannot be exported together with a task head
BESIDE_A_TASK = {"exits", "teacher_width"}
FAMILIES = {preset(name).family for name in PRESETS}
REQUIRED = {"chart": {"labels": ("S",)}, "decoder_exits": {"layers": (1,)}}


@pytest.mark.parametrize("kind", sorted(HEADS.keys() - TASK_HEADS.keys() - BESIDE_A_TASK))
@pytest.mark.parametrize("adapter", [name for name in ADAPTERS if ADAPTERS[name].family in FAMILIES])
def test_head_is_exported_or_the_export_raises(adapter: str, kind: str) -> None:
    """A head is exported, or the export raises one sentence."""
    family = ADAPTERS[adapter].family
    name = next(name for name in PRESETS if preset(name).family == family)
    changes = {"positions": "sinusoid_halves"} if family == "transformer" else {}
    whole = preset(name, layers=1, width=48, heads=4, vocabulary=50, **changes)
    own = {head.kind: head for head in whole.heads}
    head = own.get(kind) or HEADS[kind](**REQUIRED.get(kind, {}))
    # as in their classes
    if kind == "replaced_tokens" and "deberta" in family:
        head = ReplacedTokensConfig(adds_first=True)
    elif kind == "masked_tokens" and family != "modern":
        layer = whole.encoder.layers[0]
        head = HEADS[kind](epsilon=layer.norm.epsilon, activation=layer.feedforward.activation)
    elif kind == "pooler" and "deberta" in family:
        head = HEADS[kind](activation="gelu")
    try:
        model = build(whole.changed(heads=(head,)), seed=0)
    except InputError:
        assert kind not in EXPORTED_HEADS[adapter]
        return
    if kind in EXPORTED_HEADS[adapter]:
        found, parts, *_ = native_export(model)
        assert f"heads.{kind}" in parts or adapter == "marian"
        remark = found.remark(model.config)
        says = remark is not None and "replaced_tokens" in remark
        assert says == (kind == "replaced_tokens" and adapter != "electra")
    else:
        with pytest.raises(InputError, match=r"^(this model cannot be exported as )?a Hugging Face [^\n]*" + kind):
            native_export(model)


def test_family_without_adapter_raises() -> None:
    model = build(preset("performer-small", layers=1, vocabulary=50).changed(heads=(ReplacedTokensConfig(),)))
    with pytest.raises(InputError, match="family is 'performer'; Hugging Face adapters exist for: bert, roberta"):
        native_export(model)


def test_generator_with_mask_decoder_is_exported_with_its_head(trained: tuple[Case, Model], tmp_path: Path) -> None:
    """DeBERTa's generator has a mask decoder, which transformers lacks; its head is exported nevertheless."""
    case, whole = trained
    if case.encoder is not DebertaV2Model:
        return
    bertsmith.export(whole, tmp_path / "hf", part="generator", native="always")
    theirs = DebertaV2ForMaskedLM.from_pretrained(tmp_path / "hf", dtype=torch.float64).eval()
    head = whole.generator.heads["masked_tokens"]
    assert torch.equal(theirs.state_dict()["lm_predictions.lm_head.dense.weight"], head.transform.weight)
    assert torch.equal(theirs.state_dict()["lm_predictions.lm_head.bias"], head.bias)
    assert "mask_decoder" in whole.generator.heads

"""Heads on causal encoders: the last token sees the whole text, the first one only itself."""

import pytest
import torch
from cases import FAMILIES, packed_layout, padded_layout, rows_of, tiny_model
from torch import Tensor

from bertsmith import SequenceLayout, Subnet
from bertsmith.errors import InputError
from bertsmith.models.build import build, extract
from bertsmith.models.config import ModelConfig
from bertsmith.models.heads import ExitsConfig, HeadConfig, ReplacedTokensConfig
from bertsmith.models.heads.base import RecurrentConfig
from bertsmith.models.heads.task import ClassifierConfig, EmbedderConfig
from bertsmith.models.model import Model
from bertsmith.objectives.replaced_tokens import ReplacedTokenDetectionConfig
from bertsmith.tasks.default_heads import classifier_head

LENGTHS = [5, 12, 1, 9, 2]
LAST = ClassifierConfig(labels=("a", "b", "c"), pooling="last", dropout=0.0)


def causal_config(name: str, *heads: HeadConfig) -> ModelConfig:
    return tiny_model(name).config.changed(heads=()).causal().changed(heads=heads)


def causal_model(name: str, *heads: HeadConfig) -> Model:
    """Build a causal network in float64 with weights large enough to matter."""
    model = build(causal_config(name, *heads), seed=0).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    return model


def sequences() -> list[Tensor]:
    return [torch.randint(0, 50, (length,)) for length in LENGTHS]


CAUSAL = [name for name in FAMILIES if tiny_model(name).config.decoder is None]


@pytest.mark.parametrize("name", CAUSAL)
def test_alone_equals_padded_equals_packed(name: str) -> None:
    model, rows = causal_model(name, LAST), sequences()
    alone = torch.cat([model.outputs(row[None], SequenceLayout.full(1, len(row))) for row in rows])
    padded = model.outputs(rows_of(rows, extra=2, padding=7), padded_layout(LENGTHS, extra=2))
    torch.testing.assert_close(padded, alone, rtol=0, atol=1e-10)
    packed = model.outputs(torch.cat(rows), packed_layout(LENGTHS, empty=2))
    torch.testing.assert_close(packed[: len(rows)], alone, rtol=0, atol=1e-10)
    assert packed.isfinite().all()


@pytest.mark.parametrize("name", ["bert-tiny", "convbert-small", "deberta-base", "performer-small"])
def test_every_token_changes_the_logits_and_has_a_gradient(name: str) -> None:
    model, row = causal_model(name, LAST), torch.randperm(50)[:9]
    layout = SequenceLayout.full(1, 9)
    logits = model.outputs(row[None], layout)
    logits.square().sum().backward()
    assert (model.encoder.embedding.token_table.grad[row].abs().sum(-1) > 0).all()
    for position in range(9):
        changed = row.clone()
        changed[position] = (changed[position] + 1) % 50
        assert (model.outputs(changed[None], layout) - logits).abs().max() > 1e-6


def test_first_token_of_a_causal_encoder_is_the_same_for_every_text() -> None:
    """The reason for the refusal: [CLS] stands first in every text and sees nothing else."""
    model, rows = causal_model("bert-tiny"), torch.randint(0, 50, (4, 6))
    rows[:, 0] = 2
    first = SequenceLayout.full(4, 6).first_tokens(model(rows))
    torch.testing.assert_close(first, first[:1].expand_as(first), rtol=0, atol=1e-12)


@pytest.mark.parametrize("pooling", ["first", "pooler"])
def test_first_token_is_refused_without_a_recurrent_layer(pooling: str) -> None:
    message = f"head has pooling '{pooling}', but in a causal encoder the first token sees itself alone"
    for head in (ClassifierConfig(labels=("a", "b"), pooling=pooling), EmbedderConfig(pooling=pooling)):
        with pytest.raises(InputError, match=message):
            causal_config("bert-tiny", head)
    recurrent = ClassifierConfig(labels=("a", "b"), pooling="first", recurrent=RecurrentConfig(width=8), dropout=0.0)
    model, row = causal_model("bert-tiny", recurrent), torch.randint(0, 50, (1, 6))
    changed = row.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 50
    layout = SequenceLayout.full(1, 6)
    assert (model.outputs(changed, layout) - model.outputs(row, layout)).abs().max() > 1e-6


def test_heads_that_read_the_first_token_are_refused() -> None:
    exits = ExitsConfig(layers=(1,), outputs=3, answer="classes", pooling="first")
    with pytest.raises(InputError, match="the exits head has pooling 'first', but in a causal encoder"):
        causal_config("bert-tiny", LAST, exits)
    with pytest.raises(InputError, match="adds_first is true, but in a causal encoder the first token sees itself"):
        ReplacedTokenDetectionConfig().network(causal_config("bert-tiny", ReplacedTokensConfig(adds_first=True)))


def test_exits_with_the_last_token() -> None:
    exits = ExitsConfig(layers=(1, 2), outputs=3, answer="classes", pooling="last", dropout=0.0)
    model, rows = causal_model("bert-tiny", LAST, exits), sequences()
    heads = model.heads["exits"]
    packed, padded = packed_layout(LENGTHS), padded_layout(LENGTHS)
    hidden = model.encoder(torch.cat(rows), packed)
    in_rows = model.encoder(rows_of(rows), padded)
    torch.testing.assert_close(heads(1, hidden, packed), heads(1, in_rows, padded), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["bert-tiny", "deberta-v3-xsmall"])
def test_extracted_sub_network_gives_the_same_logits(name: str) -> None:
    model, rows, subnet = causal_model(name, LAST), sequences(), Subnet(width=0.5, depth=0.67)
    layout = packed_layout(LENGTHS)
    expected = model.outputs(torch.cat(rows), layout, subnet=subnet)
    torch.testing.assert_close(extract(model, subnet).outputs(torch.cat(rows), layout), expected, rtol=0, atol=1e-10)


def test_rows_of_padding_only_are_finite() -> None:
    hidden = torch.randn(2, 3, 4)
    last = SequenceLayout.padded(torch.tensor([[True, True, False], [False, False, False]])).last_tokens(hidden)
    torch.testing.assert_close(last, hidden[[0, 1], [1, 0]])
    empty = packed_layout([2, 3], empty=1).last_tokens(torch.arange(5.0)[:, None])
    assert empty.flatten().tolist() == [1.0, 4.0, 4.0]


@pytest.mark.parametrize("name", ["bert-tiny", "electra-small", "deberta-base", "modern-small"])
def test_default_head_of_a_causal_encoder(name: str) -> None:
    config = tiny_model(name).config
    both, causal = (classifier_head(own, ("a", "b")) for own in (config, config.changed(heads=()).causal()))
    assert both.pooling != "last"
    assert causal.pooling == ("mean" if name.startswith("modern") else "last")
    assert causal.hidden == both.hidden
    assert not config.is_causal
    assert config.changed(heads=()).causal().is_causal

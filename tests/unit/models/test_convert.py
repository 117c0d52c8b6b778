"""Conversion between full attention and FAVOR+: same weights, and outputs that converge with more features."""

import pytest
import torch
from cases import TINY, padded_layout

import bertsmith
from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.layers.context import Memory
from bertsmith.models.config import ModelConfig
from bertsmith.models.model import Model
from bertsmith.models.published import overridable, preset


def tiny(name: str, **changes: object) -> Model:
    settings = {key: value for key, value in TINY.items() if key in overridable(name)} | changes
    return bertsmith.build(preset(name, **settings), seed=0).double().eval()


@pytest.mark.parametrize("name", ["bert-tiny", "electra-small"])
def test_round_trip_preserves_the_model(name: str) -> None:
    model = tiny(name)
    other = bertsmith.convert(model, "favor", features=24, feature_map="hyperbolic")
    mine, theirs = dict(model.named_parameters()), dict(other.named_parameters())
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert not set(map(id, mine.values())) & set(map(id, theirs.values()))
    assert other.encoder.blocks[1].mixer.projection.shape == (24, 6)
    assert other.encoder.blocks[1].mixer.projection.dtype == torch.float64
    assert not torch.equal(other.encoder.blocks[0].mixer.projection, other.encoder.blocks[1].mixer.projection)
    assert not other.training
    back = bertsmith.convert(other, "full")
    assert back.config == model.config
    ids = torch.randint(0, 50, (2, 9))
    assert torch.equal(back(ids), model(ids))


def test_family_changes_with_the_attention() -> None:
    model = tiny("bert-tiny")
    assert bertsmith.convert(model, "favor").config.family == "performer"
    assert bertsmith.convert(tiny("performer-small"), "full").config.family == "bert"
    assert bertsmith.convert(tiny("electra-small"), "favor").config.family == "electra"


def hybrid(*kinds: str) -> Model:
    """A tiny BERT with one layer of each kind of mixer."""
    config = tiny("bert-tiny", layers=len(kinds)).config.plain()
    for layer, kind in zip(config["encoder"]["layers"], kinds, strict=True):
        layer["mixer"] = {"kind": kind, "heads": TINY["heads"], "dropout": 0.0}
    return bertsmith.build(ModelConfig.parse(config), seed=0).eval()


def test_hybrid_layers_are_converted_and_checked() -> None:
    model = hybrid("dynamic_conv", "full", "favor")
    with pytest.raises(InputError, match="features is 0 and feature_map 'softmax' needs a"):
        bertsmith.convert(model, "favor", features=0)
    other = bertsmith.convert(model, "favor", features=8)
    assert [layer.mixer.kind for layer in other.config.encoder.layers] == ["dynamic_conv", "favor", "favor"]
    assert ModelConfig.parse(other.config.plain()) == other.config
    assert torch.equal(other.encoder.blocks[2].mixer.projection, model.encoder.blocks[2].mixer.projection)
    back = bertsmith.convert(other, "full")
    assert [layer.mixer.kind for layer in back.config.encoder.layers] == ["dynamic_conv", "full", "full"]
    assert (other.config.family, back.config.family) == ("performer", "bert")


def test_random_matrices_depend_on_the_seed() -> None:
    model = tiny("bert-tiny")
    first, second, other = (bertsmith.convert(model, "favor", features=8, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.encoder.blocks[2].mixer.projection, second.encoder.blocks[2].mixer.projection)
    assert not torch.equal(first.encoder.blocks[2].mixer.projection, other.encoder.blocks[2].mixer.projection)


def test_more_features_approximate_full_attention_better() -> None:
    model = tiny("bert-tiny", init_std=0.1)  # small weights, so small queries and keys
    ids, mask = torch.randint(0, 50, (4, 16)), padded_layout([16, 9, 3, 16]).is_token
    exact = model(ids, mask)[mask]
    errors = []
    for features in (16, 256, 4096):
        squares = []
        for seed in range(4):
            states = bertsmith.convert(model, "favor", features=features, seed=seed)(ids, mask)[mask]
            squares.append((states - exact).square().mean())
        errors.append((torch.stack(squares).mean() / exact.square().mean()).sqrt().item())
    assert errors[0] > 2.5 * errors[1] > 6 * errors[2]
    assert errors[2] < 0.01


def test_unsupported_conversions_raise() -> None:
    model = tiny("bert-tiny")
    with pytest.raises(InputError, match="to is 'favour'; did you mean 'favor'"):
        bertsmith.convert(model, "favour")
    with pytest.raises(
        InputError, match="feature is not a setting of the conversion to 'favor'; did you mean 'features'"
    ):
        bertsmith.convert(model, "favor", feature=3)
    with pytest.raises(InputError, match="convert to 'favor': features is -1"):
        bertsmith.convert(model, "favor", features=-1)
    with pytest.raises(InputError, match="this model has no attention to convert"):
        bertsmith.convert(model, "full")
    with pytest.raises(InputError, match="features is 0 and feature_map 'softmax' needs a"):
        bertsmith.convert(model, "favor", features=0)
    plain = bertsmith.convert(model, "favor", features=0, feature_map="relu")
    assert plain.encoder.blocks[0].mixer.projection.shape == (6, 6)


def test_converted_seq2seq_decodes_with_a_fixed_size_state() -> None:
    model = tiny("transformer-tiny")
    other = bertsmith.convert(model, "favor", features=12)
    assert {block.cross.projection.shape for block in other.decoder.blocks} == {(12, 6)}
    ids, mask = torch.randint(3, 50, (3, 6)), padded_layout([6, 2, 4]).is_token.long()
    written = other.generate(ids, mask, bertsmith.GenerationConfig(method="greedy", extra_length=3), start=1, end=2)
    for row, tokens in enumerate(written):
        length = int(mask[row].sum())
        states = other(ids[row : row + 1, :length])
        memory = Memory(states, SequenceLayout.full(1, length))
        prefix = torch.tensor([[1, *tokens]])
        scores = other.scores(other.decode(prefix, SequenceLayout.full(*prefix.shape), memory))
        assert scores.argmax(-1)[0, : len(tokens)].tolist() == tokens
    assert bertsmith.convert(other, "full").config == model.config

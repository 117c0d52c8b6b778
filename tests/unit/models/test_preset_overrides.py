"""Preset overrides of single parts: terms of the scores, mask decoder, embedding width, rotary positions, sharing."""

from itertools import product
from pathlib import Path

import pytest
import torch

import bertsmith
from bertsmith.checkpoint.source import GeneratorSource, ModelSource
from bertsmith.errors import InputError
from bertsmith.models.config import ModelConfig
from bertsmith.models.published import PRESETS, overridable
from bertsmith.recipes import read_recipe
from bertsmith.runs.pretrain import plain_settings
from bertsmith.training.pretraining import PretrainSettings
from bertsmith.training.starting_model import pretraining_config

SIZES = {"width": 12, "layers": 3, "heads": 2, "vocabulary": 40, "max_length": 16, "neurons": 24, "groups": 1}
SIZES |= {"embedding_width": 12, "span": 5, "max_distance": 9, "window": 3, "features": 8, "init_std": 0.3}
DEBERTA = ["deberta-base", "deberta-ap-base", "deberta-v2-xlarge", "deberta-v3-xsmall", "deberta-v3-xsmall-generator"]
DISENTANGLED = [*DEBERTA, "disentangled-small"]
ROTARY = ["albert-base", "bert-tiny", "electra-small", "electra-small-generator", "modern-small", "transformer-tiny"]
NOT_ROTARY = ["convbert-small", "deberta-base", "dynamicconv-base", "lightconv-base", "performer-small"]
ARCHITECTURES = list({architecture: name for name, (architecture, _) in reversed(PRESETS.items())}.values())
REFUSED = {
    ("modern-small", "all"): "the layers differ in their has_mixer_norm",
    ("modern-small", "mixer"): "the layers differ in their has_mixer_norm",
    ("dynamicconv-base", "all"): "the layers differ in their mixer",
    ("lightconv-base", "all"): "the layers differ in their mixer",
    ("lightconv-base", "mixer"): "the layers differ in their mixer",
    ("deberta-v2-xlarge", "all"): "the layers differ in their branch",
    **{
        (name, sharing): "the layers differ in their mixer"
        for name in ("lite-bert-small", "lite-transformer-small")
        for sharing in ("all", "mixer")
    },
}


def tiny(name: str, **overrides: object) -> ModelConfig:
    sizes = {key: value for key, value in SIZES.items() if key in overridable(name)}
    return bertsmith.preset(name, **{**sizes, **overrides})


def run(config: ModelConfig) -> torch.Tensor:
    model = bertsmith.build(config, seed=0).eval()
    tokens = torch.randint(0, 40, (2, 7), generator=torch.Generator().manual_seed(0))
    return model(tokens) if config.decoder is None else model.encoder(tokens, bertsmith.SequenceLayout.full(2, 7))


@pytest.mark.parametrize("name", DISENTANGLED)
@pytest.mark.parametrize("terms", list(product([True, False], repeat=2)))
def test_terms_of_the_scores_are_switched(name: str, terms: tuple[bool, bool]) -> None:
    config = tiny(name, content_to_position=terms[0], position_to_content=terms[1])
    for layer in config.encoder.layers:
        assert (layer.mixer.content_to_position, layer.mixer.position_to_content) == terms
    assert (config.encoder.relative is not None) == any(terms)
    model = bertsmith.build(config, seed=0)
    hidden = model(torch.randint(0, 40, (2, 7)))
    hidden.square().sum().backward()
    encoder = dict(model.encoder.named_parameters())
    assert all(parameter.grad is not None for parameter in encoder.values())  # no weights of an absent term


@pytest.mark.parametrize("name", DISENTANGLED)
def test_row_of_the_paper_by_override(name: str) -> None:
    released, printed = (run(tiny(name, position_to_content_row=row)) for row in ("code", "paper"))
    assert (released - printed).abs().max() > 1e-6
    with pytest.raises(InputError, match="position_to_content_row is 'paper', but position_to_content is false"):
        tiny(name, position_to_content_row="paper", position_to_content=False)


def test_mask_decoder_is_switched() -> None:
    for name in ("deberta-base", "deberta-v2-xlarge", "deberta-v3-xsmall-generator"):
        assert [head.kind for head in tiny(name).heads] == ["mask_decoder", "masked_tokens"]
        assert [head.kind for head in tiny(name, has_mask_decoder=False).heads] == ["masked_tokens"]
    assert [head.kind for head in tiny("deberta-ap-base").heads] == ["masked_tokens"]
    both = tiny("deberta-ap-base", has_mask_decoder=True)
    assert [head.kind for head in both.heads] == ["mask_decoder", "masked_tokens"]
    assert both.encoder.embedding.positions == "learned"
    with pytest.raises(InputError, match=r"preset 'deberta-v3-xsmall': .* belongs to its generator; override it there"):
        tiny("deberta-v3-xsmall", has_mask_decoder=False)


@pytest.mark.parametrize("has_mask_decoder", [None, True, False])
def test_mask_decoder_of_a_derived_generator(has_mask_decoder: bool | None) -> None:
    model = ModelSource(preset="disentangled-small", overrides={"layers": 2, "width": 16, "heads": 4})
    generator = GeneratorSource(width=0.5, has_mask_decoder=has_mask_decoder)
    config = pretraining_config(model, generator, ("replaced_tokens",), 40)
    assert config.generator is not None
    kinds = {head.kind for head in config.generator.model.heads}
    assert ("mask_decoder" in kinds) == (has_mask_decoder is not False)


def test_mask_decoder_of_a_given_generator_is_an_override() -> None:
    with pytest.raises(ValueError, match=r"for a preset set overrides\.has_mask_decoder"):
        GeneratorSource(preset="deberta-v3-xsmall-generator", has_mask_decoder=False)


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if bertsmith.preset(name).decoder is None])
def test_embedding_width_of_every_family(name: str) -> None:
    config = tiny(name, embedding_width=6)
    model = bertsmith.build(config, seed=0)
    assert model.encoder.embedding.token_table.shape == (40, 6)
    assert model(torch.randint(0, 40, (2, 7))).shape == (2, 7, 12)


def test_embedding_width_of_the_transformer_is_refused() -> None:
    with pytest.raises(InputError, match="a next_token head needs an embedding as wide as the hidden states"):
        tiny("transformer-tiny", embedding_width=6)


@pytest.mark.parametrize("name", ROTARY)
def test_rotary_replaces_absolute_positions(name: str) -> None:
    config = tiny(name, rotary=500.0, heads=2)
    assert config.encoder.embedding.positions == "none"
    assert config.encoder.layers[0].mixer.rotary == 500.0
    stacks = [config.encoder] if config.decoder is None else [config.encoder, config.decoder]
    for stack in stacks:
        assert stack.embedding.positions == "none"
        assert all(layer.mixer.rotary is not None for layer in stack.layers)
    tokens = torch.randint(0, 40, (1, 7), generator=torch.Generator().manual_seed(0))
    model = bertsmith.build(config, seed=0).eval()
    layout = bertsmith.SequenceLayout.full(1, 7)
    forwards, backwards = model.encoder(tokens, layout), model.encoder(tokens.flip(1), layout).flip(1)
    assert (forwards - backwards).abs().max() > 1e-6  # the order of the tokens matters


@pytest.mark.parametrize("name", NOT_ROTARY)
def test_rotary_without_full_attention_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=rf"preset '{name}': rotary is 10000, but the mixers are of kind .* need full"):
        tiny(name, rotary=10000.0)


def test_rotary_of_a_universal_transformer_is_refused() -> None:
    with pytest.raises(InputError, match="adds absolute positions before every step; leave rotary out"):
        tiny("universal-base", rotary=10000.0)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("sharing", ["all", "mixer", "feedforward"])
def test_sharing_of_every_family(name: str, sharing: str) -> None:
    reason = REFUSED.get((name, sharing))
    if reason is not None:
        with pytest.raises(InputError, match=rf"preset '{name}': .*{reason}"):
            tiny(name, sharing=sharing)
        return
    config = tiny(name, sharing=sharing)
    blocks = bertsmith.build(config, seed=0).encoder.blocks
    if sharing != "all":
        assert (blocks[0].mixer is blocks[-1].mixer) == (sharing == "mixer")
        assert (blocks[0].feedforward is blocks[-1].feedforward) == (sharing == "feedforward")
    assert run(config).isfinite().all()


def test_sharing_of_albert_is_switched_off() -> None:
    blocks = bertsmith.build(tiny("albert-base", sharing="none"), seed=0).encoder.blocks
    assert len({id(block.mixer) for block in blocks}) == 3


def test_overrides_in_recipes_and_on_the_command_line(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[model]\npreset = "deberta-base"\noverrides = { content_to_position = false, has_mask_decoder = false }\n'
    )
    flags = ["model.overrides.content_to_position=false", "model.overrides.has_mask_decoder=false"]
    named = plain_settings("deberta-base:crammed", None, None, flags, None)
    for plain in (read_recipe(recipe), named):
        config = PretrainSettings.parse(plain).model.config(100)
        assert config is not None
        assert not config.encoder.layers[0].mixer.content_to_position
        assert [head.kind for head in config.heads] == ["masked_tokens"]


def test_misspelt_override_names_the_nearest() -> None:
    with pytest.raises(InputError, match=r"content_to_positions is not a known setting; did you mean .*position"):
        bertsmith.preset("deberta-base", content_to_positions=False)

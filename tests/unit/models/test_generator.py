"""Generators: published ones, ones derived from an encoder, and the one that a run uses."""

import pytest
import torch

from bertsmith.checkpoint.source import GeneratorSource, ModelSource
from bertsmith.errors import InputError
from bertsmith.models.build import assemble
from bertsmith.models.config import GeneratorConfig
from bertsmith.models.cost import parameters
from bertsmith.models.generator import generator_of
from bertsmith.models.published import PRESETS, preset
from bertsmith.training.starting_model import pretraining_config

ENCODERS = [name for name in PRESETS if preset(name).decoder is None and not name.endswith("-generator")]
PUBLISHED = [name for name in PRESETS if f"{name}-generator" in PRESETS]


@pytest.mark.parametrize(
    ("name", "width", "heads", "layers", "embedding"),
    [
        ("electra-small", 64, 1, 12, 128),
        ("electra-base", 256, 4, 12, 768),
        ("electra-large", 256, 4, 24, 1024),
    ],
)
def test_generators_of_electra(name: str, width: int, heads: int, layers: int, embedding: int) -> None:
    config = preset(f"{name}-generator")
    encoder, block = config.encoder, config.encoder.layers[0]
    assert (encoder.width, block.mixer.heads, len(encoder.layers)) == (width, heads, layers)
    assert (encoder.embedding_width, block.feedforward.neurons) == (embedding, 4 * width)
    assert [head.kind for head in config.heads] == ["masked_tokens"]
    tables = (30522 + 512 + 2 + 2) * embedding + (embedding + 1) * width
    layer = 4 * width * (width + 1) + 2 * 4 * width * width + 5 * width + 4 * width
    head = (width + 1) * embedding + 2 * embedding + 30522
    assert parameters(config) == tables + layers * layer + head


@pytest.mark.parametrize("name", ENCODERS)
def test_every_encoder_has_a_generator(name: str) -> None:
    config = preset(name)
    generator = generator_of(config)
    assert generator.encoder.embedding_width == config.encoder.embedding_width
    assert generator.encoder.vocabulary == config.encoder.vocabulary
    kinds = {head.kind for head in generator.heads}
    assert "masked_tokens" in kinds
    assert ("mask_decoder" in kinds) == (
        config.family in ("deberta", "deberta-v2", "disentangled") and "-ap-" not in name
    )
    for mine, other in zip(config.encoder.layers, generator.encoder.layers, strict=False):
        head_width = mine.mixer.resolved_head_width(config.encoder.width)
        assert other.mixer.resolved_head_width(generator.encoder.width) == head_width
        assert mine.feedforward.groups == other.feedforward.groups
        assert mine.mixer.kind == other.mixer.kind
    if config.encoder.relative is not None:
        assert generator.encoder.relative == config.encoder.relative
    for sharing in ("none", "full", "gradient_disentangled"):
        both = config.changed(generator=GeneratorConfig(model=generator, sharing=sharing))
        with torch.device("meta"):
            model = assemble(both)
        whole = sum(parameter.numel() for part in (model.encoder, model.heads) for parameter in part.parameters())
        own = sum(parameter.numel() for parameter in model.generator.parameters())
        assert own < whole


@pytest.mark.parametrize("name", ["electra-small", "convbert-medium-small"])
def test_default_scale_matches_published_generators(name: str) -> None:
    derived, published = generator_of(preset(name)), preset(f"{name}-generator")
    assert derived.encoder.width == published.encoder.width
    assert len(derived.encoder.layers) == len(published.encoder.layers)
    assert derived == published


def test_scales_outside_0_to_1_raise() -> None:
    config = preset("bert-base")
    small = generator_of(config, width=0.5, depth=0.25)
    assert (small.encoder.width, len(small.encoder.layers), small.family) == (384, 3, "electra")
    assert generator_of(config, depth=0.5).encoder.width == 768
    for name in ("width", "depth"):
        for value in (0.0, 1.5):
            with pytest.raises(InputError, match=f"generator {name} is {value}; allowed: above 0, up to 1"):
                generator_of(config, **{name: value})


def _resolve(name: str, generator: GeneratorSource, **overrides: int) -> object:
    choice = ModelSource(preset=name, overrides=overrides)
    config = pretraining_config(choice, generator, ("replaced_tokens",), 1000)
    assert config.generator is not None
    return config.generator.model


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_generator_is_the_default(name: str) -> None:
    published = preset(f"{name}-generator", vocabulary=1000, max_length=64)
    kinds = {head.kind for head in published.heads}
    resolved = _resolve(name, GeneratorSource(), max_length=64)
    assert resolved.encoder == published.encoder
    assert {head.kind for head in resolved.heads} == kinds
    assert len(_resolve(name, GeneratorSource(), layers=2).encoder.layers) <= 2
    quarter = _resolve(name, GeneratorSource(width=0.25)).encoder
    assert quarter.width < preset(name).encoder.width
    assert len(quarter.layers) == len(preset(name).encoder.layers)


def test_published_generator_configs() -> None:
    assert len(PUBLISHED) == 11

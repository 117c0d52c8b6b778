"""Operations, parameters and memory of training, against counts by hand for a small network."""

import pytest

from bertsmith.checkpoint.source import GeneratorSource, ModelSource
from bertsmith.models.config import ModelConfig
from bertsmith.models.cost import parameters, parameters_by_part, training_flops, training_memory
from bertsmith.models.heads import MaskDecoderConfig, MaskedTokensConfig, PoolerConfig, ReplacedTokensConfig
from bertsmith.models.published import preset
from bertsmith.training.starting_model import pretraining_config

LENGTH, SHARE, VOCABULARY = 10, 0.2, 100
# per token: query, key, value, output 4 · 8², scores and values 2 · 10 · 8, feed-forward 2 · 8 · 32
LAYER = 2 * (4 * 64 + 2 * LENGTH * 8 + 2 * 8 * 32)


def electra(sharing: str) -> ModelConfig:
    """Return an encoder of width 8 with two layers on an embedding of 6, with a generator of width 4 and one layer."""
    size = {"width": 8, "layers": 2, "heads": 2, "embedding_width": 6, "max_length": 16}
    generator = GeneratorSource(width=0.5, depth=0.5, sharing=sharing)
    choice = ModelSource(preset="electra-small", overrides=size)
    return pretraining_config(choice, generator, ("replaced_tokens",), VOCABULARY)


@pytest.mark.parametrize("sharing", ["none", "full", "gradient_disentangled"])
def test_flops_include_generator_and_heads(sharing: str) -> None:
    encoder = 2 * 6 * 8 + 2 * LAYER + 2 * (8 * 8 + 8)
    generator = 2 * 6 * 4 + 2 * (4 * 16 + 2 * LENGTH * 4 + 2 * 4 * 16) + SHARE * 2 * (4 * 6 + 6 * VOCABULARY)
    assert training_flops(electra(sharing), LENGTH, SHARE) == pytest.approx(3 * (encoder + generator))


def test_parameters_by_part() -> None:
    tables, norm = (VOCABULARY + 16 + 2) * 6, 2 * 6
    layers = {width: 4 * width * (width + 1) + 8 * width * width + 5 * width + 4 * width for width in (4, 8)}
    encoder = tables + norm + 7 * 8 + 2 * layers[8] + (8 + 1) * 8 + 8 + 1
    own = 7 * 4 + layers[4] + (4 + 1) * 6 + 2 * 6 + VOCABULARY
    for sharing, shared in (("none", 0), ("full", tables + norm), ("gradient_disentangled", 0)):
        counts = parameters_by_part(electra(sharing))
        assert counts == {"parameters": encoder, "generator_parameters": own + tables + norm - shared}
        assert sum(counts.values()) == parameters(electra(sharing))
    assert parameters_by_part(preset("bert-tiny")) == {"parameters": parameters(preset("bert-tiny"))}


def test_mask_decoder_flops_count_targets_only() -> None:
    size = {"width": 8, "layers": 2, "heads": 2, "max_length": 16, "vocabulary": VOCABULARY}
    plain = preset("bert-tiny", **size).changed(heads=(MaskedTokensConfig(),))
    decoding = plain.changed(heads=(MaskDecoderConfig(max_length=16, steps=3), MaskedTokensConfig()))
    head = SHARE * 2 * (8 * 8 + 8 * VOCABULARY)
    assert training_flops(plain, LENGTH, SHARE) == pytest.approx(3 * (2 * LAYER + head))
    keys_and_values = 2 * 2 * 8 * 8
    decoder = 3 * (SHARE * (LAYER - keys_and_values) + keys_and_values)
    assert training_flops(decoding, LENGTH, SHARE) == pytest.approx(3 * (LAYER + decoder + head))
    pooling = decoding.changed(heads=(*decoding.heads, PoolerConfig()))
    assert training_flops(pooling, LENGTH, SHARE) == pytest.approx(3 * (2 * LAYER + decoder + head))


def test_flops_depend_on_the_heads() -> None:
    size = {"width": 8, "layers": 2, "heads": 2, "max_length": 16, "vocabulary": VOCABULARY}
    config = preset("bert-tiny", **size)
    assert training_flops(config.changed(heads=()), LENGTH, 1.0) == 3 * 2 * LAYER
    detecting = config.changed(heads=(ReplacedTokensConfig(),))
    assert training_flops(detecting, LENGTH, SHARE) == 3 * (2 * LAYER + 2 * (8 * 8 + 8))


@pytest.mark.parametrize("half", [True, False])
def test_memory_includes_the_generator(half: bool) -> None:
    config, size = electra("full"), 2 if half else 4
    saved = 1000 * 16 * (2 * 8 + 1 * 4) * size
    scores = 200 * VOCABULARY * (3 * size + 2 * 4)
    expected = 16 * parameters(config) + saved + scores
    assert training_memory(config, 1000, SHARE, half=half) == expected
    alone = preset("bert-tiny", width=8, layers=2, heads=2, vocabulary=VOCABULARY)
    expected = 16 * parameters(alone) + 1000 * 16 * 2 * 8 * size + 200 * VOCABULARY * 3 * size
    assert training_memory(alone, 1000, SHARE, half=half) == expected
    decoding = alone.changed(heads=(MaskDecoderConfig(steps=2), MaskedTokensConfig()))
    expected = 16 * parameters(decoding) + round(1000 * 16 * (1 + 2 * SHARE) * 8 * size) + 200 * VOCABULARY * 3 * size
    assert training_memory(decoding, 1000, SHARE, half=half) == pytest.approx(expected, abs=1)

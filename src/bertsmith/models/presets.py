"""The published sizes, each architecture whole in a few lines."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from pydantic import ValidationError

from bertsmith.errors import InputError, nearest
from bertsmith.layers.embedding import EmbeddingConfig
from bertsmith.layers.feedforward import FeedForwardConfig
from bertsmith.layers.mixers.full import FullConfig
from bertsmith.models.config import EncoderConfig, LayerConfig, ModelConfig
from bertsmith.models.heads import MaskedTokensConfig, NextSentenceConfig, PoolerConfig, ReplacedTokensConfig
from bertsmith.settings import explain


def bert(
    width: int,
    layers: int,
    heads: int,
    *,
    vocabulary: int = 30522,
    longest: int = 512,
    dropout: float = 0.1,
    deviation: float = 0.02,
) -> ModelConfig:
    """Devlin et al. 2019: post-norm, learned positions, two segments, masked tokens and next sentence."""
    layer = LayerConfig(
        mixer=FullConfig(heads=heads, dropout=dropout),
        feedforward=FeedForwardConfig(neurons=4 * width),
        dropout=dropout,
    )
    embedding = EmbeddingConfig(longest=longest, dropout=dropout)
    encoder = EncoderConfig(
        vocabulary=vocabulary, width=width, embedding=embedding, layers=(layer,) * layers, deviation=deviation
    )
    return ModelConfig(
        family="bert", encoder=encoder, heads=(MaskedTokensConfig(), PoolerConfig(), NextSentenceConfig())
    )


def electra(
    width: int,
    layers: int,
    heads: int,
    embedding_width: int,
    *,
    vocabulary: int = 30522,
    longest: int = 512,
    dropout: float = 0.1,
    deviation: float = 0.02,
) -> ModelConfig:
    """Clark et al. 2020, the discriminator: BERT's encoder on a factorised embedding, a score for every token."""
    layer = LayerConfig(
        mixer=FullConfig(heads=heads, dropout=dropout),
        feedforward=FeedForwardConfig(neurons=4 * width),
        dropout=dropout,
    )
    embedding = EmbeddingConfig(width=embedding_width, longest=longest, dropout=dropout)
    encoder = EncoderConfig(
        vocabulary=vocabulary, width=width, embedding=embedding, layers=(layer,) * layers, deviation=deviation
    )
    return ModelConfig(family="electra", encoder=encoder, heads=(ReplacedTokensConfig(),))


PRESETS: dict[str, Callable[..., ModelConfig]] = {
    "bert-tiny": partial(bert, width=128, layers=2, heads=2),
    "bert-mini": partial(bert, width=256, layers=4, heads=4),
    "bert-small": partial(bert, width=512, layers=4, heads=8),
    "bert-medium": partial(bert, width=512, layers=8, heads=8),
    "bert-base": partial(bert, width=768, layers=12, heads=12),
    "bert-large": partial(bert, width=1024, layers=24, heads=16),
    "electra-small": partial(electra, width=256, layers=12, heads=4, embedding_width=128),
    "electra-base": partial(electra, width=768, layers=12, heads=12, embedding_width=768),
    "electra-large": partial(electra, width=1024, layers=24, heads=16, embedding_width=1024),
}


def preset(name: str, **overrides: Any) -> ModelConfig:
    """The config of a published size; overrides are arguments of its family, such as layers=6 or vocabulary=8000."""
    if name not in PRESETS:
        raise InputError(f"preset is {name!r}; {nearest(name, PRESETS)} (all: {', '.join(PRESETS)})")
    make, allowed = PRESETS[name], overridable(name)
    for key in overrides:
        if key not in allowed:
            raise InputError(f"preset {name!r} has no setting {key!r}; {nearest(key, allowed)}")
    try:
        return make(**overrides)
    except ValidationError as error:
        raise InputError(f"preset {name!r}: {explain(ModelConfig, error)}") from None
    except TypeError as error:
        raise InputError(f"preset {name!r} with {overrides}: a value has a wrong type ({error})") from None


def overridable(name: str) -> tuple[str, ...]:
    """The settings of a preset that can be overridden."""
    return tuple(inspect.signature(PRESETS[name]).parameters)

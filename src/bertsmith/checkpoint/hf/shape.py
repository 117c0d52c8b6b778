"""The settings that BERT and those who came after it share in Hugging Face's config.json."""

from collections.abc import Mapping
from typing import Any

from bertsmith.checkpoint.hf.adapter import check_heads, read_activation, required, write_activation
from bertsmith.layers.elementwise import NormConfig
from bertsmith.layers.embedding import EmbeddingConfig
from bertsmith.layers.feedforward import FeedForwardConfig
from bertsmith.layers.mixers.base import MixerConfig
from bertsmith.layers.mixers.disentangled import DisentangledConfig
from bertsmith.layers.mixers.full import FullConfig
from bertsmith.layers.mixers.span_conv import SpanConvConfig
from bertsmith.models.config import EncoderConfig, LayerConfig
from bertsmith.models.heads import HeadConfig

_DEFAULTS = {
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-12,
}


def with_defaults(data: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    """Their settings, those a file leaves out filled in: `defaults` are a family's own."""
    return {**_DEFAULTS, **defaults, **data}


def read_encoder(
    data: dict[str, Any], mixer: MixerConfig, *, has_positions: bool = True, groups: int = 1, **others: Any
) -> EncoderConfig:
    """The encoder of equal layers that complete settings describe; `others` are more settings of ours."""
    width, dropout = required(data, "hidden_size"), float(data["hidden_dropout_prob"])
    norm = NormConfig(epsilon=data["layer_norm_eps"])
    embedding_width = data.get("embedding_size", width)
    embedding = EmbeddingConfig(
        width=None if embedding_width == width else embedding_width,
        positions="learned" if has_positions else "none",
        longest=data["max_position_embeddings"],
        types=data["type_vocab_size"],
        epsilon=norm.epsilon,
        dropout=dropout,
    )
    neurons, activation = required(data, "intermediate_size"), read_activation(data, "hidden_act")
    feedforward = FeedForwardConfig(neurons=neurons, activation=activation, groups=groups)
    layer = LayerConfig(mixer=mixer, feedforward=feedforward, norm=norm, dropout=dropout)
    return EncoderConfig(
        vocabulary=required(data, "vocab_size"),
        width=width,
        embedding=embedding,
        layers=(layer,) * required(data, "num_hidden_layers"),
        deviation=data["initializer_range"],
        **others,
    )


def read_heads(possible: Mapping[str, HeadConfig], parts: frozenset[str]) -> tuple[HeadConfig, ...]:
    """Of the heads a family may have, by their part, those that are there."""
    return tuple(possible[part] for part in sorted(parts & possible.keys()))


def write_encoder(
    encoder: EncoderConfig,
    mixer: FullConfig | SpanConvConfig | DisentangledConfig,
    model_type: str,
    *,
    kinds_of_heads: int = 1,
) -> dict[str, Any]:
    """Their settings for an encoder whose layers have this mixer; all kinds of heads are counted in theirs."""
    layer, heads = encoder.layers[0], kinds_of_heads * mixer.heads
    check_heads(heads, mixer.head_width, encoder.width, model_type)
    return {
        "model_type": model_type,
        "vocab_size": encoder.vocabulary,
        "hidden_size": encoder.width,
        "num_hidden_layers": len(encoder.layers),
        "num_attention_heads": heads,
        "intermediate_size": layer.feedforward.neurons,
        "hidden_act": write_activation(layer.feedforward.activation),
        "hidden_dropout_prob": layer.dropout,
        "attention_probs_dropout_prob": mixer.dropout,
        "max_position_embeddings": encoder.embedding.longest,
        "type_vocab_size": encoder.embedding.types,
        "initializer_range": encoder.deviation,
        "layer_norm_eps": layer.norm.epsilon,
        "tie_word_embeddings": True,
    }

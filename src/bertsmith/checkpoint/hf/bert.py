"""BERT and ELECTRA as Hugging Face names and configures them."""

from typing import Any

from bertsmith.checkpoint.hf.twin import (
    Twin,
    check_heads,
    first_mixer,
    read_activation,
    refuse,
    required,
    write_activation,
)
from bertsmith.checkpoint.names import Row, linear, row
from bertsmith.layers.embedding import EmbeddingConfig
from bertsmith.layers.feedforward import FeedForwardConfig
from bertsmith.layers.mixers.full import FullConfig
from bertsmith.layers.norm import NormConfig
from bertsmith.models.config import EncoderConfig, LayerConfig, ModelConfig
from bertsmith.models.heads import HEADS, HeadConfig, MaskedTokensConfig, ReplacedTokensConfig


def _encoder_rows(prefix: str) -> tuple[Row, ...]:
    ours, theirs = "encoder.blocks.{i}", f"{prefix}encoder.layer.{{i}}"
    return (
        row("encoder.embedding.token_table", f"{prefix}embeddings.word_embeddings.weight"),
        row("encoder.embedding.position.table", f"{prefix}embeddings.position_embeddings.weight"),
        row("encoder.embedding.type_table", f"{prefix}embeddings.token_type_embeddings.weight"),
        *linear("encoder.embedding.norm", f"{prefix}embeddings.LayerNorm"),
        *linear(f"{ours}.mixer.project", *(f"{theirs}.attention.self.{name}" for name in ("query", "key", "value"))),
        *linear(f"{ours}.mixer.output", f"{theirs}.attention.output.dense"),
        *linear(f"{ours}.mixer_norm", f"{theirs}.attention.output.LayerNorm"),
        *linear(f"{ours}.feedforward.expand", f"{theirs}.intermediate.dense"),
        *linear(f"{ours}.feedforward.contract", f"{theirs}.output.dense"),
        *linear(f"{ours}.feedforward_norm", f"{theirs}.output.LayerNorm"),
    )


def read_config(data: dict[str, Any], parts: frozenset[str], family: str) -> ModelConfig:
    source = "config.json"
    refuse(data, "position_embedding_type", "absolute")
    refuse(data, "is_decoder", False)
    refuse(data, "add_cross_attention", False)
    width, layers, heads = (required(data, key) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    vocabulary, neurons = required(data, "vocab_size"), required(data, "intermediate_size")
    activation = read_activation(data.get("hidden_act", "gelu"), source)
    norm = NormConfig(epsilon=data.get("layer_norm_eps", 1e-12))
    dropout = float(data.get("hidden_dropout_prob", 0.1))
    embedding_width = data.get("embedding_size", width)
    embedding = EmbeddingConfig(
        width=None if embedding_width == width else embedding_width,
        longest=data.get("max_position_embeddings", 512),
        types=data.get("type_vocab_size", 2),
        epsilon=norm.epsilon,
        dropout=dropout,
    )
    layer = LayerConfig(
        mixer=FullConfig(heads=heads, dropout=float(data.get("attention_probs_dropout_prob", 0.1))),
        feedforward=FeedForwardConfig(neurons=neurons, activation=activation),
        norm=norm,
        dropout=dropout,
    )
    encoder = EncoderConfig(
        vocabulary=vocabulary,
        width=width,
        embedding=embedding,
        layers=(layer,) * layers,
        deviation=data.get("initializer_range", 0.02),
    )
    kinds = [part.removeprefix("heads.") for part in sorted(parts) if part.startswith("heads.")]
    made = tuple(_read_head(kind, family, data, norm.epsilon) for kind in kinds)
    return ModelConfig(family=family, encoder=encoder, heads=made)


def _read_head(kind: str, family: str, data: dict[str, Any], epsilon: float) -> HeadConfig:
    activation = read_activation(data.get("hidden_act", "gelu"), "config.json")
    if kind == "masked_tokens":
        # ELECTRA's generator keeps gelu here whatever the layers use
        return MaskedTokensConfig(activation="gelu" if family == "electra" else activation, epsilon=epsilon)
    if kind == "replaced_tokens":
        return ReplacedTokensConfig(activation=activation)
    return HEADS[kind]()  # type: ignore[call-arg]


def write_config(config: ModelConfig, model_type: str) -> dict[str, Any]:
    encoder, layer = config.encoder, config.encoder.layers[0]
    mixer = first_mixer(encoder, FullConfig, model_type)
    check_heads(mixer.heads, mixer.head_width, encoder.width, model_type)
    data = {
        "model_type": model_type,
        "vocab_size": encoder.vocabulary,
        "hidden_size": encoder.width,
        "num_hidden_layers": len(encoder.layers),
        "num_attention_heads": mixer.heads,
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
    if model_type in ("electra", "albert"):
        data["embedding_size"] = encoder.embedding_width
    return data


def _bert_architecture(config: ModelConfig) -> str:
    kinds = {head.kind for head in config.heads}
    if {"masked_tokens", "next_sentence"} <= kinds:
        return "BertForPreTraining"
    if "masked_tokens" in kinds:
        return "BertForMaskedLM"
    return "BertForNextSentencePrediction" if "next_sentence" in kinds else "BertModel"


def _electra_architecture(config: ModelConfig) -> str:
    kinds = {head.kind for head in config.heads}
    if "replaced_tokens" in kinds:
        return "ElectraForPreTraining"
    return "ElectraForMaskedLM" if "masked_tokens" in kinds else "ElectraModel"


BERT = Twin(
    model_type="bert",
    family="bert",
    prefix="bert.",
    encoder=lambda config: _encoder_rows("bert."),
    optional={
        "heads.pooler": tuple(linear("heads.pooler.project", "bert.pooler.dense")),
        "heads.masked_tokens": (
            *linear("heads.masked_tokens.transform", "cls.predictions.transform.dense"),
            *linear("heads.masked_tokens.norm", "cls.predictions.transform.LayerNorm"),
            row("heads.masked_tokens.bias", "cls.predictions.bias"),
        ),
        "heads.next_sentence": tuple(linear("heads.next_sentence", "cls.seq_relationship")),
    },
    tied={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    read_config=lambda data, parts: read_config(data, parts, "bert"),
    write_config=lambda config: {"architectures": [_bert_architecture(config)], **write_config(config, "bert")},
)

ELECTRA = Twin(
    model_type="electra",
    family="electra",
    prefix="electra.",
    encoder=lambda config: _encoder_rows("electra."),
    optional={
        "encoder.embedding.widen": tuple(linear("encoder.embedding.widen", "electra.embeddings_project")),
        "heads.replaced_tokens": (
            *linear("heads.replaced_tokens.transform", "discriminator_predictions.dense"),
            *linear("heads.replaced_tokens.score", "discriminator_predictions.dense_prediction"),
        ),
        "heads.masked_tokens": (
            *linear("heads.masked_tokens.transform", "generator_predictions.dense"),
            *linear("heads.masked_tokens.norm", "generator_predictions.LayerNorm"),
            row("heads.masked_tokens.bias", "generator_lm_head.bias"),
        ),
    },
    tied={"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"},
    read_config=lambda data, parts: read_config(data, parts, "electra"),
    write_config=lambda config: {"architectures": [_electra_architecture(config)], **write_config(config, "electra")},
)

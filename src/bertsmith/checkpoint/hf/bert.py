"""Adapter for BERT, and the parts that ELECTRA and ALBERT share with it."""

from typing import Any

from bertsmith.checkpoint.hf.adapter import (
    REPLACED_TOKENS_ROWS,
    FamilyAdapter,
    HfConfig,
    HfSettings,
    first_mixer,
    missing_head_remark,
    read_encoder,
    read_heads,
    write_encoder,
)
from bertsmith.checkpoint.hf.names import STACKED, Conversion, Row, linear, row
from bertsmith.checkpoint.hf.task_heads import (
    dropout_setting,
    pooled_classifier,
    span_finder,
    token_tagger,
)
from bertsmith.layers.mixers.full import FullConfig
from bertsmith.models.config import EncoderConfig, ModelConfig
from bertsmith.models.heads import (
    HeadConfig,
    MaskedTokensConfig,
    NextSentenceConfig,
    PoolerConfig,
    ReplacedTokensConfig,
)

_DROPOUT = dropout_setting("classifier_dropout")


def encoder_rows(prefix: str, positions: Conversion = STACKED) -> tuple[Row, ...]:
    ours, theirs = "encoder.blocks.{i}", f"{prefix}encoder.layer.{{i}}"
    return (
        row("encoder.embedding.token_table", f"{prefix}embeddings.word_embeddings.weight"),
        row("encoder.embedding.position.table", f"{prefix}embeddings.position_embeddings.weight", conversion=positions),
        row("encoder.embedding.type_table", f"{prefix}embeddings.token_type_embeddings.weight"),
        *linear("encoder.embedding.norm", f"{prefix}embeddings.LayerNorm"),
        *linear(f"{ours}.mixer.project", *(f"{theirs}.attention.self.{name}" for name in ("query", "key", "value"))),
        *linear(f"{ours}.mixer.output", f"{theirs}.attention.output.dense"),
        *linear(f"{ours}.mixer_norm", f"{theirs}.attention.output.LayerNorm"),
        *linear(f"{ours}.feedforward.expand", f"{theirs}.intermediate.dense"),
        *linear(f"{ours}.feedforward.contract", f"{theirs}.output.dense"),
        *linear(f"{ours}.feedforward_norm", f"{theirs}.output.LayerNorm"),
    )


def read_bert_encoder(data: HfConfig, **others: Any) -> EncoderConfig:
    """Read an encoder with BERT's attention; a causal one is called a decoder there."""
    data.allow_only(position_embedding_type="absolute", add_cross_attention=False)
    heads, dropout = data.required("num_attention_heads"), float(data["attention_probs_dropout_prob"])
    mixer = FullConfig(heads=heads, dropout=dropout, is_causal=bool(data.get("is_decoder", False)))
    return read_encoder(data, mixer, **others)


def write_bert_encoder(encoder: EncoderConfig, model_type: str) -> HfSettings:
    mixer = first_mixer(encoder, FullConfig, model_type)
    settings = write_encoder(encoder, mixer, model_type)
    return {**settings, "is_decoder": True} if mixer.is_causal else settings


def _read(data: HfConfig, parts: frozenset[str]) -> ModelConfig:
    encoder = read_bert_encoder(data.with_defaults())
    layer = encoder.layers[0]
    heads: dict[str, HeadConfig] = {
        "heads.masked_tokens": MaskedTokensConfig(activation=layer.feedforward.activation, epsilon=layer.norm.epsilon),
        "heads.next_sentence": NextSentenceConfig(),
        "heads.pooler": PoolerConfig(),
        "heads.replaced_tokens": ReplacedTokensConfig(activation=layer.feedforward.activation),
    }
    return ModelConfig(family="bert", encoder=encoder, heads=read_heads(heads, parts))


def _write(config: ModelConfig) -> HfSettings:
    return {"architectures": [_architecture(config)], **write_bert_encoder(config.encoder, "bert")}


def _architecture(config: ModelConfig) -> str:
    kinds = {head.kind for head in config.heads}
    if {"masked_tokens", "next_sentence"} <= kinds:
        return "BertForPreTraining"
    if "masked_tokens" in kinds:
        return "BertLMHeadModel" if config.encoder.layers[0].mixer.is_causal else "BertForMaskedLM"
    return "BertForNextSentencePrediction" if "next_sentence" in kinds else "BertModel"


BERT = FamilyAdapter(
    model_type="bert",
    family="bert",
    prefix="bert.",
    encoder_rows=lambda config: encoder_rows("bert."),
    optional_rows={
        "heads.pooler": tuple(linear("heads.pooler.project", "bert.pooler.dense")),
        "heads.masked_tokens": (
            *linear("heads.masked_tokens.transform", "cls.predictions.transform.dense"),
            *linear("heads.masked_tokens.norm", "cls.predictions.transform.LayerNorm"),
            row("heads.masked_tokens.bias", "cls.predictions.bias"),
        ),
        "heads.next_sentence": tuple(linear("heads.next_sentence", "cls.seq_relationship")),
        "heads.replaced_tokens": REPLACED_TOKENS_ROWS,
    },
    tied={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    read_config=_read,
    write_config=_write,
    remark=missing_head_remark,
    task_heads=(
        pooled_classifier("BertForSequenceClassification", _DROPOUT),
        pooled_classifier("BertForMultipleChoice", _DROPOUT, is_choice=True),
        token_tagger("BertForTokenClassification", _DROPOUT),
        span_finder("BertForQuestionAnswering"),
    ),
)

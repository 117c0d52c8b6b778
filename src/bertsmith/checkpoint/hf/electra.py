"""Adapter for ELECTRA: BERT's encoder with a factorised embedding."""

from bertsmith.checkpoint.hf.adapter import REPLACED_TOKENS_ROWS, FamilyAdapter, HfConfig, HfSettings, read_heads
from bertsmith.checkpoint.hf.bert import encoder_rows, read_bert_encoder, write_bert_encoder
from bertsmith.checkpoint.hf.names import linear, row
from bertsmith.checkpoint.hf.task_heads import (
    dropout_setting,
    hidden_classifier,
    span_finder,
    summary_classifiers,
    token_tagger,
)
from bertsmith.models.config import ModelConfig
from bertsmith.models.heads import HeadConfig, MaskedTokensConfig, ReplacedTokensConfig

_DROPOUT = dropout_setting("classifier_dropout")


def _read(data: HfConfig, parts: frozenset[str]) -> ModelConfig:
    encoder = read_bert_encoder(data.with_defaults())
    layer = encoder.layers[0]
    heads: dict[str, HeadConfig] = {
        "heads.masked_tokens": MaskedTokensConfig(epsilon=layer.norm.epsilon),  # always gelu
        "heads.replaced_tokens": ReplacedTokensConfig(activation=layer.feedforward.activation),
    }
    return ModelConfig(family="electra", encoder=encoder, heads=read_heads(heads, parts))


def _write(config: ModelConfig) -> HfSettings:
    shape = write_bert_encoder(config.encoder, "electra")
    return {"architectures": [_architecture(config)], **shape, "embedding_size": config.encoder.embedding_width}


def _architecture(config: ModelConfig) -> str:
    kinds = {head.kind for head in config.heads}
    if "replaced_tokens" in kinds:
        return "ElectraForPreTraining"
    if "masked_tokens" in kinds:
        return "ElectraForCausalLM" if config.encoder.layers[0].mixer.is_causal else "ElectraForMaskedLM"
    return "ElectraModel"


ELECTRA = FamilyAdapter(
    model_type="electra",
    family="electra",
    prefix="electra.",
    encoder_rows=lambda config: encoder_rows("electra."),
    optional_rows={
        "encoder.embedding.widen": tuple(linear("encoder.embedding.widen", "electra.embeddings_project")),
        "heads.replaced_tokens": REPLACED_TOKENS_ROWS,
        "heads.masked_tokens": (
            *linear("heads.masked_tokens.transform", "generator_predictions.dense"),
            *linear("heads.masked_tokens.norm", "generator_predictions.LayerNorm"),
            row("heads.masked_tokens.bias", "generator_lm_head.bias"),
        ),
    },
    tied={"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"},
    read_config=_read,
    write_config=_write,
    task_heads=(
        hidden_classifier("ElectraForSequenceClassification", ("classifier.dense", "classifier.out_proj"), _DROPOUT),
        *summary_classifiers("ElectraForMultipleChoice"),
        token_tagger("ElectraForTokenClassification", _DROPOUT),
        span_finder("ElectraForQuestionAnswering"),
    ),
)

"""Adapters for RoBERTa and XLM-RoBERTa: BERT's encoder with positions counted from the id after padding."""

import torch

from bertsmith.checkpoint.hf.adapter import FamilyAdapter, HfConfig, HfSettings, not_exportable, read_heads
from bertsmith.checkpoint.hf.bert import encoder_rows, read_bert_encoder, write_bert_encoder
from bertsmith.checkpoint.hf.names import linear, reshaped, row
from bertsmith.checkpoint.hf.task_heads import (
    dropout_setting,
    hidden_classifier,
    layers_dropout,
    pooled_classifier,
    span_finder,
    token_tagger,
)
from bertsmith.models.config import ModelConfig
from bertsmith.models.heads import HeadConfig, MaskedTokensConfig, PoolerConfig

PAD = 1
UNUSED_POSITIONS = PAD + 1
"""Rows of the position table before the first token's; written as zeros."""
_DROPOUT = dropout_setting("classifier_dropout")
POSITIONS = reshaped(
    to_ours=lambda table: table[UNUSED_POSITIONS:],
    to_theirs=lambda table: torch.cat([table.new_zeros(UNUSED_POSITIONS, table.shape[1]), table]),
)


def _adapter(model_type: str, name: str) -> FamilyAdapter:
    def read(data: HfConfig, parts: frozenset[str]) -> ModelConfig:
        data = data.with_defaults()
        data.allow_only(pad_token_id=PAD)
        length = data["max_position_embeddings"] - UNUSED_POSITIONS
        encoder = read_bert_encoder(HfConfig({**data, "max_position_embeddings": length}))
        heads: dict[str, HeadConfig] = {
            "heads.masked_tokens": MaskedTokensConfig(epsilon=encoder.layers[0].norm.epsilon),  # always gelu
            "heads.pooler": PoolerConfig(),
        }
        return ModelConfig(family=model_type, encoder=encoder, heads=read_heads(heads, parts))

    def write(config: ModelConfig) -> HfSettings:
        if config.encoder.layers[0].mixer.is_causal:
            raise not_exportable(model_type, "it is causal")
        is_masked = any(head.kind == "masked_tokens" for head in config.heads)
        return {
            "architectures": [f"{name}ForMaskedLM" if is_masked else f"{name}Model"],
            **write_bert_encoder(config.encoder, model_type),
            "max_position_embeddings": config.encoder.embedding.max_length + UNUSED_POSITIONS,
            "pad_token_id": PAD,
        }

    return FamilyAdapter(
        model_type=model_type,
        family=model_type,
        prefix="roberta.",
        encoder_rows=lambda config: encoder_rows("roberta.", positions=POSITIONS),
        optional_rows={
            "heads.pooler": tuple(linear("heads.pooler.project", "roberta.pooler.dense")),
            "heads.masked_tokens": (
                *linear("heads.masked_tokens.transform", "lm_head.dense"),
                *linear("heads.masked_tokens.norm", "lm_head.layer_norm"),
                row("heads.masked_tokens.bias", "lm_head.bias"),
            ),
        },
        tied={
            "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
            "lm_head.decoder.bias": "lm_head.bias",
        },
        read_config=read,
        write_config=write,
        task_heads=(
            hidden_classifier(
                f"{name}ForSequenceClassification",
                ("classifier.dense", "classifier.out_proj"),
                _DROPOUT,
                fixed="tanh",
            ),
            pooled_classifier(f"{name}ForMultipleChoice", (layers_dropout, lambda dropout: {}), is_choice=True),
            token_tagger(f"{name}ForTokenClassification", _DROPOUT),
            span_finder(f"{name}ForQuestionAnswering"),
        ),
    )


ROBERTA, XLM_ROBERTA = _adapter("roberta", "Roberta"), _adapter("xlm-roberta", "XLMRoberta")

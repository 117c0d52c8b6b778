"""Adapter for ALBERT."""

from bertsmith.checkpoint.hf.adapter import FamilyAdapter, HfConfig, HfSettings, not_exportable, read_heads
from bertsmith.checkpoint.hf.bert import read_bert_encoder, write_bert_encoder
from bertsmith.checkpoint.hf.names import Row, linear, row
from bertsmith.checkpoint.hf.task_heads import (
    dropout_setting,
    pooled_classifier,
    span_finder,
    token_tagger,
)
from bertsmith.errors import InputError
from bertsmith.models.config import ModelConfig
from bertsmith.models.heads import HeadConfig, MaskedTokensConfig, PoolerConfig

_DROPOUT = dropout_setting("classifier_dropout_prob", 0.1)


def _rows() -> tuple[Row, ...]:
    # all layers share one: ours is named as layer 0, theirs as the only layer of the only group
    ours, theirs = "encoder.blocks.0", "albert.encoder.albert_layer_groups.0.albert_layers.0"
    return (
        row("encoder.embedding.token_table", "albert.embeddings.word_embeddings.weight"),
        row("encoder.embedding.position.table", "albert.embeddings.position_embeddings.weight"),
        row("encoder.embedding.type_table", "albert.embeddings.token_type_embeddings.weight"),
        *linear("encoder.embedding.norm", "albert.embeddings.LayerNorm"),
        *linear("encoder.embedding.widen", "albert.encoder.embedding_hidden_mapping_in"),
        *linear(f"{ours}.mixer.project", *(f"{theirs}.attention.{name}" for name in ("query", "key", "value"))),
        *linear(f"{ours}.mixer.output", f"{theirs}.attention.dense"),
        *linear(f"{ours}.mixer_norm", f"{theirs}.attention.LayerNorm"),
        *linear(f"{ours}.feedforward.expand", f"{theirs}.ffn"),
        *linear(f"{ours}.feedforward.contract", f"{theirs}.ffn_output"),
        *linear(f"{ours}.feedforward_norm", f"{theirs}.full_layer_layer_norm"),
    )


def _read(data: HfConfig, parts: frozenset[str]) -> ModelConfig:
    for key, why in (("num_hidden_groups", "all layers share one group"), ("inner_group_num", "a group is one layer")):
        if data.get(key, 1) != 1:
            raise InputError(f"config.json: {key} is {data[key]!r}; allowed: 1, because {why}")
    dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    data = data.with_defaults(hidden_act="gelu_new", embedding_size=128, **dropout)
    if data["embedding_size"] == data.get("hidden_size"):
        raise InputError(
            f"config.json: embedding_size is {data['embedding_size']!r}, equal to hidden_size; allowed: another "
            "size, since the embedding projection would be missing here"
        )
    data.allow_only(is_decoder=False)
    encoder = read_bert_encoder(data, sharing="all")
    layer = encoder.layers[0]
    heads: dict[str, HeadConfig] = {
        "heads.masked_tokens": MaskedTokensConfig(activation=layer.feedforward.activation, epsilon=layer.norm.epsilon),
        "heads.pooler": PoolerConfig(),
    }
    return ModelConfig(family="albert", encoder=encoder, heads=read_heads(heads, parts))


def _write(config: ModelConfig) -> HfSettings:
    encoder = config.encoder
    if encoder.embedding_width == encoder.width:
        raise not_exportable("albert", "its embedding is not factorised")
    if encoder.layers[0].mixer.is_causal:
        raise not_exportable("albert", "it is causal")
    is_masked = any(head.kind == "masked_tokens" for head in config.heads)
    return {
        "architectures": ["AlbertForMaskedLM" if is_masked else "AlbertModel"],
        **write_bert_encoder(encoder, "albert"),
        "embedding_size": encoder.embedding_width,
        "num_hidden_groups": 1,
        "inner_group_num": 1,
    }


ALBERT = FamilyAdapter(
    model_type="albert",
    family="albert",
    prefix="albert.",
    encoder_rows=lambda config: _rows(),
    optional_rows={
        "heads.pooler": tuple(linear("heads.pooler.project", "albert.pooler")),
        "heads.masked_tokens": (
            *linear("heads.masked_tokens.transform", "predictions.dense"),
            *linear("heads.masked_tokens.norm", "predictions.LayerNorm"),
            row("heads.masked_tokens.bias", "predictions.bias"),
        ),
    },
    tied={
        "predictions.decoder.weight": "albert.embeddings.word_embeddings.weight",
        "predictions.decoder.bias": "predictions.bias",
    },
    read_config=_read,
    write_config=_write,
    task_heads=(
        pooled_classifier("AlbertForSequenceClassification", _DROPOUT),
        pooled_classifier("AlbertForMultipleChoice", _DROPOUT, is_choice=True),
        token_tagger("AlbertForTokenClassification", _DROPOUT),
        span_finder("AlbertForQuestionAnswering"),
    ),
)

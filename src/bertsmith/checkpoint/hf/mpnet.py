"""Adapter for MPNet: RoBERTa's embedding without token types, and a relative position bias that all layers share."""

import torch

from bertsmith.checkpoint.hf.adapter import (
    FamilyAdapter,
    HfConfig,
    HfSettings,
    first_mixer,
    not_exportable,
    read_encoder,
    read_heads,
    write_encoder,
)
from bertsmith.checkpoint.hf.names import Conversion, Row, linear, row
from bertsmith.checkpoint.hf.roberta import PAD, POSITIONS, UNUSED_POSITIONS
from bertsmith.checkpoint.hf.task_heads import (
    ReadDropout,
    WriteDropout,
    hidden_classifier,
    layers_dropout,
    pooled_classifier,
    span_finder,
    token_tagger,
)
from bertsmith.layers.mixers.full import FullConfig
from bertsmith.layers.positions import RelativeConfig
from bertsmith.models.config import ModelConfig
from bertsmith.models.heads import HeadConfig, MaskedTokensConfig, PoolerConfig

_BUCKETS, _MAX_DISTANCE = 32, 128  # constants of their code, whatever config.json says
_DROPOUT: tuple[ReadDropout, WriteDropout] = (layers_dropout, lambda dropout: {})


def _rows(config: ModelConfig) -> tuple[Row, ...]:
    ours, theirs = "encoder.blocks.{i}", "mpnet.encoder.layer.{i}"
    heads = config.encoder.layers[0].mixer.heads
    in_order = Conversion(to_ours=lambda parts: torch.arange(heads), to_theirs=lambda tensor, count: ())
    return (
        row("encoder.embedding.token_table", "mpnet.embeddings.word_embeddings.weight"),
        row("encoder.embedding.position.table", "mpnet.embeddings.position_embeddings.weight", conversion=POSITIONS),
        *linear("encoder.embedding.norm", "mpnet.embeddings.LayerNorm"),
        row("encoder.relative.table", "mpnet.encoder.relative_attention_bias.weight"),
        *linear(f"{ours}.mixer.project", *(f"{theirs}.attention.attn.{name}" for name in "qkv")),
        *linear(f"{ours}.mixer.output", f"{theirs}.attention.attn.o"),
        row(f"{ours}.mixer.bias_heads", conversion=in_order),
        *linear(f"{ours}.mixer_norm", f"{theirs}.attention.LayerNorm"),
        *linear(f"{ours}.feedforward.expand", f"{theirs}.intermediate.dense"),
        *linear(f"{ours}.feedforward.contract", f"{theirs}.output.dense"),
        *linear(f"{ours}.feedforward_norm", f"{theirs}.output.LayerNorm"),
    )


def _read(data: HfConfig, parts: frozenset[str]) -> ModelConfig:
    data = data.with_defaults()
    data.allow_only(pad_token_id=PAD, relative_attention_num_buckets=_BUCKETS)
    heads, dropout = data.required("num_attention_heads"), float(data["attention_probs_dropout_prob"])
    length = data["max_position_embeddings"] - UNUSED_POSITIONS
    encoder = read_encoder(
        HfConfig({**data, "max_position_embeddings": length, "type_vocab_size": 0}),
        FullConfig(heads=heads, dropout=dropout, has_relative_bias=True),
        relative=RelativeConfig(heads=heads, span=_BUCKETS // 2, max_distance=_MAX_DISTANCE),
    )
    possible: dict[str, HeadConfig] = {
        "heads.masked_tokens": MaskedTokensConfig(epsilon=encoder.layers[0].norm.epsilon),  # always gelu
        "heads.pooler": PoolerConfig(),
    }
    return ModelConfig(family="mpnet", encoder=encoder, heads=read_heads(possible, parts))


def _write(config: ModelConfig) -> HfSettings:
    encoder = config.encoder
    mixer = first_mixer(encoder, FullConfig, "mpnet")
    if mixer.is_causal:
        raise not_exportable("mpnet", "it is causal")
    settings = write_encoder(encoder, mixer, "mpnet")
    del settings["type_vocab_size"]
    is_masked = any(head.kind == "masked_tokens" for head in config.heads)
    return {
        "architectures": ["MPNetForMaskedLM" if is_masked else "MPNetModel"],
        **settings,
        "max_position_embeddings": encoder.embedding.max_length + UNUSED_POSITIONS,
        "relative_attention_num_buckets": _BUCKETS,
        "pad_token_id": PAD,
    }


MPNET = FamilyAdapter(
    model_type="mpnet",
    family="mpnet",
    prefix="mpnet.",
    encoder_rows=_rows,
    optional_rows={
        "heads.pooler": tuple(linear("heads.pooler.project", "mpnet.pooler.dense")),
        "heads.masked_tokens": (
            *linear("heads.masked_tokens.transform", "lm_head.dense"),
            *linear("heads.masked_tokens.norm", "lm_head.layer_norm"),
            row("heads.masked_tokens.bias", "lm_head.bias"),
        ),
    },
    tied={
        "lm_head.decoder.weight": "mpnet.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    read_config=_read,
    write_config=_write,
    task_heads=(
        hidden_classifier(
            "MPNetForSequenceClassification", ("classifier.dense", "classifier.out_proj"), _DROPOUT, fixed="tanh"
        ),
        pooled_classifier("MPNetForMultipleChoice", _DROPOUT, is_choice=True),
        token_tagger("MPNetForTokenClassification", _DROPOUT),
        span_finder("MPNetForQuestionAnswering"),
    ),
)

"""Adapter for ConvBERT.

Their mixed attention always fills the width, two branches of width / 2, whatever the head ratio; the released code
keeps the heads' width. Here both are heads and head_width, so only the numbers are translated. Their convolutions read
padding; ours never do.
"""

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
from bertsmith.checkpoint.hf.names import Row, linear, reshaped, row
from bertsmith.checkpoint.hf.task_heads import (
    dropout_setting,
    hidden_classifier,
    span_finder,
    summary_classifiers,
    token_tagger,
)
from bertsmith.layers.mixers.span_conv import SpanConvConfig
from bertsmith.models.config import ModelConfig
from bertsmith.models.heads import HeadConfig, MaskedTokensConfig, ReplacedTokensConfig

PADDING_REMARK = "the convolutions of transformers read padding: hidden states are equal only for rows without padding"


_DROPOUT = dropout_setting("classifier_dropout")
# defaults of their class
_NO_SUMMARY = {"summary_type": "last", "summary_use_proj": False, "summary_activation": None}
_NO_SUMMARY |= {"summary_last_dropout": 0.0}


def _encoder_rows() -> tuple[Row, ...]:
    ours, theirs = "encoder.blocks.{i}", "convbert.encoder.layer.{i}"
    looking, span = f"{theirs}.attention.self", f"{theirs}.attention.self.key_conv_attn_layer"
    projections = ("query", "key", "value", "conv_out_layer")
    # theirs have an additional axis of size 1 for one-dimensional convolutions
    middle = reshaped(lambda tensor: tensor.squeeze(1), lambda tensor: tensor.unsqueeze(1))
    last = reshaped(lambda tensor: tensor.squeeze(-1), lambda tensor: tensor.unsqueeze(-1))
    return (
        row("encoder.embedding.token_table", "convbert.embeddings.word_embeddings.weight"),
        row("encoder.embedding.position.table", "convbert.embeddings.position_embeddings.weight"),
        row("encoder.embedding.type_table", "convbert.embeddings.token_type_embeddings.weight"),
        *linear("encoder.embedding.norm", "convbert.embeddings.LayerNorm"),
        *linear(f"{ours}.mixer.project", *(f"{looking}.{name}" for name in projections)),
        row(f"{ours}.mixer.span.depthwise", f"{span}.depthwise.weight", conversion=middle),
        row(f"{ours}.mixer.span.pointwise.weight", f"{span}.pointwise.weight", conversion=last),
        row(f"{ours}.mixer.span.pointwise.bias", f"{span}.bias", conversion=last),
        *linear(f"{ours}.mixer.kernel.table", f"{looking}.conv_kernel_layer"),
        *linear(f"{ours}.mixer.output", f"{theirs}.attention.output.dense"),
        *linear(f"{ours}.mixer_norm", f"{theirs}.attention.output.LayerNorm"),
        *linear(f"{ours}.feedforward.expand", f"{theirs}.intermediate.dense"),
        *linear(f"{ours}.feedforward.contract", f"{theirs}.output.dense"),
        *linear(f"{ours}.feedforward_norm", f"{theirs}.output.LayerNorm"),
    )


def _read(data: HfConfig, parts: frozenset[str]) -> ModelConfig:
    data.allow_only(is_decoder=False, add_cross_attention=False)
    data = data.with_defaults(embedding_size=768)
    heads = max(1, data.required("num_attention_heads") // data.get("head_ratio", 2))
    mixer = SpanConvConfig(
        heads=heads,
        head_width=data.required("hidden_size") // heads // 2,
        kernel_size=data.get("conv_kernel_size", 9),
        dropout=float(data["attention_probs_dropout_prob"]),
    )
    encoder = read_encoder(data, mixer, groups=data.get("num_groups", 1))
    layer = encoder.layers[0]
    possible: dict[str, HeadConfig] = {
        "heads.masked_tokens": MaskedTokensConfig(epsilon=layer.norm.epsilon),  # always gelu
        "heads.replaced_tokens": ReplacedTokensConfig(activation=layer.feedforward.activation),
    }
    return ModelConfig(family="convbert", encoder=encoder, heads=read_heads(possible, parts))


def _write(config: ModelConfig) -> HfSettings:
    encoder = config.encoder
    mixer = first_mixer(encoder, SpanConvConfig, "convbert")
    has_masked_tokens = any(isinstance(head, MaskedTokensConfig) for head in config.heads)
    return {
        "architectures": ["ConvBertForMaskedLM" if has_masked_tokens else "ConvBertModel"],
        **write_encoder(encoder, mixer, "convbert", kinds_of_heads=2),
        "embedding_size": encoder.embedding_width,
        "head_ratio": 2,
        "conv_kernel_size": mixer.kernel_size,
        "num_groups": encoder.layers[0].feedforward.groups,
        "pad_token_id": 0,  # their default of 1 is not the padding token of ConvBERT vocabularies
    }


CONVBERT = FamilyAdapter(
    model_type="convbert",
    family="convbert",
    remark=lambda config: "; ".join(filter(None, (PADDING_REMARK, missing_head_remark(config)))),
    prefix="convbert.",
    encoder_rows=lambda config: _encoder_rows(),
    optional_rows={
        "encoder.embedding.widen": tuple(linear("encoder.embedding.widen", "convbert.embeddings_project")),
        "heads.masked_tokens": (
            *linear("heads.masked_tokens.transform", "generator_predictions.dense"),
            *linear("heads.masked_tokens.norm", "generator_predictions.LayerNorm"),
            row("heads.masked_tokens.bias", "generator_lm_head.bias"),
        ),
        "heads.replaced_tokens": REPLACED_TOKENS_ROWS,
    },
    tied={"generator_lm_head.weight": "convbert.embeddings.word_embeddings.weight"},
    read_config=_read,
    write_config=_write,
    task_heads=(
        hidden_classifier(
            "ConvBertForSequenceClassification",
            ("classifier.dense", "classifier.out_proj"),
            _DROPOUT,
            "hidden_act",
        ),
        *summary_classifiers("ConvBertForMultipleChoice", **_NO_SUMMARY),
        token_tagger("ConvBertForTokenClassification", _DROPOUT),
        span_finder("ConvBertForQuestionAnswering"),
    ),
)

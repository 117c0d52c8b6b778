"""Adapter for DistilBERT: BERT's encoder without token types and pooler, with settings of its own names."""

from bertsmith.checkpoint.hf.adapter import FamilyAdapter, HfConfig, HfSettings, not_exportable, read_heads
from bertsmith.checkpoint.hf.bert import read_bert_encoder, write_bert_encoder
from bertsmith.checkpoint.hf.names import Row, linear, row
from bertsmith.checkpoint.hf.task_heads import dropout_setting, hidden_classifier, span_finder, token_tagger
from bertsmith.models.config import ModelConfig
from bertsmith.models.heads import HeadConfig, MaskedTokensConfig

_NAMES = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "hidden_act": "activation",
}
"""BERT's names of settings and DistilBERT's."""
_CLASSIFIER_DROPOUT = dropout_setting("seq_classif_dropout", 0.2)
_CLASSIFIER = ("pre_classifier", "classifier")


def _rows() -> tuple[Row, ...]:
    ours, theirs = "encoder.blocks.{i}", "distilbert.transformer.layer.{i}"
    return (
        row("encoder.embedding.token_table", "distilbert.embeddings.word_embeddings.weight"),
        row("encoder.embedding.position.table", "distilbert.embeddings.position_embeddings.weight"),
        *linear("encoder.embedding.norm", "distilbert.embeddings.LayerNorm"),
        *linear(f"{ours}.mixer.project", *(f"{theirs}.attention.{name}_lin" for name in "qkv")),
        *linear(f"{ours}.mixer.output", f"{theirs}.attention.out_lin"),
        *linear(f"{ours}.mixer_norm", f"{theirs}.sa_layer_norm"),
        *linear(f"{ours}.feedforward.expand", f"{theirs}.ffn.lin1"),
        *linear(f"{ours}.feedforward.contract", f"{theirs}.ffn.lin2"),
        *linear(f"{ours}.feedforward_norm", f"{theirs}.output_layer_norm"),
    )


def _read(data: HfConfig, parts: frozenset[str]) -> ModelConfig:
    renamed = {ours: data[theirs] for ours, theirs in _NAMES.items() if theirs in data}
    encoder = read_bert_encoder(HfConfig({**data, **renamed, "type_vocab_size": 0}).with_defaults())
    activation = encoder.layers[0].feedforward.activation
    heads: dict[str, HeadConfig] = {"heads.masked_tokens": MaskedTokensConfig(activation=activation)}
    return ModelConfig(family="distilbert", encoder=encoder, heads=read_heads(heads, parts))


def _write(config: ModelConfig) -> HfSettings:
    settings = write_bert_encoder(config.encoder, "distilbert")
    if config.encoder.layers[0].mixer.is_causal:
        raise not_exportable("distilbert", "it is causal")
    is_masked = any(head.kind == "masked_tokens" for head in config.heads)
    kept = {_NAMES.get(name, name): value for name, value in settings.items() if name != "type_vocab_size"}
    return {"architectures": ["DistilBertForMaskedLM" if is_masked else "DistilBertModel"], **kept}


DISTILBERT = FamilyAdapter(
    model_type="distilbert",
    family="distilbert",
    prefix="distilbert.",
    encoder_rows=lambda config: _rows(),
    optional_rows={
        "heads.masked_tokens": (
            *linear("heads.masked_tokens.transform", "vocab_transform"),
            *linear("heads.masked_tokens.norm", "vocab_layer_norm"),
            row("heads.masked_tokens.bias", "vocab_projector.bias"),
        ),
    },
    tied={"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
    read_config=_read,
    write_config=_write,
    unprefixed=("embeddings.", "transformer."),
    task_heads=(
        hidden_classifier("DistilBertForSequenceClassification", _CLASSIFIER, _CLASSIFIER_DROPOUT, fixed="relu"),
        hidden_classifier(
            "DistilBertForMultipleChoice", _CLASSIFIER, _CLASSIFIER_DROPOUT, fixed="relu", is_choice=True
        ),
        token_tagger("DistilBertForTokenClassification", dropout_setting("dropout", 0.1)),
        span_finder("DistilBertForQuestionAnswering", dropout_setting("qa_dropout", 0.1)),
    ),
)

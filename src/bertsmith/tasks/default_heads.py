"""Task heads of a fresh fine-tuning, by the model's family."""

from bertsmith.layers.elementwise import Activation
from bertsmith.models.config import ModelConfig
from bertsmith.models.heads.task import ClassifierConfig, HiddenLayerConfig, SpansConfig, TaggerConfig

_HIDDEN_LAYERS: dict[str, Activation] = {
    "roberta": "tanh",
    "xlm-roberta": "tanh",
    "mpnet": "tanh",
    "distilbert": "relu",
}


def classifier_head(model: ModelConfig, labels: tuple[str, ...]) -> ClassifierConfig:
    """Return the classification head of the family's paper.

    BERT uses its pooler; ELECTRA and ConvBERT the first token; DeBERTa and other models with disentangled attention add
    a GELU layer, RoBERTa and MPNet a tanh and DistilBERT a ReLU layer; ModernBERT uses mean pooling and a GELU layer
    with a norm. Causal encoders use the last token, the only one that sees the text.
    """
    head = _family_classifier(model, labels)
    return head.changed(pooling="last") if model.is_causal and head.pooling != "mean" else head


def tagger_head(model: ModelConfig, labels: tuple[str, ...]) -> TaggerConfig:
    """Return the tagging head of the family's paper: a linear layer, in ModernBERT after a hidden layer."""
    return TaggerConfig(labels=labels, hidden=_modern_layer(model), dropout=model.encoder.embedding.dropout)


def spans_head(model: ModelConfig) -> SpansConfig:
    """Return the span head of the family's paper: a linear layer, in ModernBERT after a hidden layer."""
    return SpansConfig(hidden=_modern_layer(model))


def _family_classifier(model: ModelConfig, labels: tuple[str, ...]) -> ClassifierConfig:
    dropout = model.encoder.embedding.dropout
    if model.family in _HIDDEN_LAYERS:
        hidden = HiddenLayerConfig(activation=_HIDDEN_LAYERS[model.family])
        return ClassifierConfig(labels=labels, hidden=hidden, dropout=dropout)
    if any(head.kind == "pooler" for head in model.heads):
        return ClassifierConfig(labels=labels, pooling="pooler", dropout=dropout)
    if model.family.startswith(("deberta", "disentangled")):
        return ClassifierConfig(labels=labels, hidden=HiddenLayerConfig(activation="gelu"), dropout=dropout)
    if _is_modern(model):
        return ClassifierConfig(labels=labels, pooling="mean", hidden=_modern_layer(model), dropout=dropout)
    return ClassifierConfig(labels=labels, dropout=dropout)


def _modern_layer(model: ModelConfig) -> HiddenLayerConfig | None:
    """Return the hidden layer of ModernBERT's task classes: no biases, and the norm of the encoder's layers."""
    if not _is_modern(model):
        return None
    norm = model.encoder.layers[0].norm.changed(placement="post")
    return HiddenLayerConfig(activation="gelu", has_bias=False, norm=norm, drops_input=False)


def _is_modern(model: ModelConfig) -> bool:
    return model.family.startswith("modern")

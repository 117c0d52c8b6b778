"""Adapters of task heads by kind, shared by the families."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from bertsmith.checkpoint.hf.adapter import HeadAdapter, HfConfig, HfSettings, write_activation
from bertsmith.checkpoint.hf.names import linear, row
from bertsmith.errors import InputError, nearest
from bertsmith.layers.elementwise import Activation, NormConfig
from bertsmith.models.heads import HeadConfig
from bertsmith.models.heads.task import ClassifierConfig, HiddenLayerConfig, Pooling, SpansConfig, TaggerConfig

CHOICE = ("choice",)
"""The labels of a multiple-choice head, which scores one sequence of an item at a time."""

PROBLEMS = {
    "classification": "single_label_classification",
    "multi_label": "multi_label_classification",
    "regression": "regression",
}
"""`problem_type` of the kinds of task that share ForSequenceClassification."""

_SUMMARY = {
    "summary_type": "first",
    "summary_use_proj": True,
    "summary_activation": "gelu",
    "summary_first_dropout": 0.0,
    "summary_last_dropout": 0.1,
}
_IDENTITY = (None, "", "linear")  # activations
_CLASSIFIER_POOLINGS: dict[str, Pooling] = {"cls": "first", "mean": "mean"}
"""`classifier_pooling` of ModernBERT."""

ReadDropout = Callable[[HfConfig], float]
WriteDropout = Callable[[float], HfSettings]


def dropout_setting(key: str, default: float | None = None) -> tuple[ReadDropout, WriteDropout]:
    """Read and write a dropout with a setting of its own; if missing, the default or the layers' dropout."""

    def read(data: HfConfig) -> float:
        given = data.get(key, default)
        return layers_dropout(data) if given is None else float(given)

    return read, lambda dropout: {key: dropout}


def layers_dropout(data: HfConfig) -> float:
    """The dropout of the layers."""
    return float(data.get("hidden_dropout_prob", 0.1))


def pooled_classifier(
    architecture: str, dropout: tuple[ReadDropout, WriteDropout], *, is_choice: bool = False
) -> HeadAdapter:
    """A classifier on the model's pooler, as in BERT and ALBERT."""
    read, write = dropout

    def read_head(data: HfConfig) -> HeadConfig:
        return ClassifierConfig(labels=_labels(data, is_choice), pooling="pooler", dropout=read(data))

    return HeadAdapter(
        architecture=architecture,
        kind="classifier",
        rows=tuple(linear("heads.classifier.score", "classifier")),
        read=read_head,
        write=lambda head: write(_classifier(head).dropout),
        is_choice=is_choice,
        reads_pooler=True,
    )


def hidden_classifier(
    architecture: str,
    names: tuple[str, str],
    dropout: tuple[ReadDropout, WriteDropout],
    activation: str | None = None,
    *,
    fixed: Activation = "gelu",
    is_choice: bool = False,
    **others: Any,
) -> HeadAdapter:
    """A classifier with a hidden layer on the first token.

    `names`: their names of the hidden and the output layer. `activation`: their setting, None if it is always `fixed`.
    """
    read, write = dropout

    def read_head(data: HfConfig) -> HeadConfig:
        hidden = fixed if activation is None else data.activation(activation)
        layer = HiddenLayerConfig(activation=hidden)
        return ClassifierConfig(labels=_labels(data, is_choice), hidden=layer, dropout=read(data))

    def write_head(head: HeadConfig) -> HfSettings:
        hidden, settings = _classifier(head).hidden, write(_classifier(head).dropout)
        if hidden is None or activation in (None, "hidden_act"):  # written with the layers
            return settings
        return {**settings, str(activation): write_activation(hidden.activation)}

    return HeadAdapter(
        architecture=architecture,
        kind="classifier",
        rows=(*linear("heads.classifier.hidden", names[0]), *linear("heads.classifier.score", names[1])),
        read=read_head,
        write=write_head,
        is_choice=is_choice,
        **others,
    )


def plain_classifier(architecture: str, layer: str, settings: HfSettings, **others: Any) -> HeadAdapter:
    """A classifier on the first token in a class that has a hidden layer: the identity, which `settings` require.

    `layer`: their name of the hidden layer.
    """
    read, write = dropout_setting("cls_dropout")
    return HeadAdapter(
        architecture=architecture,
        kind="classifier",
        rows=tuple(linear("heads.classifier.score", "classifier")),
        read=lambda data: ClassifierConfig(labels=_labels(data, False), dropout=read(data)),
        write=lambda head: {**write(_classifier(head).dropout), **settings},
        constants={f"{layer}.weight": torch.eye, f"{layer}.bias": torch.zeros},
        matches=lambda data: all(data.get(name) == value for name, value in settings.items()),
        **others,
    )


def summary_classifiers(architecture: str, **defaults: object) -> tuple[HeadAdapter, HeadAdapter]:
    """ELECTRA's and ConvBERT's multiple-choice classes on the first token, with and without a hidden layer.

    `defaults` are their class's.
    """

    def summary(data: HfConfig) -> HfSettings:
        return {**_SUMMARY, **defaults, **data}

    def is_plain(data: HfConfig) -> bool:
        found = summary(data)
        is_changed = found["summary_use_proj"] or found["summary_activation"] not in _IDENTITY
        return found["summary_type"] == "first" and not is_changed and not found["summary_first_dropout"]

    def is_hidden(data: HfConfig) -> bool:
        found = summary(data)
        is_even = found["summary_first_dropout"] == found["summary_last_dropout"]
        return found["summary_type"] == "first" and bool(found["summary_use_proj"]) and is_even

    def read_dropout(data: HfConfig) -> float:
        return float(summary(data)["summary_last_dropout"])

    def write_plain(head: HeadConfig) -> HfSettings:
        dropouts = {"summary_first_dropout": 0.0, "summary_last_dropout": _classifier(head).dropout}
        return {"summary_type": "first", "summary_use_proj": False, "summary_activation": "linear", **dropouts}

    def write_hidden(dropout: float) -> HfSettings:
        dropouts = {"summary_first_dropout": dropout, "summary_last_dropout": dropout}
        return {"summary_type": "first", "summary_use_proj": True, **dropouts}

    plain = HeadAdapter(
        architecture=architecture,
        kind="classifier",
        rows=tuple(linear("heads.classifier.score", "classifier")),
        read=lambda data: ClassifierConfig(labels=CHOICE, dropout=read_dropout(data)),
        write=write_plain,
        is_choice=True,
        matches=is_plain,
    )
    names, dropout = ("sequence_summary.summary", "classifier"), (read_dropout, write_hidden)
    hidden = hidden_classifier(architecture, names, dropout, "summary_activation", is_choice=True, matches=is_hidden)
    return plain, hidden


def token_tagger(architecture: str, dropout: tuple[ReadDropout, WriteDropout]) -> HeadAdapter:
    """A classifier of every token."""
    read, write = dropout
    return HeadAdapter(
        architecture=architecture,
        kind="tagger",
        rows=tuple(linear("heads.tagger.score", "classifier")),
        read=lambda data: TaggerConfig(labels=_labels(data, False), dropout=read(data)),
        write=lambda head: write(head.dropout) if isinstance(head, TaggerConfig) else {},
    )


def span_finder(
    architecture: str, dropout: tuple[ReadDropout, WriteDropout] = (lambda data: 0.0, lambda dropout: {})
) -> HeadAdapter:
    """Start and end scores of answers; most classes have no dropout there."""
    read, write = dropout
    return HeadAdapter(
        architecture=architecture,
        kind="spans",
        rows=tuple(linear("heads.spans.score", "qa_outputs")),
        read=lambda data: SpansConfig(dropout=read(data)),
        write=lambda head: write(head.dropout) if isinstance(head, SpansConfig) else {},
    )


def prediction_heads(prefix: str) -> tuple[HeadAdapter, ...]:
    """ModernBERT's task classes: linear layer, activation, norm, dropout, scores; with and without a first bias."""
    kinds = {
        "SequenceClassification": "classifier",
        "MultipleChoice": "classifier",
        "TokenClassification": "tagger",
        "QuestionAnswering": "spans",
    }
    return tuple(
        _prediction_head(f"{prefix}For{task}", kind, is_choice=task == "MultipleChoice", has_bias=has_bias)
        for task, kind in kinds.items()
        for has_bias in (False, True)
    )


def _prediction_head(architecture: str, kind: str, *, is_choice: bool, has_bias: bool) -> HeadAdapter:
    def read_head(data: HfConfig) -> HeadConfig:
        norm = NormConfig(epsilon=data.get("norm_eps", 1e-5), has_bias=False)
        activation = data.activation("classifier_activation")
        hidden = HiddenLayerConfig(activation=activation, has_bias=has_bias, norm=norm, drops_input=False)
        dropout = float(data.get("classifier_dropout") or 0.0)
        if kind == "spans":
            return SpansConfig(hidden=hidden, dropout=dropout)
        labels = _labels(data, is_choice)
        if kind == "tagger":
            return TaggerConfig(labels=labels, hidden=hidden, dropout=dropout)
        pooling = data.get("classifier_pooling", "cls")
        if pooling not in _CLASSIFIER_POOLINGS:
            raise InputError(
                f"config.json: classifier_pooling is {pooling!r}; {nearest(pooling, _CLASSIFIER_POOLINGS)}"
            )
        return ClassifierConfig(labels=labels, pooling=_CLASSIFIER_POOLINGS[pooling], hidden=hidden, dropout=dropout)

    def write_head(head: HeadConfig) -> HfSettings:
        assert isinstance(head, ClassifierConfig | TaggerConfig | SpansConfig)
        settings: HfSettings = {"classifier_dropout": head.dropout, "classifier_bias": has_bias}
        if head.hidden is not None:
            settings["classifier_activation"] = write_activation(head.hidden.activation)
        if isinstance(head, ClassifierConfig):
            poolings = {ours: theirs for theirs, ours in _CLASSIFIER_POOLINGS.items()}
            settings["classifier_pooling"] = poolings.get(head.pooling, "cls")  # reading back finds the difference
        return settings

    ours = f"heads.{kind}"
    biases = (row(f"{ours}.hidden.bias", "head.dense.bias"),) if has_bias else ()
    hidden_rows = (row(f"{ours}.hidden.weight", "head.dense.weight"), *biases)
    return HeadAdapter(
        architecture=architecture,
        kind=kind,
        rows=(*hidden_rows, row(f"{ours}.norm.weight", "head.norm.weight"), *linear(f"{ours}.score", "classifier")),
        read=read_head,
        write=write_head,
        is_choice=is_choice,
        matches=lambda data: bool(data.get("classifier_bias")) == has_bias,
    )


def label_settings(head: HeadConfig) -> HfSettings:
    """Label names in config.json; empty for heads without labels."""
    if not isinstance(head, ClassifierConfig | TaggerConfig):
        return {}
    return {
        "id2label": {str(index): name for index, name in enumerate(head.labels)},
        "label2id": {name: index for index, name in enumerate(head.labels)},
    }


def is_choice(head: HeadConfig, task_kind: str | None) -> bool:
    """Whether a head scores the sequences of an item, by its task or, if unknown, by its label."""
    if task_kind is not None:
        return task_kind == "choice"
    return isinstance(head, ClassifierConfig) and head.labels == CHOICE


def _labels(data: HfConfig, for_choices: bool) -> tuple[str, ...]:
    return CHOICE if for_choices else read_labels(data)


def read_labels(data: HfConfig) -> tuple[str, ...]:
    """Return the names of the outputs by index."""
    names = data.get("id2label") or {str(index): f"LABEL_{index}" for index in range(data.get("num_labels") or 2)}
    if not isinstance(names, Mapping) or sorted(map(str, names)) != sorted(map(str, range(len(names)))):
        raise InputError(f"config.json: id2label is {names!r}; allowed: one name per index, from 0 on")
    by_number = {int(number): str(name) for number, name in names.items()}
    return tuple(by_number[number] for number in range(len(by_number)))


def _classifier(head: HeadConfig) -> ClassifierConfig:
    assert isinstance(head, ClassifierConfig)
    return head

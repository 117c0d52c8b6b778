"""The heads of tasks as Hugging Face's classes have them, by kind; each family names those it has."""

from collections.abc import Callable, Mapping
from typing import Any

from bertsmith.checkpoint.hf.adapter import TaskForm, read_activation, write_activation
from bertsmith.checkpoint.names import linear
from bertsmith.errors import InputError
from bertsmith.models.heads import HeadConfig
from bertsmith.models.heads.task import ClassifierConfig, SpansConfig, TaggerConfig

CHOICE = ("choice",)
"""The label of a head that scores one of the sequences of an item."""

PROBLEMS = {
    "classification": "single_label_classification",
    "multi_label": "multi_label_classification",
    "regression": "regression",
}
"""Their names of our kinds of task that one class serves."""

_SUMMARY = {
    "summary_type": "first",
    "summary_use_proj": True,
    "summary_activation": "gelu",
    "summary_first_dropout": 0.0,
    "summary_last_dropout": 0.1,
}
_UNCHANGED = (None, "", "linear")  # activations that change nothing

Settings = dict[str, Any]
ReadDropout = Callable[[Settings], float]
WriteDropout = Callable[[float], Settings]


def own_dropout(key: str, default: float | None = None) -> tuple[ReadDropout, WriteDropout]:
    """A dropout that has a setting of its own; where that is missing it is the default, or the layers'."""

    def read(data: Settings) -> float:
        given = data.get(key, default)
        return layers_dropout(data) if given is None else float(given)

    return read, lambda dropout: {key: dropout}


def layers_dropout(data: Settings) -> float:
    """The dropout of their layers."""
    return float(data.get("hidden_dropout_prob", 0.1))


def pooled_form(architecture: str, dropout: tuple[ReadDropout, WriteDropout], *, is_choice: bool = False) -> TaskForm:
    """Scores from the model's pooler, as BERT and ALBERT have it."""
    read, write = dropout

    def read_head(data: Settings) -> HeadConfig:
        return ClassifierConfig(labels=_labels(data, is_choice), pooling="pooler", dropout=read(data))

    return TaskForm(
        architecture=architecture,
        kind="classifier",
        rows=tuple(linear("heads.classifier.score", "classifier")),
        read=read_head,
        write=lambda head: write(_classifier(head).dropout),
        is_choice=is_choice,
        reads_pooler=True,
    )


def hidden_form(
    architecture: str,
    names: tuple[str, str],
    dropout: tuple[ReadDropout, WriteDropout],
    activation: str | None = None,
    *,
    is_choice: bool = False,
    **others: Any,
) -> TaskForm:
    """A layer of the head's own between the first token's state and the scores.

    `names` are their names of that layer and of the scores, `activation` their setting; None where it is always gelu.
    """
    read, write = dropout

    def read_head(data: Settings) -> HeadConfig:
        hidden = "gelu" if activation is None else read_activation(data, activation)
        return ClassifierConfig(labels=_labels(data, is_choice), hidden=hidden, dropout=read(data))

    def write_head(head: HeadConfig) -> Settings:
        hidden, settings = _classifier(head).hidden, write(_classifier(head).dropout)
        if hidden is None or activation in (None, "hidden_act"):  # what the layers have is written with them
            return settings
        return {**settings, str(activation): write_activation(hidden)}

    return TaskForm(
        architecture=architecture,
        kind="classifier",
        rows=(*linear("heads.classifier.hidden", names[0]), *linear("heads.classifier.score", names[1])),
        read=read_head,
        write=write_head,
        is_choice=is_choice,
        **others,
    )


def summary_forms(architecture: str, **defaults: Any) -> tuple[TaskForm, TaskForm]:
    """ELECTRA's and ConvBERT's classes for choices, which read a token as settings say, the first one here.

    Its state as it is, or through a layer with an activation; `defaults` are their class's own.
    """

    def summary(data: Settings) -> Settings:
        return {**_SUMMARY, **defaults, **data}

    def is_plain(data: Settings) -> bool:
        found = summary(data)
        is_changed = found["summary_use_proj"] or found["summary_activation"] not in _UNCHANGED
        return found["summary_type"] == "first" and not is_changed and not found["summary_first_dropout"]

    def is_hidden(data: Settings) -> bool:
        found = summary(data)
        is_even = found["summary_first_dropout"] == found["summary_last_dropout"]
        return found["summary_type"] == "first" and bool(found["summary_use_proj"]) and is_even

    def read_dropout(data: Settings) -> float:
        return float(summary(data)["summary_last_dropout"])

    def write_plain(head: HeadConfig) -> Settings:
        dropouts = {"summary_first_dropout": 0.0, "summary_last_dropout": _classifier(head).dropout}
        return {"summary_type": "first", "summary_use_proj": False, "summary_activation": "linear", **dropouts}

    def write_hidden(dropout: float) -> Settings:
        dropouts = {"summary_first_dropout": dropout, "summary_last_dropout": dropout}
        return {"summary_type": "first", "summary_use_proj": True, **dropouts}

    plain = TaskForm(
        architecture=architecture,
        kind="classifier",
        rows=tuple(linear("heads.classifier.score", "classifier")),
        read=lambda data: ClassifierConfig(labels=CHOICE, dropout=read_dropout(data)),
        write=write_plain,
        is_choice=True,
        fits=is_plain,
    )
    names, dropout = ("sequence_summary.summary", "classifier"), (read_dropout, write_hidden)
    hidden = hidden_form(architecture, names, dropout, "summary_activation", is_choice=True, fits=is_hidden)
    return plain, hidden


def tagger_form(architecture: str, dropout: tuple[ReadDropout, WriteDropout]) -> TaskForm:
    """Scores at every token."""
    read, write = dropout
    return TaskForm(
        architecture=architecture,
        kind="tagger",
        rows=tuple(linear("heads.tagger.score", "classifier")),
        read=lambda data: TaggerConfig(labels=_labels(data, False), dropout=read(data)),
        write=lambda head: write(head.dropout) if isinstance(head, TaggerConfig) else {},
    )


def spans_form(architecture: str) -> TaskForm:
    """Where answers begin and end; their classes have no dropout there."""
    return TaskForm(
        architecture=architecture,
        kind="spans",
        rows=tuple(linear("heads.spans.score", "qa_outputs")),
        read=lambda data: SpansConfig(dropout=0.0),
        write=lambda head: {},
    )


def label_settings(head: HeadConfig) -> Settings:
    """The names of a head's outputs as config.json has them, both ways; nothing where they have none."""
    if not isinstance(head, ClassifierConfig | TaggerConfig):
        return {}
    return {
        "id2label": {str(index): name for index, name in enumerate(head.labels)},
        "label2id": {name: index for index, name in enumerate(head.labels)},
    }


def is_choice(head: HeadConfig, task_kind: str | None) -> bool:
    """Whether a head scores the sequences of an item: as its task says, or by its label where none is given."""
    if task_kind is not None:
        return task_kind == "choice"
    return isinstance(head, ClassifierConfig) and head.labels == CHOICE


def _labels(data: Settings, for_choices: bool) -> tuple[str, ...]:
    if for_choices:
        return CHOICE
    names = data.get("id2label") or {str(index): f"LABEL_{index}" for index in range(data.get("num_labels") or 2)}
    if not isinstance(names, Mapping) or sorted(map(str, names)) != sorted(map(str, range(len(names)))):
        raise InputError(f"config.json: id2label is {names!r}; allowed: a name for every number from 0 up")
    by_number = {int(number): str(name) for number, name in names.items()}
    return tuple(by_number[number] for number in range(len(by_number)))


def _classifier(head: HeadConfig) -> ClassifierConfig:
    assert isinstance(head, ClassifierConfig)
    return head

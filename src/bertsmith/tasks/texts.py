"""Shared code of tasks on a text or a pair of texts: columns, label names and weights."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, Literal, TypeVar

from bertsmith.answers.texts import TextExample
from bertsmith.errors import InputError
from bertsmith.tasks.base import AnswerData, RowData, Task
from bertsmith.tasks.glue import glue_file
from bertsmith.text.rows import Table

_TEXT_COLUMNS = ("text", "sentence")
_PAIR_COLUMNS = (
    ("sentence1", "sentence2"),
    ("question", "passage"),
    ("premise", "hypothesis"),
    ("question", "sentence"),
)


TextKind = TypeVar("TextKind", bound=TextExample)


class TextTask(Task[TextKind]):
    """A task whose input is a text or a pair of texts."""

    text: str = "text"
    """Column of the text, or of the first text of a pair."""
    pair: str | None = None
    """Column of the second text of a pair; None for single texts."""

    roles: ClassVar[tuple[str, ...]] = ("text", "pair")
    target_roles: ClassVar[tuple[str, ...]] = ("label",)

    def texts(self, examples: Sequence[TextKind]) -> Iterator[str]:
        return (text for example in examples for text in example.texts)

    def describe(self, example: TextKind) -> str:
        return " | ".join(" ".join(text.split()) for text in example.texts)

    def files(self, examples: Sequence[TextKind], answers: Sequence[AnswerData]) -> dict[str, str]:
        return {} if self.name is None else glue_file(self.name, [answer["answer"] for answer in answers])


def text_columns(row: RowData) -> dict[str, str] | None:
    """Find the columns of a text or a pair of texts by their usual names."""
    for first, second in _PAIR_COLUMNS:
        if isinstance(row.get(first), str) and isinstance(row.get(second), str):
            return {"text": first, "pair": second}
    return next(({"text": name} for name in _TEXT_COLUMNS if isinstance(row.get(name), str)), None)


def in_both_orders(examples: Sequence[TextKind], *, has_pairs: bool) -> list[TextKind]:
    """Return the examples, followed by copies with the two texts swapped."""
    if not has_pairs:
        raise InputError("task.both_orders is true, but the task has no pairs; allowed: false")
    return [*examples, *(replace(example, text=str(example.pair), pair=example.text) for example in examples)]


ClassWeights = Literal["none", "balanced"] | tuple[float, ...]
"""Weight of each label in the loss: equal, inversely proportional to its frequency, or explicit numbers."""


def label_name(table: Table, index: int, column: str) -> str:
    """Return the label of a row as a string."""
    value = table.value(index, column)
    if not isinstance(value, str | int) or not str(value).strip():
        shown = "null" if value is None else repr(value)
        raise InputError(f"{table.location(index)}: {column!r} is {shown}; a label must be a string or an integer")
    return str(value).lower() if isinstance(value, bool) else str(value)  # true and false, as in JSON


def ordered_labels(names: Iterable[str]) -> tuple[str, ...]:
    """Sort labels: integers by value, then other names alphabetically."""

    def key(name: str) -> tuple[bool, int, str]:
        is_integer = name.removeprefix("-").isdecimal()
        return not is_integer, int(name) if is_integer else 0, name

    return tuple(sorted(names, key=key))


def loss_weights(weights: ClassWeights, labels: Sequence[str], targets: Iterable[int]) -> tuple[float, ...]:
    """Return the loss weight of each label, given the label indices of the training data; empty for equal weights."""
    if weights == "none":
        return ()
    if weights != "balanced":
        if len(weights) != len(labels):
            raise InputError(f"task.class_weights has {len(weights)} numbers; the task has {len(labels)} labels")
        return weights
    counts = Counter(targets)
    mean = counts.total() / max(1, len(counts))
    return tuple(mean / counts[index] if counts[index] else 0.0 for index in range(len(labels)))

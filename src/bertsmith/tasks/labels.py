"""What tasks with labels share: their names and order, how much each counts, which was taken for which."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from bertsmith.errors import InputError
from bertsmith.text.tables import Table

ClassWeights = Literal["none", "balanced"] | tuple[float, ...]
"""How much each label counts in the loss: all the same, the rarer the more, or the numbers given."""


def label_name(table: Table, index: int, column: str) -> str:
    """The label of a row as a name."""
    value = table.value(index, column)
    if not isinstance(value, str | int) or not str(value).strip():
        said = "null" if value is None else repr(value)
        raise InputError(f"{table.place(index)}: {column!r} is {said}; a label is a word or a whole number")
    return str(value).lower() if isinstance(value, bool) else str(value)  # as JSON has it: true and false


def ordered_labels(names: Iterable[str]) -> tuple[str, ...]:
    """Labels in the order of their numbers: whole numbers by size, then words by the alphabet."""

    def place(name: str) -> tuple[bool, int, str]:
        is_whole = name.removeprefix("-").isdecimal()
        return not is_whole, int(name) if is_whole else 0, name

    return tuple(sorted(names, key=place))


def weights_of(asked: ClassWeights, labels: Sequence[str], right: Iterable[int]) -> tuple[float, ...]:
    """The weight of each label where these, by their numbers, are right; nothing where all count the same."""
    if asked == "none":
        return ()
    if asked != "balanced":
        if len(asked) != len(labels):
            raise InputError(f"task.class_weights has {len(asked)} numbers; the task has {len(labels)} labels")
        return asked
    counts = Counter(right)
    mean = counts.total() / max(1, len(counts))
    return tuple(mean / counts[number] if counts[number] else 0.0 for number in range(len(labels)))


def confusion_counts(labels: Sequence[str], right: Iterable[int], said: Iterable[str]) -> np.ndarray:
    """How often each label, by row, was answered with each, by column; `right` are numbers, `said` names.

    Shape: (labels, labels).
    """
    numbers = {name: number for number, name in enumerate(labels)}
    counts = np.zeros((len(labels), len(labels)), dtype=np.int64)
    for row, name in zip(right, said, strict=True):
        counts[row, numbers[name]] += 1
    return counts

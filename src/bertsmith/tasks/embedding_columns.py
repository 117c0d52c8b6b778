"""What the columns of a table say of learning vectors of texts."""

from collections.abc import Mapping
from typing import Any, Literal

from bertsmith.errors import InputError
from bertsmith.tasks.labels import label_name
from bertsmith.tasks.texts import text_columns
from bertsmith.text.tables import Table

Columns = dict[str, str | None]

_LABELS = ("label", "score", "similarity")


def embedding_columns(row: Mapping[str, Any]) -> Columns:
    """The columns of text, pair, negative and label that a row has under their usual names; None for those it lacks."""
    found: Columns = dict.fromkeys(("text", "pair", "negative", "label"))
    if "anchor" in row:
        return found | {
            "text": "anchor",
            "pair": "positive" if "positive" in row else None,
            "negative": "negative" if "negative" in row else None,
        }
    found |= text_columns(row) or {}
    if found["pair"] is not None:
        found["label"] = next((name for name in _LABELS if name in row), None)
    return found


def usual_loss(
    train: Table, pair: str | None, label: str | None
) -> Literal["in_batch", "similarity", "contrastive", "dropout"]:
    """What is learned from such columns, unless told otherwise."""
    if pair is None:
        return "dropout"
    if label is None:
        return "in_batch"
    names = (train.value(index, label) for index in range(len(train)))
    return "similarity" if any(_is_fraction(value) for value in names) else "contrastive"


def alike_labels(train: Table, column: str, told: tuple[str, ...]) -> tuple[str, ...]:
    """The labels of a column that mean that two texts are alike: those told, or where it is plain; else a sentence."""
    names = {likeness_name(train, index, column) for index in range(len(train))}
    if any(name in names for name in told):
        return told
    if told:
        raise InputError(
            f"task.alike is {', '.join(told)}, and no row of {train.name} has that in {column!r}; it has "
            f"{', '.join(sorted(names))}"
        )
    if names == {"0", "1"}:
        return ("1",)
    if "entailment" in names:
        return ("entailment",)
    raise InputError(
        f"{train.name}: column {column!r} has the labels {', '.join(sorted(names))}; say with task.alike which of them "
        "mean that two texts are alike"
    )


def likeness_name(table: Table, index: int, column: str) -> str:
    """The label of a row as a name; true and false are 1 and 0."""
    value = table.value(index, column)
    return str(int(value)) if isinstance(value, bool) else label_name(table, index, column)


def _is_fraction(value: Any) -> bool:
    """Whether this is a number that is not written as a whole one, as text or not."""
    if not isinstance(value, str):
        return isinstance(value, float)
    try:
        float(value)
    except ValueError:
        return False
    return not value.strip().removeprefix("-").isdecimal()

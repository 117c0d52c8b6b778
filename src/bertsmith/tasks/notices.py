"""What a person should know of a task's data before anything is learned from it, one sentence each."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bertsmith.batches.examples import Features
from bertsmith.errors import InputError
from bertsmith.tasks.base import Task
from bertsmith.text.readers import is_visible
from bertsmith.text.tables import Table

MOST_LABELS = 12  # of which all are counted in the sentence about the rows
SHOWN_LABELS = 4  # where there are more
IMBALANCE = 5  # times that the commonest label may be as common as the rarest before it is said


def without_empty(task: Task[Any], train: Table) -> tuple[Table, list[str]]:
    """The training rows that have a text, and what is to be said of the others."""
    empty = empty_rows(task, train)
    if not empty:
        return train, []
    if len(empty) == len(train):
        raise InputError(f"{train.name} has no row with a text in {' or '.join(input_columns(task))}")
    gone = set(empty)
    kept = train.take([index for index in range(len(train)) if index not in gone])
    return kept, [f"train: {_have_no_text(train, empty)}; left out of training"]


def data_notices(
    task: Task[Any], tables: Mapping[str, Table], examples: Mapping[str, Sequence[Any]]
) -> tuple[list[str], dict[str, Any]]:
    """The sentences about train and dev, by their names, and their counts as JSON-ready data."""
    counts = {part: _label_counts(task, examples[part]) for part in tables}
    # words without a tag are always the most, and a text may have many labels: no weights are advised there
    is_one_each = isinstance(counts["train"], Counter) and counts["train"].total() == len(examples["train"])
    facts = {part: {"rows": len(table), **_fact(counts[part])} for part, table in tables.items()}
    sentences = [
        "; ".join(f"{part}: {_rows(len(table))}{_by_label(counts[part])}" for part, table in tables.items()),
        *(_imbalance(task, counts["train"]) if is_one_each else ()),
        *_contradictions(task, tables["train"], examples["train"]),
        *_leaks(task, tables["train"], tables["dev"]),
    ]
    empty = empty_rows(task, tables["dev"])
    if empty:
        sentences.append(f"dev: {_have_no_text(tables['dev'], empty)}; kept, so that every row has an answer")
    return [*sentences, *task.notices(examples["train"])], facts


def length_notices(parts: Mapping[str, Features], length: int) -> tuple[list[str], dict[str, Any]]:
    """What was cut because it was too long, and what length would have held nearly all."""
    sentences, facts = [], {}
    for part, features in parts.items():
        if not features.cut:
            continue
        count = len(features.tokens.lengths)
        said = f"{part}: {features.cut:,} of {count:,} sequences are cut to sequences.length {length}"
        facts[part] = {"cut": features.cut}
        if features.whole_lengths is not None:
            needed = int(np.quantile(features.whole_lengths, 0.99, method="higher"))
            said += f"; {needed} would hold 99 %" if needed > length else "; it holds 99 %"
            facts[part]["length_for_99_percent"] = needed
        sentences.append(said)
    return sentences, facts


def input_columns(task: Task[Any]) -> list[str]:
    """The columns a task reads."""
    return [column for column in (getattr(task, role) for role in task.roles) if isinstance(column, str)]


def empty_rows(task: Task[Any], table: Table) -> list[int]:
    """The rows with nothing to read in any column of the task; rows without such a column are not among them."""
    columns = input_columns(task)
    return [
        index for index, row in enumerate(table) if columns and all(_is_empty(row.get(column)) for column in columns)
    ]


def _is_empty(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_empty, value))
    return isinstance(value, str) and not is_visible(value)


def _have_no_text(table: Table, empty: Sequence[int]) -> str:
    verb = "has" if len(empty) == 1 else "have"
    return f"{_rows(len(empty))} {verb} no text ({'' if len(empty) == 1 else 'the first: '}{table.place(empty[0])})"


def _label_counts(task: Task[Any], examples: Sequence[Any]) -> Counter[str] | list[float] | None:
    """How often each label stands, or the numbers that are right; None where neither is so."""
    right = [task.right(example) for example in examples]
    if all(isinstance(answer, str) for answer in right):
        counts = Counter(right)
        # answers in words of their own are no labels
        return counts if hasattr(task, "labels") else None
    if all(isinstance(answer, int) for answer in right):
        return Counter(str(answer) for answer in right)  # which of some choices
    if all(isinstance(answer, float | int) for answer in right):
        return [float(answer) for answer in right]
    if hasattr(task, "labels") and all(isinstance(answer, list | tuple) for answer in right):
        return Counter(str(name) for answer in right for name in answer)
    return None


def _fact(counts: Counter[str] | list[float] | None) -> dict[str, Any]:
    if isinstance(counts, Counter):
        return {"labels": dict(counts.most_common())}
    return {"lowest": min(counts), "highest": max(counts)} if counts else {}


def _by_label(counts: Counter[str] | list[float] | None) -> str:
    if isinstance(counts, Counter):
        few = len(counts) if len(counts) <= MOST_LABELS else SHOWN_LABELS
        shown = [f"{name}: {count:,}" for name, count in counts.most_common(few)]
        more = [f"{len(counts) - few} labels more"] if len(counts) > few else []
        return f" ({', '.join([*shown, *more])})"
    return f" (from {min(counts):g} to {max(counts):g})" if counts else ""


def _imbalance(task: Task[Any], counts: Counter[str] | list[float] | None) -> Iterator[str]:
    if not isinstance(counts, Counter) or not hasattr(task, "class_weights") or len(counts) < 2:
        return
    unseen = [name for name in task.labels if name not in counts] if hasattr(task, "labels") else []
    if unseen:
        yield f"train has no row with {'the label' if len(unseen) == 1 else 'any of the labels'} {', '.join(unseen)}"
    (most, often), (least, rarely) = counts.most_common()[0], counts.most_common()[-1]
    if often > IMBALANCE * rarely and task.class_weights == "none":
        yield (
            f"{100 * often / counts.total():.1f} % of train is labelled {most!r}, {often / rarely:.1f} times as often "
            f"as {least!r}; with task.class_weights=balanced each label counts the same"
        )


def _contradictions(task: Task[Any], train: Table, examples: Sequence[Any]) -> Iterator[str]:
    if len(examples) != len(train):
        return
    answers: dict[str, set[str]] = {}
    first: dict[str, int] = {}
    found = []
    for index, (key, example) in enumerate(zip(_keys(task, train), examples, strict=True)):
        own = answers.setdefault(key, set())
        own.add(repr(task.right(example)))
        if len(own) == 2 and first.setdefault(key, index) == index:
            found.append(index)
    if found:
        texts = "1 input stands" if len(found) == 1 else f"{len(found):,} inputs stand"
        yield f"train: {texts} there several times with different answers (the first: {train.place(found[0])})"


def _leaks(task: Task[Any], train: Table, dev: Table) -> Iterator[str]:
    if dev is train:
        return
    known = set(_keys(task, train))
    found = [index for index, key in enumerate(_keys(task, dev)) if key in known]
    if found:
        stand = "1 row of dev stands" if len(found) == 1 else f"{len(found):,} rows of dev stand"
        yield f"{stand} in train, too (the first: {dev.place(found[0])}), so the score on dev may be too good"


def _keys(task: Task[Any], table: Table) -> Iterator[str]:
    """What a task reads of each row, in a form that can be compared."""
    columns = input_columns(task)
    return (repr([row.get(column) for column in columns]) for row in table)


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"

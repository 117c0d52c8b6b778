"""What a person should know of a task's data before anything is learned from it, one sentence each."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bertsmith.answers.sequences import Features
from bertsmith.errors import InputError
from bertsmith.tasks.base import Task
from bertsmith.text.rows import Table

MOST_LABELS = 12  # of which all are counted in the sentence about the rows
SHOWN_LABELS = 4  # where there are more


def without_empty(task: Task[Any], train: Table) -> tuple[Table, list[str]]:
    """The training rows that have a text, and what is to be said of the others."""
    empty = empty_rows(task, train)
    if not empty:
        return train, []
    if len(empty) == len(train):
        raise InputError(f"{train.name} has no row with a text in {' or '.join(task.input_columns)}")
    gone = set(empty)
    kept = train.take([index for index in range(len(train)) if index not in gone])
    return kept, [f"train: {_have_no_text(train, empty)}; left out of training"]


def data_notices(
    task: Task[Any], tables: Mapping[str, Table], examples: Mapping[str, Sequence[Any]]
) -> tuple[list[str], dict[str, Any]]:
    """The sentences about train and dev, by their names, and their counts as JSON-ready data."""
    counts = {split: _counts(task, examples[split]) for split in tables}
    facts = {split: {"rows": len(table), **_fact(counts[split])} for split, table in tables.items()}
    sentences = [
        "; ".join(f"{split}: {_rows(len(table))}{_by_label(counts[split])}" for split, table in tables.items()),
        *_contradictions(task, tables["train"], examples["train"]),
        *_leaks(task, tables["train"], tables["dev"]),
    ]
    empty = empty_rows(task, tables["dev"])
    if empty:
        sentences.append(f"dev: {_have_no_text(tables['dev'], empty)}; kept, so that every row has an answer")
    return [*sentences, *task.notices(examples["train"])], facts


def length_notices(splits: Mapping[str, Features], length: int) -> tuple[list[str], dict[str, Any]]:
    """What was cut because it was too long, and what length would have held nearly all."""
    sentences, facts = [], {}
    for split, features in splits.items():
        if not features.cut:
            continue
        count = len(features.tokens.lengths)
        said = f"{split}: {features.cut:,} of {count:,} sequences are cut to sequences.length {length}"
        facts[split] = {"cut": features.cut}
        if features.whole_lengths is not None:
            needed = int(np.quantile(features.whole_lengths, 0.99, method="higher"))
            said += f"; {needed} would hold 99 %" if needed > length else "; it holds 99 %"
            facts[split]["length_for_99_percent"] = needed
        sentences.append(said)
    return sentences, facts


def empty_rows(task: Task[Any], table: Table) -> list[int]:
    """Return the indices of rows without text."""
    return [index for index, row in enumerate(table) if task.is_empty(row)]


def _have_no_text(table: Table, empty: Sequence[int]) -> str:
    verb = "has" if len(empty) == 1 else "have"
    return f"{_rows(len(empty))} {verb} no text ({'' if len(empty) == 1 else 'the first: '}{table.location(empty[0])})"


def _counts(task: Task[Any], examples: Sequence[Any]) -> Counter[str] | list[float] | None:
    """How often each label stands, or the numbers that are right; None where neither is so."""
    counts = task.label_counts(examples)
    if counts is not None:
        return counts
    right = [task.gold(example) for example in examples]
    return right if all(isinstance(answer, float) for answer in right) else None


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


def _contradictions(task: Task[Any], train: Table, examples: Sequence[Any]) -> Iterator[str]:
    if len(examples) != len(train):
        return
    answers: dict[str, set[str]] = {}
    first: dict[str, int] = {}
    found = []
    for index, (key, example) in enumerate(zip(_keys(task, train), examples, strict=True)):
        own = answers.setdefault(key, set())
        own.add(repr(task.gold(example)))
        if len(own) == 2 and first.setdefault(key, index) == index:
            found.append(index)
    if found:
        texts = "1 input stands" if len(found) == 1 else f"{len(found):,} inputs stand"
        yield f"train: {texts} there several times with different answers (the first: {train.location(found[0])})"


def _leaks(task: Task[Any], train: Table, dev: Table) -> Iterator[str]:
    if dev is train:
        return
    known = set(_keys(task, train))
    found = [index for index, key in enumerate(_keys(task, dev)) if key in known]
    if found:
        stand = "1 row of dev stands" if len(found) == 1 else f"{len(found):,} rows of dev stand"
        yield f"{stand} in train, too (the first: {dev.location(found[0])}), so the score on dev may be too good"


def _keys(task: Task[Any], table: Table) -> Iterator[str]:
    """What a task reads of each row, in a form that can be compared."""
    columns = task.input_columns
    return (repr([row.get(column) for column in columns]) for row in table)


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"

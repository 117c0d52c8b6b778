"""Checks of a task's data whose findings are shown to the user before training."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bertsmith.answers.sequences import Features
from bertsmith.answers.texts import MAX_COUNTED
from bertsmith.errors import InputError
from bertsmith.tasks.base import Task
from bertsmith.text.rows import Table

MAX_LISTED_LABELS = 12  # above this number of labels, only the SHOWN_LABELS most frequent ones are listed
SHOWN_LABELS = 4


def drop_empty_rows(task: Task[Any], train: Table) -> tuple[Table, list[str]]:
    """Remove training rows without text; return the other rows and a notice about the removed ones."""
    empty = empty_rows(task, train)
    if not empty:
        return train, []
    if len(empty) == len(train):
        raise InputError(f"{train.name} has no row with a text in {' or '.join(task.input_columns)}")
    dropped = set(empty)
    rows = train.take([index for index in range(len(train)) if index not in dropped])
    return rows, [f"train: {_have_no_text(train, empty)}; left out of training"]


def data_notices(
    task: Task[Any], tables: Mapping[str, Table], examples: Mapping[str, Sequence[Any]]
) -> tuple[list[str], dict[str, Any]]:
    """Return notices about train and dev, and their counts as JSON-ready data by split."""
    counts = {split: _counts(task, examples[split]) for split in tables}
    facts = {split: {"rows": len(table), **_fact(counts[split])} for split, table in tables.items()}
    notices = [
        "; ".join(f"{split}: {_rows(len(table))}{_by_label(counts[split])}" for split, table in tables.items()),
        *_contradictions(task, tables["train"], examples["train"]),
        *_leaks(task, tables["train"], tables["dev"]),
    ]
    empty = empty_rows(task, tables["dev"])
    if empty:
        notices.append(f"dev: {_have_no_text(tables['dev'], empty)}; kept, so that every row has an answer")
    return [*notices, *task.notices(examples["train"])], facts


def length_notices(splits: Mapping[str, Features], length: int) -> tuple[list[str], dict[str, Any]]:
    """Report sequences that were truncated, and the length that would keep 99 % of them whole."""
    notices, facts = [], {}
    for split, features in splits.items():
        if not features.cut:
            continue
        count = len(features.tokens.lengths)
        notice = f"{split}: {features.cut:,} of {count:,} sequences are truncated to sequences.length={length}"
        facts[split] = {"cut": features.cut}
        if features.whole_lengths is not None:
            needed = int(np.quantile(features.whole_lengths, 0.99, method="higher"))
            enough = f"{needed} would be enough" if needed > length else "it is enough"
            enough = f"{needed} would not be enough" if needed >= MAX_COUNTED * length else enough
            notice += f"; {enough} for 99 %"
            facts[split]["length_for_99_percent"] = needed
        notices.append(notice)
    return notices, facts


def empty_rows(task: Task[Any], table: Table) -> list[int]:
    """Return the indices of rows without text."""
    return [index for index, row in enumerate(table) if task.is_empty(row)]


def _have_no_text(table: Table, empty: Sequence[int]) -> str:
    verb = "has" if len(empty) == 1 else "have"
    return f"{_rows(len(empty))} {verb} no text ({'' if len(empty) == 1 else 'first: '}{table.location(empty[0])})"


def _counts(task: Task[Any], examples: Sequence[Any]) -> Counter[str] | list[float] | None:
    """Return the counts of labels, or the target values of a regression; None for other tasks."""
    counts = task.label_counts(examples)
    if counts is not None:
        return counts
    targets = [task.gold(example) for example in examples]
    return targets if all(isinstance(target, float) for target in targets) else None


def _fact(counts: Counter[str] | list[float] | None) -> dict[str, Any]:
    if isinstance(counts, Counter):
        return {"labels": dict(counts.most_common())}
    return {"lowest": min(counts), "highest": max(counts)} if counts else {}


def _by_label(counts: Counter[str] | list[float] | None) -> str:
    if isinstance(counts, Counter):
        limit = len(counts) if len(counts) <= MAX_LISTED_LABELS else SHOWN_LABELS
        shown = [f"{name}: {count:,}" for name, count in counts.most_common(limit)]
        rest = [f"{len(counts) - limit} more labels"] if len(counts) > limit else []
        return f" ({', '.join([*shown, *rest])})"
    return f" (from {min(counts):g} to {max(counts):g})" if counts else ""


def _contradictions(task: Task[Any], train: Table, examples: Sequence[Any]) -> Iterator[str]:
    if len(examples) != len(train):
        return
    answers: dict[str, set[str]] = {}
    first: dict[str, int] = {}
    conflicts = []
    for index, (key, example) in enumerate(zip(_keys(task, train), examples, strict=True)):
        targets = answers.setdefault(key, set())
        targets.add(repr(task.gold(example)))
        if len(targets) == 2 and first.setdefault(key, index) == index:
            conflicts.append(index)
    if conflicts:
        inputs = "1 input occurs" if len(conflicts) == 1 else f"{len(conflicts):,} inputs occur"
        yield f"train: {inputs} more than once with different answers (first: {train.location(conflicts[0])})"


def _leaks(task: Task[Any], train: Table, dev: Table) -> Iterator[str]:
    if dev is train:
        return
    known = set(_keys(task, train))
    leaked = [index for index, key in enumerate(_keys(task, dev)) if key in known]
    if leaked:
        rows = "1 row of dev is" if len(leaked) == 1 else f"{len(leaked):,} rows of dev are"
        yield f"{rows} also in train (first: {dev.location(leaked[0])}); the score on dev may be too high"


def _keys(task: Task[Any], table: Table) -> Iterator[str]:
    """Yield the input cells of each row as a hashable key."""
    return map(task.input_key, table)


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"

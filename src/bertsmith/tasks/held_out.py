"""Rows that are held out of training where a task comes without a dev part."""

from collections import Counter
from typing import Any

import numpy as np

from bertsmith.batches.random import shuffled
from bertsmith.tasks.base import Task
from bertsmith.text.tables import Table

SHARE = 10  # one row in so many
MOST = 2000
_SEED = 0  # the same rows whatever the seed of the run, so that runs can be compared


def held_out(task: Task[Any], table: Table, why: str) -> tuple[Table, Table, str]:
    """The rows that are trained on, those held out, and a sentence about it that begins with why.

    Labels keep their shares where every row has one; the only row of a label stays in training.
    """
    labels = _labels(task, table)
    order = shuffled(len(table), _SEED)
    if labels is not None:
        counts = Counter(labels)
        order = np.array([index for index in order if counts[labels[index]] > 1], dtype=np.int64)
        order = order[np.argsort([labels[index] for index in order], kind="stable")]
    count = min(MOST, max(1, len(table) // SHARE))
    if len(order) < 2:
        sentence = f"{why} and too few rows to hold any out: the score is that of the training rows themselves"
        return table, table, sentence
    # of rows in the order of their labels every so-manieth: each label gives its share
    places = (np.arange(min(count, len(order) // 2)) + 0.5) * len(order) / min(count, len(order) // 2)
    chosen = np.sort(order[places.astype(np.int64)])
    rest = np.setdiff1d(np.arange(len(table)), chosen)
    how = "at random" if labels is None else "with each label's share"
    rows = "1 row is" if len(chosen) == 1 else f"{len(chosen):,} rows are"
    sentence = f"{why}: {rows} held out of {len(table):,}, {how}, and not trained on"
    return table.take(rest.tolist()), table.take(chosen.tolist()), sentence


def _labels(task: Task[Any], table: Table) -> list[str] | None:
    """The label of every row, if each has one and they repeat."""
    column = getattr(task, "label", None)
    if not isinstance(column, str) or not hasattr(task, "labels"):
        return None
    values = [row.get(column) for row in table]
    if not all(isinstance(value, str | int) for value in values):
        return None
    names = [str(value) for value in values]
    return names if len(set(names)) <= len(names) // 2 or len(names) < SHARE else None

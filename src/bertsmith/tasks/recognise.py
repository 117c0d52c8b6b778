"""Which task some rows are: its kind and columns found out, or told."""

from collections.abc import Mapping, Sequence
from typing import Any

from bertsmith.errors import InputError, nearest
from bertsmith.tasks import TASKS
from bertsmith.tasks.glue import glue_settings
from bertsmith.text.tables import Table, table_of


def recognise(
    table: Table, kind: str | None, columns: Sequence[str], given: Mapping[str, Any], folder: str | None = None
) -> dict[str, Any]:
    """The settings of the task: what was given, then what the first row and the name of the data folder show.

    `columns` are of the form role=name, such as label=stars.
    """
    named = dict(_named(text) for text in columns)
    kind = kind or given.get("kind")
    if kind is not None and kind not in TASKS:
        raise InputError(f"--task is {kind!r}; {nearest(kind, TASKS)} (all: {', '.join(TASKS)})")
    # a column of another name is looked at under the name of its role
    row = {**table.rows[0], **{role: table.rows[0].get(name) for role, name in named.items()}}
    for name, task in TASKS.items():
        found = task.recognised(row) if kind in (None, name) else None
        if found is not None:
            return {"kind": name, **found, **glue_settings(folder, name), **given, **named}
    if kind is not None:
        return {"kind": kind, **given, **named}
    raise InputError(
        f"{table.name} has the columns {', '.join(table.columns)}, which no kind of task is known by; name one with "
        f"--task ({', '.join(TASKS)}) and its columns with --column, such as --column label=stars"
    )


def given_rows(rows: Sequence[Any], name: str) -> Table:
    """Rows given in Python as a table: mappings, or tuples of one text or two and a label."""
    if not rows:
        raise InputError(f"{name} is empty; give at least one row")
    if all(isinstance(row, Mapping) for row in rows):
        return table_of(rows, name)
    names = {2: ("text", "label"), 3: ("sentence1", "sentence2", "label")}
    for index, row in enumerate(rows):
        if not isinstance(row, tuple | list) or len(row) != len(rows[0]) or len(row) not in names:
            raise InputError(
                f"{name}[{index}] is {row!r}; allowed: mappings, or tuples (text, label) or (text, text, label)"
            )
    return table_of([dict(zip(names[len(row)], row, strict=True)) for row in rows], name)


def _named(text: str) -> tuple[str, str]:
    role, equals, name = text.partition("=")
    if not equals or not role or not name:
        raise InputError(f"--column {text!r} is not of the form role=name, such as label=stars")
    return role.strip(), name.strip()

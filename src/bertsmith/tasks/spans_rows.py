"""Rows of a table → questions with their passages, the right answers checked against the passage."""

from collections.abc import Mapping

from bertsmith.errors import InputError
from bertsmith.runtime.tasks.spans import asked_question
from bertsmith.runtime.tasks.spans_windows import SpanExample
from bertsmith.text.tables import Table


def read_question(
    table: Table, index: int, columns: Mapping[str, str], impossible: str | None, *, has_targets: bool
) -> SpanExample:
    """The question of a row; `columns` are those of the id, the question, the context and the answers."""
    example = asked_question(table, index, **{role: columns[role] for role in ("id", "question", "context")})
    if not has_targets:
        return example
    question, context = example.question, example.context
    texts, starts = _answers(table, index, columns["answers"])
    is_impossible = _is_impossible(table, index, impossible)
    if is_impossible or (is_impossible is None and not texts):
        return SpanExample(example.id, question, context, ())
    if not texts:
        raise InputError(f"{table.place(index)}: {columns['answers']!r} is empty and {impossible!r} is false")
    begin, is_repaired = _place(table, index, columns["answers"], context, texts[0], starts[0] if starts else None)
    text = texts[0].strip()
    begin += texts[0].index(text)
    return SpanExample(example.id, question, context, tuple(texts), begin, begin + len(text), is_repaired)


def _answers(table: Table, index: int, column: str) -> tuple[list[str], list[int]]:
    """The texts of the right answers and, where they are given, their places: as lists by name, or a list of pairs."""
    value = table.value(index, column)
    if isinstance(value, list):
        parts = [one if isinstance(one, Mapping) else {"text": one} for one in value]
        begins = [one["answer_start"] for one in parts if "answer_start" in one]
        value = {"text": [one.get("text") for one in parts], "answer_start": begins}
    given = value if isinstance(value, Mapping) else {}
    texts, starts = given.get("text"), given.get("answer_start", [])
    if (
        isinstance(texts, list)
        and isinstance(starts, list)
        and len(starts) in (0, len(texts))
        and all(isinstance(text, str) for text in texts)
        and all(isinstance(start, int) and not isinstance(start, bool) for start in starts)
    ):
        return texts, starts
    raise InputError(
        f"{table.place(index)}: {column!r} must be {{'text': [texts], 'answer_start': [whole numbers]}}, both of one "
        "length, or a list of such pairs"
    )


def _is_impossible(table: Table, index: int, column: str | None) -> bool | None:
    """Whether a row says that its question has no answer; None where it says nothing about it."""
    if column is None or column not in table.rows[index]:
        return None
    value = table.rows[index][column]
    if not isinstance(value, bool):
        raise InputError(f"{table.place(index)}: {column!r} is {value!r}; allowed: true, false")
    return value


def _place(table: Table, index: int, column: str, context: str, text: str, start: int | None) -> tuple[int, bool]:
    """Where an answer begins in its passage, and whether that is not where the row says."""
    if not text.strip():
        raise InputError(
            f"{table.place(index)}: the first text of {column!r} is blank; a question without an answer has none"
        )
    if start is not None and start >= 0 and context.startswith(text, start):
        return start, False
    found = context.find(text)
    if found < 0:
        raise InputError(f"{table.place(index)}: the answer {text!r} does not occur in the passage")
    if context.find(text, found + 1) >= 0:
        said = "no answer_start says which is meant" if start is None else f"none is at answer_start {start}"
        raise InputError(f"{table.place(index)}: the answer {text!r} occurs several times in the passage and {said}")
    return found, start is not None

"""Choices with what they are about: each read in a sequence of its own, the best one answered."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from bertsmith.answers.sequences import IGNORED, Features, Ragged, TextEncoding
from bertsmith.answers.texts import softmax
from bertsmith.errors import InputError
from bertsmith.text.rows import Table


@dataclass(frozen=True)
class ChoiceExample:
    """What choices are about, the choices, and the place of the right one."""

    context: str
    question: str
    choices: tuple[str, ...]
    label: int = IGNORED


def read_choice(
    table: Table, index: int, *, context: str | None, question: str | None, start: str | None, choices: str
) -> ChoiceExample:
    """The example in a row, given the names of its columns."""
    about = "" if context is None else _joined(table, index, context)
    asked = "" if question is None else table.text(index, question)
    return ChoiceExample(about, asked, _choices(table, index, choices, start))


def choice_features(
    examples: Sequence[ChoiceExample],
    encoding: TextEncoding,
    keep: Literal["end", "beginning"],
    *,
    has_question: bool,
) -> Features:
    """A sequence for every choice, [CLS] context question [SEP] choice [SEP]; `keep` says what stays of a context."""
    tokenizer = encoding.tokenizer
    contexts = tokenizer.encode_plain([example.context for example in examples])
    both = contexts
    if has_question:
        both = tokenizer.encode_plain([f"{example.context} {example.question}".strip() for example in examples])
    choices = iter(tokenizer.encode_plain([choice for example in examples for choice in example.choices]))
    tokens: list[list[int]] = []
    types: list[list[int]] = []
    start, separator, cut = tokenizer.start, tokenizer.separator, 0
    for example, context, first in zip(examples, contexts, both, strict=True):
        # words never run over a space, so the context is the same alone and with a question after it
        question = first[len(context) :]
        for _ in example.choices:
            parts, was_cut = _fitted(context, question, next(choices), encoding.length - 3, keep)
            before = [start, *parts[0], separator]
            after = [*parts[1], separator]
            tokens.append(before + after)
            types.append([0] * len(before) + [1] * len(after))
            cut += was_cut
    counts = np.array([len(example.choices) for example in examples])
    return Features(
        Ragged.of(tokens),
        Ragged.of(types) if encoding.has_types else None,
        np.concatenate([[0], np.cumsum(counts)]),
        np.arange(len(examples)),
        {
            "label": np.array([example.label for example in examples], dtype=np.int64),
            "is_choice": np.arange(counts.max(initial=0)) < counts[:, None],
        },
        cut,
    )


def choice_answers(examples: Sequence[ChoiceExample], outputs: Sequence[np.ndarray]) -> list[dict[str, Any]]:
    """The place of the best choice of each example, with the shares of all; outputs (choices, 1) each."""
    found = []
    for example, scores in zip(examples, outputs, strict=True):
        shares = softmax(scores[:, 0])
        best = int(shares.argmax())
        text, score = example.choices[best], float(shares[best])
        found.append({"answer": best, "text": text, "score": score, "scores": shares.tolist()})
    return found


def numbered_columns(row: Mapping[str, Any], beginning: str) -> list[str]:
    """The columns named by this and a number, from 0 or 1 on, in their order, while they hold something."""
    first = 0 if f"{beginning}0" in row else 1
    found: list[str] = []
    while row.get(f"{beginning}{first + len(found)}") is not None:
        found.append(f"{beginning}{first + len(found)}")
    return found


def _choices(table: Table, index: int, column: str, start: str | None) -> tuple[str, ...]:
    row = table.rows[index]
    if column in row:
        found = row[column]
    else:
        found = [row[name] for name in numbered_columns(row, column)] or table.value(index, column)
    if not isinstance(found, list | tuple) or not all(isinstance(choice, str) for choice in found):
        raise InputError(f"{table.place(index)}: {column!r} is {found!r}; a list of texts is needed")
    if len(found) < 2:
        raise InputError(f"{table.place(index)}: {column!r} holds {len(found)} choices; at least 2 are needed")
    if start is None:
        return tuple(found)
    beginning = table.text(index, start)
    return tuple(f"{beginning} {choice}" for choice in found)


def _joined(table: Table, index: int, column: str) -> str:
    """A text, or several with spaces between them."""
    value = table.value(index, column)
    if isinstance(value, list | tuple) and all(isinstance(part, str) for part in value):
        return " ".join(value)
    return table.text(index, column)


def _fitted(
    context: list[int], question: list[int], choice: list[int], room: int, keep: str
) -> tuple[tuple[list[int], list[int]], bool]:
    """What stands before and after the separator, and whether anything was cut: first of the context."""
    is_cut = len(context) + len(question) + len(choice) > room
    if is_cut:
        choice = choice[:room]
        question = question[max(0, len(question) - (room - len(choice))) :]
        left = room - len(choice) - len(question)
        context = context[max(0, len(context) - left) :] if keep == "end" else context[:left]
    return (context + question, choice), is_cut

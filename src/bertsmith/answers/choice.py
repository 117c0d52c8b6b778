"""Multiple choice: each choice is scored in a sequence of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

import numpy as np

from bertsmith.answers.sequences import IGNORED, Features, Ragged, TextEncoding
from bertsmith.answers.texts import softmax
from bertsmith.errors import InputError
from bertsmith.text.rows import Table


@dataclass(frozen=True)
class ChoiceExample:
    """Context, question, choices and the index of the correct choice."""

    context: str
    question: str
    choices: tuple[str, ...]
    label: int = IGNORED


class ChoiceAnswer(TypedDict):
    """Index and text of the best choice, its probability, and the probability of every choice."""

    answer: int
    text: str
    score: float
    scores: list[float]


def read_choice(
    table: Table, index: int, *, context: str | None, question: str | None, start: str | None, choices: str
) -> ChoiceExample:
    """Read the example of a row, given the names of its columns."""
    context_text = "" if context is None else _join_texts(table, index, context)
    question_text = "" if question is None else table.text(index, question)
    return ChoiceExample(context_text, question_text, _read_choices(table, index, choices, start))


def choice_features(
    examples: Sequence[ChoiceExample],
    encoding: TextEncoding,
    keep: Literal["end", "beginning"],
    *,
    has_question: bool,
) -> Features:
    """Encode every choice as [CLS] context question [SEP] choice [SEP]; `keep` is the end that truncation keeps."""
    tokenizer = encoding.tokenizer
    contexts = tokenizer.encode_plain([example.context for example in examples])
    first_texts = contexts
    if has_question:
        first_texts = tokenizer.encode_plain([f"{example.context} {example.question}".strip() for example in examples])
    choices = iter(tokenizer.encode_plain([choice for example in examples for choice in example.choices]))
    tokens: list[list[int]] = []
    types: list[list[int]] = []
    start, separator, cut = tokenizer.start, tokenizer.separator, 0
    for example, context, first_text in zip(examples, contexts, first_texts, strict=True):
        # tokens do not span spaces, so the context has the same tokens with and without a question
        question = first_text[len(context) :]
        for _ in example.choices:
            first_ids, choice_ids, is_cut = _truncate(context, question, next(choices), encoding.length - 3, keep)
            first_segment = [start, *first_ids, separator]
            second_segment = [*choice_ids, separator]
            tokens.append(first_segment + second_segment)
            types.append([0] * len(first_segment) + [1] * len(second_segment))
            cut += is_cut
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


def choice_answers(examples: Sequence[ChoiceExample], outputs: Sequence[np.ndarray]) -> list[ChoiceAnswer]:
    """Return the best choice of each example; outputs (choices, 1) each."""
    answers: list[ChoiceAnswer] = []
    for example, scores in zip(examples, outputs, strict=True):
        probabilities = softmax(scores[:, 0])
        best = int(probabilities.argmax())
        text, score = example.choices[best], float(probabilities[best])
        answers.append({"answer": best, "text": text, "score": score, "scores": probabilities.tolist()})
    return answers


def numbered_columns(row: Mapping[str, object], prefix: str) -> list[str]:
    """Names of the non-empty columns `prefix`0, `prefix`1, … in order; they may start at 1."""
    first = 0 if f"{prefix}0" in row else 1
    names: list[str] = []
    while row.get(f"{prefix}{first + len(names)}") is not None:
        names.append(f"{prefix}{first + len(names)}")
    return names


def _read_choices(table: Table, index: int, column: str, start: str | None) -> tuple[str, ...]:
    row = table.rows[index]
    if column in row:
        choices = row[column]
    else:
        choices = [row[name] for name in numbered_columns(row, column)] or table.value(index, column)
    if not isinstance(choices, list | tuple) or not all(isinstance(choice, str) for choice in choices):
        raise InputError(f"{table.location(index)}: {column!r} is {choices!r}; it must be a list of texts")
    if len(choices) < 2:
        raise InputError(f"{table.location(index)}: {column!r} has {len(choices)} choices; at least 2 are needed")
    if start is None:
        return tuple(choices)
    prefix = table.text(index, start)
    return tuple(f"{prefix} {choice}" for choice in choices)


def _join_texts(table: Table, index: int, column: str) -> str:
    """Return a text, or a list of texts joined by spaces."""
    value = table.value(index, column)
    if isinstance(value, list | tuple) and all(isinstance(text, str) for text in value):
        return " ".join(value)
    return table.text(index, column)


def _truncate(
    context: list[int], question: list[int], choice: list[int], room: int, keep: str
) -> tuple[list[int], list[int], bool]:
    """Return the tokens before and after the separator and whether any were removed; the context is cut first."""
    is_cut = len(context) + len(question) + len(choice) > room
    if is_cut:
        choice = choice[:room]
        question = question[max(0, len(question) - (room - len(choice))) :]
        rest = room - len(choice) - len(question)
        context = context[max(0, len(context) - rest) :] if keep == "end" else context[:rest]
    return context + question, choice, is_cut

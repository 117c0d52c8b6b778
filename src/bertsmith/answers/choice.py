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
    """Encode every choice as [CLS] context question [SEP] choice [SEP]; `keep` is the end that truncation keeps."""
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
        # tokens do not span spaces, so the context has the same tokens with and without a question
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


def choice_answers(examples: Sequence[ChoiceExample], outputs: Sequence[np.ndarray]) -> list[ChoiceAnswer]:
    """Return the best choice of each example; outputs (choices, 1) each."""
    answers: list[ChoiceAnswer] = []
    for example, scores in zip(examples, outputs, strict=True):
        shares = softmax(scores[:, 0])
        best = int(shares.argmax())
        text, score = example.choices[best], float(shares[best])
        answers.append({"answer": best, "text": text, "score": score, "scores": shares.tolist()})
    return answers


def numbered_columns(row: Mapping[str, object], beginning: str) -> list[str]:
    """Names of the non-empty columns `beginning`0 (or 1), …2, … in order."""
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
        raise InputError(f"{table.location(index)}: {column!r} is {found!r}; a list of texts is needed")
    if len(found) < 2:
        raise InputError(f"{table.location(index)}: {column!r} holds {len(found)} choices; at least 2 are needed")
    if start is None:
        return tuple(found)
    beginning = table.text(index, start)
    return tuple(f"{beginning} {choice}" for choice in found)


def _joined(table: Table, index: int, column: str) -> str:
    """A text, or several texts joined by spaces."""
    value = table.value(index, column)
    if isinstance(value, list | tuple) and all(isinstance(part, str) for part in value):
        return " ".join(value)
    return table.text(index, column)


def _fitted(
    context: list[int], question: list[int], choice: list[int], room: int, keep: str
) -> tuple[tuple[list[int], list[int]], bool]:
    """Tokens before and after the separator, and whether any were cut; the context is cut first."""
    is_cut = len(context) + len(question) + len(choice) > room
    if is_cut:
        choice = choice[:room]
        question = question[max(0, len(question) - (room - len(choice))) :]
        left = room - len(choice) - len(question)
        context = context[max(0, len(context) - left) :] if keep == "end" else context[:left]
    return (context + question, choice), is_cut

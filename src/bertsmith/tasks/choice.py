"""Multiple choice: select the answer to a question or the ending of a story."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np

from bertsmith.answers.choice import (
    ChoiceExample,
    choice_answers,
    choice_features,
    numbered_columns,
    read_choice,
)
from bertsmith.answers.sequences import Answer, Features
from bertsmith.errors import InputError
from bertsmith.models.config import ModelConfig
from bertsmith.models.heads import HeadConfig
from bertsmith.objectives.supervised import Choices
from bertsmith.tasks.base import AnswerData, Encoding, Evaluation, RowData, Task
from bertsmith.tasks.default_heads import classifier_head
from bertsmith.tasks.metrics.base import evaluate_metrics
from bertsmith.text.rows import Table

_COLUMN_NAMES = {
    "context": ("context", "ctx", "article", "passage", "premise", "sent1"),
    "question": ("question",),
    "start": ("sent2",),
    "label": ("label", "answer", "answerKey"),
}
_CHOICE_LISTS = ("choices", "endings", "options")
_CHOICE_PREFIXES = ("ending", "choice", "solution", "option")


class Choice(Task[ChoiceExample]):
    """Select the correct one of several choices.

    Each choice is encoded with the context and the question in its own sequence: [CLS] context question [SEP] choice
    [SEP].
    """

    kind: Literal["choice"] = "choice"
    context: str | None = None
    """Column of the context shared by all choices: a text, or a list of texts such as the turns of a dialogue.
    `context` or `question` is required."""
    question: str | None = None
    """Column of the question, which follows the context."""
    start: str | None = None
    """Column of a text that every choice continues (SWAG's sent2)."""
    choices: str = "choices"
    """Column with the list of choices, or the prefix of one column per choice: "ending" for ending0, ending1, …"""
    label: str = "label"
    """Column of the correct choice: its index from 0, or its letter from A."""
    keep: Literal["end", "beginning"] = "end"
    """End of an over-long context to keep: "end", next to the question and the choice, or "beginning". A choice is cut
    only after the whole context."""

    roles: ClassVar[tuple[str, ...]] = ("context", "question", "start", "choices")
    target_roles: ClassVar[tuple[str, ...]] = ("label",)

    @classmethod
    def find_columns(cls, row: RowData) -> dict[str, str] | None:
        columns = {role: next((name for name in names if name in row), None) for role, names in _COLUMN_NAMES.items()}
        columns["choices"] = next((name for name in _CHOICE_LISTS if isinstance(row.get(name), list)), None)
        if columns["choices"] is None:
            columns["choices"] = next((name for name in _CHOICE_PREFIXES if len(numbered_columns(row, name)) > 1), None)
        if columns["choices"] is None or columns["context"] is columns["question"] is None:
            return None
        return {role: name for role, name in columns.items() if name is not None}

    def resolve(self, train: Table) -> "Choice":
        if self.context is None and self.question is None:
            raise InputError("task.context and task.question are not set; name the column of at least one of them")
        return self

    def head(self, model: ModelConfig) -> HeadConfig:
        return classifier_head(model, ("choice",))

    def examples(self, table: Table, *, has_targets: bool = True) -> list[ChoiceExample]:
        examples = []
        for index in range(len(table)):
            example = read_choice(
                table, index, context=self.context, question=self.question, start=self.start, choices=self.choices
            )
            if has_targets:
                example = replace(example, label=_read_label(table, index, self.label, len(example.choices)))
            examples.append(example)
        return examples

    def texts(self, examples: Sequence[ChoiceExample]) -> Iterator[str]:
        for example in examples:
            yield from filter(None, (example.context, example.question, *example.choices))

    def features(self, examples: Sequence[ChoiceExample], encoding: Encoding) -> Features:
        return choice_features(examples, encoding, self.keep, has_question=self.question is not None)

    def objective(self, examples: Sequence[ChoiceExample]) -> Choices:
        return Choices()

    def answers(
        self, examples: Sequence[ChoiceExample], features: Features, outputs: Sequence[np.ndarray]
    ) -> Sequence[Answer]:
        return choice_answers(examples, outputs)

    def evaluate(self, examples: Sequence[ChoiceExample], answers: Sequence[AnswerData]) -> Evaluation:
        is_correct = np.array([a["answer"] == example.label for a, example in zip(answers, examples, strict=True)])
        return evaluate_metrics({"accuracy": lambda hits: 100 * float(hits.mean())}, (is_correct,), self.metric)

    def gold(self, example: ChoiceExample) -> int:
        return example.label

    def label_counts(self, examples: Sequence[ChoiceExample]) -> Counter[str]:
        return Counter(str(example.label) for example in examples)

    def describe(self, example: ChoiceExample) -> str:
        before = [" ".join(text.split()) for text in (example.context, example.question) if text]
        return " | ".join([*before, " / ".join(" ".join(choice.split()) for choice in example.choices)])

    def describe_answer(self, example: ChoiceExample, answer: Any) -> str:
        return f"{answer}: {' '.join(example.choices[answer].split())}"


def _read_label(table: Table, index: int, column: str, choices: int) -> int:
    """Return the index of the correct choice."""
    value = table.value(index, column)
    number = value
    if isinstance(value, str):
        is_letter = len(value) == 1 and "A" <= value <= "Z"
        number = ord(value) - ord("A") if is_letter else int(value) if value.isdecimal() else None
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < choices:
        last = chr(ord("A") + choices - 1)
        raise InputError(
            f"{table.location(index)}: {column!r} is {value!r}; the row has {choices} choices; allowed: 0 to "
            f"{choices - 1}, or A to {last}"
        )
    return number

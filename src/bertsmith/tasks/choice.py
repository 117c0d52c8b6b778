"""Choose one of several texts: the answer to a question, the ending of a story."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from bertsmith.batches.batch import IGNORED
from bertsmith.batches.examples import Features
from bertsmith.batches.ragged import Ragged
from bertsmith.errors import InputError
from bertsmith.models.config import ModelConfig
from bertsmith.models.heads import HeadConfig
from bertsmith.objectives.choice import Choices
from bertsmith.tasks.base import Encoding, Judgement, Task
from bertsmith.tasks.metrics.table import table_judgement
from bertsmith.tasks.texts import classifier_head, softmax
from bertsmith.text.tables import Table

_USUAL = {
    "context": ("context", "ctx", "article", "passage", "premise", "sent1"),
    "question": ("question",),
    "start": ("sent2",),
    "label": ("label", "answer", "answerKey"),
}
_LISTS = ("choices", "endings", "options")
_BEGINNINGS = ("ending", "choice", "solution", "option")


@dataclass(frozen=True)
class ChoiceExample:
    """What choices are about, the choices, and the place of the right one."""

    context: str
    question: str
    choices: tuple[str, ...]
    label: int = IGNORED


class Choice(Task[ChoiceExample]):
    """Say which of an item's choices is right. Each is read with the context and the question in a sequence of its own:
    [CLS] context question [SEP] choice [SEP].
    """

    kind: Literal["choice"] = "choice"
    context: str | None = None
    """The column of what all choices are about: a text, or a list of them such as the turns of a dialogue …"""
    question: str | None = None
    """… and of the question, which follows it. One of the two is needed."""
    start: str | None = None
    """The column of the text that each choice goes on from, as SWAG has it."""
    choices: str = "choices"
    """The column of the choices, a list; or how the names of their columns begin: "ending" for ending0, ending1, …"""
    label: str = "label"
    """The column of the right choice: its place from 0, or its letter from A."""
    keep: Literal["end", "beginning"] = "end"
    """Which part of a context stays that is too long: its end, which stands next to the question and the choice, or its
    beginning. Choices are never cut before the context is gone."""

    roles: ClassVar[tuple[str, ...]] = ("context", "question", "start", "choices")
    target_roles: ClassVar[tuple[str, ...]] = ("label",)

    @classmethod
    def recognised(cls, row: Mapping[str, Any]) -> dict[str, str] | None:
        found = {role: next((name for name in names if name in row), None) for role, names in _USUAL.items()}
        found["choices"] = next((name for name in _LISTS if isinstance(row.get(name), list)), None)
        if found["choices"] is None:
            found["choices"] = next((name for name in _BEGINNINGS if len(_numbered(row, name)) > 1), None)
        if found["choices"] is None or found["context"] is found["question"] is None:
            return None
        return {role: name for role, name in found.items() if name is not None}

    def settled(self, train: Table) -> "Choice":
        if self.context is None and self.question is None:
            raise InputError("task.context and task.question are not given; name the column of at least one of them")
        return self

    def head(self, model: ModelConfig) -> HeadConfig:
        return classifier_head(model, ("choice",))

    def examples(self, table: Table, *, has_targets: bool = True) -> list[ChoiceExample]:
        found = []
        for index in range(len(table)):
            context = "" if self.context is None else _joined(table, index, self.context)
            question = "" if self.question is None else table.text(index, self.question)
            choices = self._choices(table, index)
            label = _place(table, index, self.label, len(choices)) if has_targets else IGNORED
            found.append(ChoiceExample(context, question, choices, label))
        return found

    def texts(self, examples: Sequence[ChoiceExample]) -> Iterator[str]:
        for example in examples:
            yield from filter(None, (example.context, example.question, *example.choices))

    def features(self, examples: Sequence[ChoiceExample], encoding: Encoding) -> Features:
        tokenizer = encoding.tokenizer
        contexts = tokenizer.encode_plain([example.context for example in examples])
        both = contexts
        if self.question is not None:
            both = tokenizer.encode_plain([f"{example.context} {example.question}".strip() for example in examples])
        choices = iter(tokenizer.encode_plain([choice for example in examples for choice in example.choices]))
        tokens: list[list[int]] = []
        types: list[list[int]] = []
        start, separator, cut = tokenizer.start, tokenizer.separator, 0
        for example, context, first in zip(examples, contexts, both, strict=True):
            # words never run over a space, so the context is the same alone and with a question after it
            question = first[len(context) :]
            for _ in example.choices:
                parts, was_cut = self._fitted(context, question, next(choices), encoding.length - 3)
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

    def objective(self, examples: Sequence[ChoiceExample]) -> Choices:
        return Choices()

    def answers(
        self, examples: Sequence[ChoiceExample], features: Features, outputs: Sequence[np.ndarray]
    ) -> list[dict[str, Any]]:
        found = []
        for example, scores in zip(examples, outputs, strict=True):
            shares = softmax(scores[:, 0])
            best = int(shares.argmax())
            text, score = example.choices[best], float(shares[best])
            found.append({"answer": best, "text": text, "score": score, "scores": shares.tolist()})
        return found

    def judged(self, examples: Sequence[ChoiceExample], answers: Sequence[Mapping[str, Any]]) -> Judgement:
        is_right = np.array([a["answer"] == example.label for a, example in zip(answers, examples, strict=True)])
        return table_judgement({"accuracy": lambda hits: 100 * float(hits.mean())}, (is_right,), self.metric)

    def right(self, example: ChoiceExample) -> int:
        return example.label

    def label_counts(self, examples: Sequence[ChoiceExample]) -> Counter[str]:
        return Counter(str(example.label) for example in examples)

    def shown(self, example: ChoiceExample) -> str:
        before = [" ".join(text.split()) for text in (example.context, example.question) if text]
        return " | ".join([*before, " / ".join(" ".join(choice.split()) for choice in example.choices)])

    def shown_answer(self, example: ChoiceExample, answer: Any) -> str:
        return f"{answer}: {' '.join(example.choices[answer].split())}"

    def _choices(self, table: Table, index: int) -> tuple[str, ...]:
        row = table.rows[index]
        if self.choices in row:
            found = row[self.choices]
        else:
            found = [row[name] for name in _numbered(row, self.choices)] or table.value(index, self.choices)
        if not isinstance(found, list | tuple) or not all(isinstance(choice, str) for choice in found):
            raise InputError(f"{table.place(index)}: {self.choices!r} is {found!r}; a list of texts is needed")
        if len(found) < 2:
            raise InputError(
                f"{table.place(index)}: {self.choices!r} holds {len(found)} choices; at least 2 are needed"
            )
        if self.start is None:
            return tuple(found)
        start = table.text(index, self.start)
        return tuple(f"{start} {choice}" for choice in found)

    def _fitted(
        self, context: list[int], question: list[int], choice: list[int], room: int
    ) -> tuple[tuple[list[int], list[int]], bool]:
        """What stands before and after the separator, and whether anything was cut: first of the context."""
        is_cut = len(context) + len(question) + len(choice) > room
        if is_cut:
            choice = choice[:room]
            question = question[max(0, len(question) - (room - len(choice))) :]
            left = room - len(choice) - len(question)
            context = context[max(0, len(context) - left) :] if self.keep == "end" else context[:left]
        return (context + question, choice), is_cut


def _numbered(row: Mapping[str, Any], beginning: str) -> list[str]:
    """The columns named by this and a number, from 0 or 1 on, in their order, while they hold something."""
    first = 0 if f"{beginning}0" in row else 1
    found: list[str] = []
    while row.get(f"{beginning}{first + len(found)}") is not None:
        found.append(f"{beginning}{first + len(found)}")
    return found


def _joined(table: Table, index: int, column: str) -> str:
    """A text, or several with spaces between them."""
    value = table.value(index, column)
    if isinstance(value, list | tuple) and all(isinstance(part, str) for part in value):
        return " ".join(value)
    return table.text(index, column)


def _place(table: Table, index: int, column: str, choices: int) -> int:
    """The right choice as a number."""
    value = table.value(index, column)
    number = value
    if isinstance(value, str):
        is_letter = len(value) == 1 and "A" <= value <= "Z"
        number = ord(value) - ord("A") if is_letter else int(value) if value.isdecimal() else None
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < choices:
        last = chr(ord("A") + choices - 1)
        raise InputError(
            f"{table.place(index)}: {column!r} is {value!r}; the row has {choices} choices: 0 to {choices - 1}, "
            f"or A to {last}"
        )
    return number

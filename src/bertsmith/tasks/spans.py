"""Answer a question with a span of a passage, or say that the passage does not answer it (SQuAD 1.1 and 2.0)."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from bertsmith.answers.sequences import Answer, Features
from bertsmith.answers.spans import SpanExample, WindowFeatures, read_passage_question, span_answers, window_features
from bertsmith.errors import InputError
from bertsmith.models.config import ModelConfig
from bertsmith.models.heads import HeadConfig
from bertsmith.models.heads.task import SpansConfig
from bertsmith.objectives.supervised import Spans
from bertsmith.tasks.base import Encoding, Evaluation, Task
from bertsmith.tasks.metrics.answers import evaluate_answers, f1
from bertsmith.text.rows import Table


def read_question(
    table: Table, index: int, columns: Mapping[str, str], impossible: str | None, *, has_targets: bool
) -> SpanExample:
    """The question of a row; `columns` are those of the id, the question, the context and the answers."""
    example = read_passage_question(table, index, **{role: columns[role] for role in ("id", "question", "context")})
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


_AROUND = 60  # characters of a passage on either side of an answer that are shown


class SpanAnswers(Task[SpanExample]):
    """Find the answer to a question in a passage."""

    kind: Literal["spans"] = "spans"
    question: str = "question"
    """The column of the question …"""
    context: str = "context"
    """… of the passage …"""
    answer: str = "answers"
    """… and of the right answers: {text: […], answer_start: […]}, or a list of such pairs."""
    impossible: str = "is_impossible"
    """The column, if there is one, that is true where the passage does not answer the question."""
    id: str = "id"
    """The column, if there is one, of the name of a question in the official files."""
    may_be_unanswered: bool | None = None
    """Whether no answer is an answer; None for what the training data shows."""
    stride: int = Field(default=128, gt=0)
    """How many tokens of a long passage lie between the beginnings of two windows."""
    question_length: int = Field(default=64, gt=0)
    """The most tokens of a question; longer ones are cut."""
    longest: int = Field(default=30, gt=0)
    """The most tokens of an answer."""
    n_best: int = Field(default=20, gt=0)
    """Starts and ends of a window that are looked at, and answers that are kept."""
    null_threshold: float = 0.0
    """No answer is given where its score lies more than this above that of the best answer."""

    roles: ClassVar[tuple[str, ...]] = ("question", "context")
    target_roles: ClassVar[tuple[str, ...]] = ("answer", "impossible", "id")

    @classmethod
    def find_columns(cls, row: Mapping[str, Any]) -> dict[str, str] | None:
        is_text = all(isinstance(row.get(name), str) for name in ("question", "context"))
        is_answered = isinstance(row.get("answer"), Mapping | list) or isinstance(row.get("answers"), Mapping | list)
        return {"question": "question", "context": "context", "answer": "answers"} if is_text and is_answered else None

    def resolve(self, train: Table) -> "SpanAnswers":
        if self.may_be_unanswered is not None:
            return self
        return self.changed(may_be_unanswered=any(not example.golds for example in self.examples(train)))

    def head(self, model: ModelConfig) -> HeadConfig:
        return SpansConfig()

    def examples(self, table: Table, *, has_targets: bool = True) -> list[SpanExample]:
        columns = {"id": self.id, "question": self.question, "context": self.context, "answers": self.answer}
        return [
            read_question(table, index, columns, self.impossible, has_targets=has_targets)
            for index in range(len(table))
        ]

    def texts(self, examples: Sequence[SpanExample]) -> Iterator[str]:
        seen: set[str] = set()
        for example in examples:
            yield example.question
            if example.context not in seen:
                seen.add(example.context)
                yield example.context

    def features(self, examples: Sequence[SpanExample], encoding: Encoding) -> WindowFeatures:
        return window_features(examples, encoding, self.stride, self.question_length)

    def objective(self, examples: Sequence[SpanExample]) -> Spans:
        return Spans()

    def answers(
        self, examples: Sequence[SpanExample], features: Features, outputs: Sequence[np.ndarray]
    ) -> Sequence[Answer]:
        assert isinstance(features, WindowFeatures)
        return span_answers(
            examples,
            features,
            outputs,
            n_best=self.n_best,
            longest=self.longest,
            null_threshold=self.null_threshold,
            may_be_unanswered=self.may_be_unanswered,
        )

    def evaluate(self, examples: Sequence[SpanExample], answers: Sequence[Mapping[str, Any]]) -> Evaluation:
        said = [answer["answer"] for answer in answers]
        golds = [example.golds or () for example in examples]
        if not self.may_be_unanswered and all(golds):
            return evaluate_answers(said, golds, self.metric)
        texts = [next((one["text"] for one in answer["n_best"] if one["text"]), "") for answer in answers]
        odds = [answer["null_odds"] for answer in answers]
        return evaluate_answers(said, golds, self.metric, texts=texts, null_odds=odds)

    def gold(self, example: SpanExample) -> str:
        """All right answers with bars between them; empty where there is none."""
        return " | ".join(dict.fromkeys(example.golds or ()))

    def error(self, example: SpanExample, answer: Mapping[str, Any]) -> float:
        return (1 - f1(answer["answer"], example.golds or ())) * float(answer["score"])

    def describe(self, example: SpanExample) -> str:
        """The question and the passage around the answer, or its beginning."""
        begin = max(0, example.begin - _AROUND)
        end = (example.end if example.golds else _AROUND) + _AROUND
        passage = example.context[begin:end]
        marked = ("… " if begin else "") + passage + (" …" if end < len(example.context) else "")
        return " | ".join(" ".join(text.split()) for text in (example.question, marked))

    def notices(self, examples: Sequence[SpanExample]) -> list[str]:
        repaired = [example.id for example in examples if example.is_repaired]
        if not repaired:
            return []
        return [
            f"{len(repaired)} answers did not stand at their answer_start and were found elsewhere in the passage, "
            f"where they occur once; the first is that of question {repaired[0]!r}"
        ]

    def files(self, examples: Sequence[SpanExample], answers: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        by_id = {example.id: answer for example, answer in zip(examples, answers, strict=True)}
        fields = ("text", "probability", "start_logit", "end_logit")
        contents: dict[str, Any] = {
            "predictions.json": {name: answer["answer"] for name, answer in by_id.items()},
            "nbest_predictions.json": {
                name: [{field: one[field] for field in fields} for one in answer["n_best"]]
                for name, answer in by_id.items()
            },
        }
        if self.may_be_unanswered:
            contents["null_odds.json"] = {name: answer["null_odds"] for name, answer in by_id.items()}
        return {name: json.dumps(content, indent=1, ensure_ascii=False) + "\n" for name, content in contents.items()}

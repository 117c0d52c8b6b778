"""Answer a question with a span of a passage, or say that the passage does not answer it (SQuAD 1.1 and 2.0)."""

import json
import re
import string
from collections import Counter
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
from bertsmith.tasks.base import AnswerData, Encoding, Evaluation, RowData, Task
from bertsmith.tasks.metrics.base import main_metric
from bertsmith.text.rows import Table

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> str:
    """A text as it is compared: lower case, without ASCII punctuation and the words a, an, the, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact(said: str, golds: Sequence[str]) -> float:
    """1 if an answer is one of the right ones, else 0; no right ones means that "" is right."""
    own = normalised(said)
    return float(any(own == gold for gold in _normalised_golds(golds)))


def f1(said: str, golds: Sequence[str]) -> float:
    """The F1 of the words of an answer against the right one where it is highest."""
    words = normalised(said).split()
    return max(_words_f1(words, gold.split()) for gold in _normalised_golds(golds))


def _normalised_golds(golds: Sequence[str]) -> list[str]:
    """The right answers of which something is left; "" if there is none."""
    return [text for text in map(normalised, golds) if text] or [""]


def _words_f1(said: list[str], gold: list[str]) -> float:
    if not said or not gold:
        return float(said == gold)
    shared = (Counter(said) & Counter(gold)).total()
    if not shared:
        return 0.0
    precision, recall = shared / len(said), shared / len(gold)
    return 2 * precision * recall / (precision + recall)


def best_threshold(
    scores: np.ndarray, null_odds: np.ndarray, has_answer: np.ndarray, says_text: np.ndarray
) -> tuple[float, float]:
    """The highest mean score in percent that a threshold on the odds of no answer can give, and that threshold.

    All questions begin as unanswered; the surest are answered one after the other. Each adds its own score, or takes
    one away where nothing was to be answered. The threshold is the odds of the last one answered, 0 for none.

    Shape: (questions,) each; scores are those of the texts, before any of them was turned into no answer.
    """
    order = np.argsort(null_odds, kind="stable")
    gain = np.where(has_answer, scores, np.where(says_text, -1.0, 0.0))[order]
    sums = np.cumsum(np.concatenate([[float((~has_answer).sum())], gain]))
    best = int(sums.argmax())
    threshold = 0.0 if best == 0 else float(null_odds[order[best - 1]])
    return 100 * float(sums[best]) / len(scores), threshold


def evaluate_answers(
    said: Sequence[str],
    golds: Sequence[Sequence[str]],
    metric: str | None,
    *,
    texts: Sequence[str] | None = None,
    null_odds: Sequence[float] | None = None,
) -> Evaluation:
    """The metrics of some answers; the main one is F1 unless told otherwise.

    Where a question may have no answer, `texts` are the best that are not empty, with the odds of no answer over each:
    then the metrics are also given apart for questions with and without an answer, and so are those that the best
    threshold would give.
    """
    values = {
        "f1": np.array([f1(one, right) for one, right in zip(said, golds, strict=True)]),
        "exact": np.array([exact(one, right) for one, right in zip(said, golds, strict=True)]),
    }
    main = main_metric(metric, values)
    metrics = {name: _percent(value) for name, value in values.items()}
    if texts is not None and null_odds is not None:
        has_answer = np.array([_normalised_golds(right) != [""] for right in golds])
        odds, says_text = np.array(null_odds), np.array([text != "" for text in texts])
        for name, compute in (("f1", f1), ("exact", exact)):
            if has_answer.any():
                metrics[f"has_answer_{name}"] = _percent(values[name][has_answer])
            if not has_answer.all():
                metrics[f"no_answer_{name}"] = _percent(values[name][~has_answer])
            scores = np.array([compute(text, right) for text, right in zip(texts, golds, strict=True)])
            best, threshold = best_threshold(scores, odds, has_answer, says_text)
            metrics[f"best_{name}"], metrics[f"best_{name}_threshold"] = best, threshold
    return Evaluation(main, metrics, lambda chosen: _percent(values[main][chosen]))


def _percent(values: np.ndarray) -> float:
    return 100 * float(values.mean())


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
        raise InputError(f"{table.location(index)}: {columns['answers']!r} is empty and {impossible!r} is false")
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
        f"{table.location(index)}: {column!r} must be {{'text': [texts], 'answer_start': [whole numbers]}}, both of "
        "one length, or a list of such pairs"
    )


def _is_impossible(table: Table, index: int, column: str | None) -> bool | None:
    """Whether a row says that its question has no answer; None where it says nothing about it."""
    if column is None or column not in table.rows[index]:
        return None
    value = table.rows[index][column]
    if not isinstance(value, bool):
        raise InputError(f"{table.location(index)}: {column!r} is {value!r}; allowed: true, false")
    return value


def _place(table: Table, index: int, column: str, context: str, text: str, start: int | None) -> tuple[int, bool]:
    """Where an answer begins in its passage, and whether that is not where the row says."""
    if not text.strip():
        raise InputError(
            f"{table.location(index)}: the first text of {column!r} is blank; a question without an answer has none"
        )
    if start is not None and start >= 0 and context.startswith(text, start):
        return start, False
    found = context.find(text)
    if found < 0:
        raise InputError(f"{table.location(index)}: the answer {text!r} does not occur in the passage")
    if context.find(text, found + 1) >= 0:
        said = "no answer_start says which is meant" if start is None else f"none is at answer_start {start}"
        raise InputError(f"{table.location(index)}: the answer {text!r} occurs several times in the passage and {said}")
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
    max_answer_length: int = Field(default=30, gt=0)
    """The most tokens of an answer."""
    n_best: int = Field(default=20, gt=0)
    """Starts and ends of a window that are looked at, and answers that are kept."""
    null_threshold: float = 0.0
    """No answer is given where its score lies more than this above that of the best answer."""

    roles: ClassVar[tuple[str, ...]] = ("question", "context")
    target_roles: ClassVar[tuple[str, ...]] = ("answer", "impossible", "id")

    @classmethod
    def find_columns(cls, row: RowData) -> dict[str, str] | None:
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
            max_answer_length=self.max_answer_length,
            null_threshold=self.null_threshold,
            may_be_unanswered=self.may_be_unanswered,
        )

    def evaluate(self, examples: Sequence[SpanExample], answers: Sequence[AnswerData]) -> Evaluation:
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

    def error(self, example: SpanExample, answer: AnswerData) -> float:
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

    def files(self, examples: Sequence[SpanExample], answers: Sequence[AnswerData]) -> dict[str, str]:
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

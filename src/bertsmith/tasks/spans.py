"""Extractive question answering: a span of a passage, or no answer (SQuAD 1.1 and 2.0)."""

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
from bertsmith.objectives.supervised import Spans
from bertsmith.tasks.base import AnswerData, Encoding, Evaluation, RowData, Task
from bertsmith.tasks.default_heads import spans_head
from bertsmith.tasks.metrics.base import main_metric
from bertsmith.text.rows import Table

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise_answer(text: str) -> str:
    """Lower-case a text; remove ASCII punctuation, articles and extra white space (official SQuAD scorer)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(predicted: str, golds: Sequence[str]) -> float:
    """1 if the prediction equals a gold answer after normalisation, else 0; without gold answers, "" is correct."""
    answer = normalise_answer(predicted)
    return float(any(answer == gold for gold in _normalise_golds(golds)))


def f1(predicted: str, golds: Sequence[str]) -> float:
    """Largest word F1 of the prediction against any gold answer."""
    words = normalise_answer(predicted).split()
    return max(_words_f1(words, gold.split()) for gold in _normalise_golds(golds))


def _normalise_golds(golds: Sequence[str]) -> list[str]:
    """Return the normalised gold answers without empty ones; [""] if all are empty."""
    return [text for text in map(normalise_answer, golds) if text] or [""]


def _words_f1(predicted: list[str], gold: list[str]) -> float:
    if not predicted or not gold:
        return float(predicted == gold)
    shared = (Counter(predicted) & Counter(gold)).total()
    if not shared:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(gold)
    return 2 * precision * recall / (precision + recall)


def best_threshold(
    scores: np.ndarray, null_odds: np.ndarray, has_answer: np.ndarray, has_text: np.ndarray
) -> tuple[float, float]:
    """Return the highest mean score, in percent, of any threshold on the no-answer odds, and that threshold.

    All questions start as unanswered and are answered in order of increasing odds. An answer adds its score, or
    subtracts 1 if the question is unanswerable. The threshold is the odds of the last answered question, 0 if there is
    none.

    Shape: (questions,) each; scores are of the best texts, regardless of the odds.
    """
    order = np.argsort(null_odds, kind="stable")
    gain = np.where(has_answer, scores, np.where(has_text, -1.0, 0.0))[order]
    sums = np.cumsum(np.concatenate([[float((~has_answer).sum())], gain]))
    best = int(sums.argmax())
    threshold = 0.0 if best == 0 else float(null_odds[order[best - 1]])
    return 100 * float(sums[best]) / len(scores), threshold


def evaluate_answers(
    predicted: Sequence[str],
    golds: Sequence[Sequence[str]],
    metric: str | None,
    *,
    texts: Sequence[str] | None = None,
    null_odds: Sequence[float] | None = None,
) -> Evaluation:
    """Compute exact match and F1; the default main metric is F1.

    If questions may be unanswerable, `texts` are the best non-empty answers and `null_odds` the no-answer odds against
    them. The metrics are then also reported for questions with and without an answer, and at the best threshold.
    """
    values = {
        "f1": np.array([f1(text, gold) for text, gold in zip(predicted, golds, strict=True)]),
        "exact": np.array([exact_match(text, gold) for text, gold in zip(predicted, golds, strict=True)]),
    }
    main = main_metric(metric, values)
    metrics = {name: _percent(value) for name, value in values.items()}
    if texts is not None and null_odds is not None:
        has_answer = np.array([_normalise_golds(gold) != [""] for gold in golds])
        odds, has_text = np.array(null_odds), np.array([text != "" for text in texts])
        for name, compute in (("f1", f1), ("exact", exact_match)):
            if has_answer.any():
                metrics[f"has_answer_{name}"] = _percent(values[name][has_answer])
            if not has_answer.all():
                metrics[f"no_answer_{name}"] = _percent(values[name][~has_answer])
            scores = np.array([compute(text, gold) for text, gold in zip(texts, golds, strict=True)])
            best, threshold = best_threshold(scores, odds, has_answer, has_text)
            metrics[f"best_{name}"], metrics[f"best_{name}_threshold"] = best, threshold
    return Evaluation(main, metrics, lambda chosen: _percent(values[main][chosen]))


def _percent(values: np.ndarray) -> float:
    return 100 * float(values.mean())


def read_question(
    table: Table, index: int, columns: Mapping[str, str], impossible: str | None, *, has_targets: bool
) -> SpanExample:
    """Read a row; `columns` names the columns of id, question, context and answers."""
    example = read_passage_question(table, index, **{role: columns[role] for role in ("id", "question", "context")})
    if not has_targets:
        return example
    question, context = example.question, example.context
    texts, starts = _read_golds(table, index, columns["answers"])
    is_impossible = _is_impossible(table, index, impossible)
    if is_impossible or (is_impossible is None and not texts):
        return SpanExample(example.id, question, context, ())
    if not texts:
        raise InputError(f"{table.location(index)}: {columns['answers']!r} is empty, but {impossible!r} is false")
    start = starts[0] if starts else None
    begin, is_repaired = _locate_answer(table, index, columns["answers"], context, texts[0], start)
    text = texts[0].strip()
    begin += texts[0].index(text)
    return SpanExample(example.id, question, context, tuple(texts), begin, begin + len(text), is_repaired)


def _read_golds(table: Table, index: int, column: str) -> tuple[list[str], list[int]]:
    """Read the gold answers and, if present, their start offsets, from a mapping of lists or a list of mappings."""
    value = table.value(index, column)
    if isinstance(value, list):
        golds = [gold if isinstance(gold, Mapping) else {"text": gold} for gold in value]
        starts = [gold["answer_start"] for gold in golds if "answer_start" in gold]
        value = {"text": [gold.get("text") for gold in golds], "answer_start": starts}
    lists = value if isinstance(value, Mapping) else {}
    texts, starts = lists.get("text"), lists.get("answer_start", [])
    if (
        isinstance(texts, list)
        and isinstance(starts, list)
        and len(starts) in (0, len(texts))
        and all(isinstance(text, str) for text in texts)
        and all(isinstance(start, int) and not isinstance(start, bool) for start in starts)
    ):
        return texts, starts
    raise InputError(
        f"{table.location(index)}: {column!r} must be {{'text': [texts], 'answer_start': [integers]}} with lists of "
        "equal length, or a list of such pairs"
    )


def _is_impossible(table: Table, index: int, column: str | None) -> bool | None:
    """Whether a row is marked as unanswerable; None if it has no such column."""
    if column is None or column not in table.rows[index]:
        return None
    value = table.rows[index][column]
    if not isinstance(value, bool):
        raise InputError(f"{table.location(index)}: {column!r} is {value!r}; allowed: true, false")
    return value


def _locate_answer(
    table: Table, index: int, column: str, context: str, text: str, start: int | None
) -> tuple[int, bool]:
    """Return the offset of an answer in its passage, and whether it differs from the `start` of the row."""
    if not text.strip():
        raise InputError(
            f"{table.location(index)}: the first text of {column!r} is blank; use an empty list for no answer"
        )
    if start is not None and start >= 0 and context.startswith(text, start):
        return start, False
    offset = context.find(text)
    if offset < 0:
        raise InputError(f"{table.location(index)}: the answer {text!r} does not occur in the passage")
    if context.find(text, offset + 1) >= 0:
        reason = "there is no answer_start" if start is None else f"none is at answer_start {start}"
        raise InputError(
            f"{table.location(index)}: the answer {text!r} occurs several times in the passage and {reason}"
        )
    return offset, start is not None


_SHOWN_CONTEXT = 60  # characters of the passage shown on either side of an answer


class SpanAnswers(Task[SpanExample]):
    """Answer a question with a span of a passage."""

    kind: Literal["spans"] = "spans"
    question: str = "question"
    """Column of the question."""
    context: str = "context"
    """Column of the passage."""
    answer: str = "answers"
    """Column of the gold answers: {text: […], answer_start: […]}, or a list of {text, answer_start}."""
    impossible: str = "is_impossible"
    """Optional column that is true if the passage does not answer the question."""
    id: str = "id"
    """Optional column of the question id, used in the prediction files."""
    may_be_unanswered: bool | None = None
    """Whether questions may be unanswerable, as in SQuAD 2.0; None to decide by the training data."""
    stride: int = Field(default=128, gt=0)
    """Tokens between the starts of consecutive windows of a long passage."""
    question_length: int = Field(default=64, gt=0)
    """Maximum length of a question in tokens; longer ones are truncated."""
    max_answer_length: int = Field(default=30, gt=0)
    """Maximum length of an answer in tokens."""
    n_best: int = Field(default=20, gt=0)
    """Number of start and end positions considered per window, and of candidate answers returned."""
    null_threshold: float = 0.0
    """Predict no answer if its score exceeds the score of the best span by more than this."""

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
        return spans_head(model)

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
        predicted = [answer["answer"] for answer in answers]
        golds = [example.golds or () for example in examples]
        if not self.may_be_unanswered and all(golds):
            return evaluate_answers(predicted, golds, self.metric)
        texts = [next((span["text"] for span in answer["n_best"] if span["text"]), "") for answer in answers]
        odds = [answer["null_odds"] for answer in answers]
        return evaluate_answers(predicted, golds, self.metric, texts=texts, null_odds=odds)

    def gold(self, example: SpanExample) -> str:
        """Return the gold answers joined by " | "; empty if the question is unanswerable."""
        return " | ".join(dict.fromkeys(example.golds or ()))

    def error(self, example: SpanExample, answer: AnswerData) -> float:
        return (1 - f1(answer["answer"], example.golds or ())) * float(answer["score"])

    def describe(self, example: SpanExample) -> str:
        """Return the question and the passage around the answer, or its beginning."""
        begin = max(0, example.begin - _SHOWN_CONTEXT)
        end = (example.end if example.golds else _SHOWN_CONTEXT) + _SHOWN_CONTEXT
        passage = example.context[begin:end]
        marked = ("… " if begin else "") + passage + (" …" if end < len(example.context) else "")
        return " | ".join(" ".join(text.split()) for text in (example.question, marked))

    def notices(self, examples: Sequence[SpanExample]) -> list[str]:
        repaired = [example.id for example in examples if example.is_repaired]
        if not repaired:
            return []
        return [
            f"{len(repaired)} answers are not at their answer_start but occur exactly once elsewhere in the passage; "
            f"that position is used (first: question {repaired[0]!r})"
        ]

    def files(self, examples: Sequence[SpanExample], answers: Sequence[AnswerData]) -> dict[str, str]:
        by_id = {example.id: answer for example, answer in zip(examples, answers, strict=True)}
        fields = ("text", "probability", "start_logit", "end_logit")
        contents: dict[str, Any] = {
            "predictions.json": {name: answer["answer"] for name, answer in by_id.items()},
            "nbest_predictions.json": {
                name: [{field: span[field] for field in fields} for span in answer["n_best"]]
                for name, answer in by_id.items()
            },
        }
        if self.may_be_unanswered:
            contents["null_odds.json"] = {name: answer["null_odds"] for name, answer in by_id.items()}
        return {name: json.dumps(content, indent=1, ensure_ascii=False) + "\n" for name, content in contents.items()}

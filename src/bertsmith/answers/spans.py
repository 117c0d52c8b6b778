"""Extractive question answering: windows over a passage, and the best answer spans in it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np

from bertsmith.answers.sequences import IGNORED, Features, Ragged, TextEncoding
from bertsmith.answers.texts import softmax
from bertsmith.errors import InputError
from bertsmith.text.rows import Table


@dataclass(frozen=True)
class SpanExample:
    """A question about a passage, with its reference answers if known."""

    id: str
    question: str
    context: str
    golds: tuple[str, ...] | None = None
    """Reference answers; empty for an unanswerable question, None if unknown."""
    begin: int = -1
    """Character offset of the first reference answer in the passage."""
    end: int = -1
    """Character offset of its end, exclusive."""
    is_repaired: bool = False
    """Whether `begin` was found by search because the offset in the data was wrong."""


@dataclass(frozen=True, kw_only=True)
class WindowFeatures(Features):
    """Windows as items, with the character offsets of their tokens in the passage."""

    context: np.ndarray
    """Index in `characters` of the passage of every example, (examples,)."""
    characters: tuple[np.ndarray, ...]
    """Character offsets of the tokens of every passage, (tokens, 2) each; examples may share one."""
    first: np.ndarray
    """Index of the first passage token in a window, (items,)."""
    shown: np.ndarray
    """Number of passage tokens in the window, (items,)."""
    skipped: np.ndarray
    """Number of passage tokens before the window, (items,)."""
    may_start: Ragged
    """Same lengths as the tokens: 1 at passage tokens that no other window shows with more context."""

    def span(self, item: int, start: int, end: int) -> tuple[int, int]:
        """Return the character offsets that tokens `start` to `end` of a window cover in the passage."""
        characters = self.characters[self.context[self.example[item]]]
        shift = self.skipped[item] - self.first[item]
        return int(characters[start + shift, 0]), int(characters[end + shift, 1])


def window_starts(tokens: int, room: int, stride: int) -> np.ndarray:
    """First token of each window; the last window reaches the end. An empty passage gets one window."""
    step = min(room, stride)
    return np.arange(0, max(0, tokens - room) + step, step)


def most_context(tokens: int, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Index of the window with the most context for each token, min(left, right) + 0.01 · length; the first on ties.

    Shape: starts and lengths (windows,) -> (tokens,), int64.
    """
    window_of, best = np.zeros(tokens, dtype=np.int64), np.full(tokens, -np.inf)
    for window, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        inside = slice(start, start + length)
        score = np.minimum(np.arange(length), np.arange(length)[::-1]) + 0.01 * length
        window_of[inside][score > best[inside]] = window
        best[inside] = np.maximum(score, best[inside])
    return window_of


def window_features(
    examples: Sequence[SpanExample], encoding: TextEncoding, stride: int, question_length: int
) -> WindowFeatures:
    """Build all windows of all examples, in order, with targets "start" and "end" if reference answers are known.

    The target of a window that does not contain the whole answer is its first token.
    """
    frame = encoding.tokenizer.pair_frame()
    specials = len(frame.before) + len(frame.between) + len(frame.after)
    questions = encoding.tokenizer.encode_plain([example.question for example in examples])
    passage_ids: dict[str, int] = {}
    context = np.array(
        [passage_ids.setdefault(example.context, len(passage_ids)) for example in examples], dtype=np.int64
    )
    passages = encoding.tokenizer.encode_offsets(list(passage_ids))
    before, between, after = (np.array(ids, np.int32) for ids in (frame.before, frame.between, frame.after))

    tokens: list[np.ndarray] = []
    types: list[np.ndarray] = []
    may_start: list[np.ndarray] = []
    rows: list[tuple[int, int, int, int]] = []
    targets: list[tuple[int, int]] = []
    cut = 0
    for index, example in enumerate(examples):
        ids, characters = passages[context[index]]
        question = np.array(questions[index][:question_length], np.int32)
        room = encoding.length - len(question) - specials
        if room < 1:
            raise InputError(
                f"sequences.length is {encoding.length}; at least {len(question) + specials + 1} is needed for the "
                f"question of {example.id!r} and one token of its passage"
            )
        starts = window_starts(len(ids), room, stride)
        lengths = np.minimum(room, len(ids) - starts)
        window_of = most_context(len(ids), starts, lengths)
        answer = _answer_tokens(example, characters)
        begin = len(before) + len(question) + len(between)
        sizes = [len(before), len(question), len(between), 0, len(after)]
        cut += len(starts) if len(questions[index]) > question_length else 0
        for window, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
            tokens.append(np.concatenate([before, question, between, ids[start : start + length], after]))
            sizes[3] = length
            types.append(np.repeat(np.array(frame.types, np.int32), sizes))
            allowed = np.zeros(len(tokens[-1]), np.int32)
            allowed[begin : begin + length] = window_of[start : start + length] == window
            may_start.append(allowed)
            rows.append((index, begin, length, start))
            targets.append(_target(answer, start, length, begin))

    positions = np.array(rows, dtype=np.int64).reshape(-1, 4)
    is_known = bool(examples) and examples[0].golds is not None
    bounds = np.array(targets, dtype=np.int64).reshape(-1, 2)
    sequences = Ragged.of(tokens)
    return WindowFeatures(
        tokens=sequences,
        types=Ragged(np.concatenate(types), sequences.starts) if encoding.has_types and types else None,
        items=np.arange(len(positions) + 1),
        example=positions[:, 0],
        targets={"start": bounds[:, 0], "end": bounds[:, 1]} if is_known else {},
        cut=cut,
        context=context,
        characters=tuple(characters for _, characters in passages),
        first=positions[:, 1],
        shown=positions[:, 2],
        skipped=positions[:, 3],
        may_start=Ragged.of(may_start),
    )


def _answer_tokens(example: SpanExample, characters: np.ndarray) -> tuple[int, int] | None:
    """Return the first and last passage token of the first reference answer; None if the question is unanswerable.

    (IGNORED, IGNORED) if the answer has no tokens, such as one of control characters.
    """
    if not example.golds:
        return None
    inside = np.flatnonzero((characters[:, 0] < example.end) & (characters[:, 1] > example.begin))
    return (int(inside[0]), int(inside[-1])) if len(inside) else (IGNORED, IGNORED)


def _target(answer: tuple[int, int] | None, start: int, length: int, begin: int) -> tuple[int, int]:
    """Return the positions of the answer in a window; 0, 0 if the window does not contain the whole answer."""
    if answer is None:
        return 0, 0
    if answer[0] == IGNORED:
        return answer
    if answer[0] < start or answer[1] >= start + length:
        return 0, 0
    return answer[0] - start + begin, answer[1] - start + begin


NO_CANDIDATE = 1e9  # null odds without any candidate span; JSON has no infinity
_WINDOW_BATCH = 2048


@dataclass(frozen=True)
class Candidates:
    """Candidate spans of all examples, grouped by example, the best first.

    Shape: (candidates,) each but `bounds`, (examples + 1,). `start` and `end` are positions in the window.
    """

    bounds: np.ndarray
    item: np.ndarray
    start: np.ndarray
    end: np.ndarray
    start_score: np.ndarray
    end_score: np.ndarray

    @property
    def score(self) -> np.ndarray:
        return self.start_score + self.end_score


@dataclass(frozen=True)
class Span:
    """A candidate answer; an empty text means "no answer"."""

    text: str
    start_score: float
    end_score: float
    begin: int | None = None
    end: int | None = None

    @property
    def score(self) -> float:
        return self.start_score + self.end_score


class SpanCandidate(TypedDict):
    """One of the n best spans of an answer."""

    text: str
    probability: float
    start_logit: float
    end_logit: float
    begin: int | None
    end: int | None


class SpanAnswer(TypedDict):
    """The chosen span, its probability among the n best, and how much "no answer" outscores the best span."""

    answer: str
    score: float
    begin: int | None
    end: int | None
    null_odds: float
    n_best: list[SpanCandidate]


def best_spans(
    features: WindowFeatures, outputs: Sequence[np.ndarray], n_best: int, max_answer_length: int
) -> Candidates:
    """Combine the n best starts and n best ends of every window into candidate spans.

    A candidate lies inside the passage, does not end before it starts, has at most `max_answer_length` tokens and
    starts at a token that no other window shows with more context.

    Shape: outputs (tokens, 2) each, window by window.
    """
    batches = [
        _window_spans(features, outputs, begin, n_best, max_answer_length)
        for begin in range(0, max(1, len(outputs)), _WINDOW_BATCH)
    ]
    item, start, end, start_score, end_score = (np.concatenate(column) for column in zip(*batches, strict=True))
    example = features.example[item]
    # stable: ties stay in the order of windows, then of their best starts, then of their best ends
    order = np.lexsort((-(start_score + end_score), example))
    bounds = np.searchsorted(example[order], np.arange(len(features.context) + 1))
    columns = (column[order] for column in (item, start, end, start_score, end_score))
    return Candidates(bounds, *columns)


def _window_spans(
    features: WindowFeatures, outputs: Sequence[np.ndarray], begin: int, n_best: int, max_answer_length: int
) -> tuple[np.ndarray, ...]:
    """Candidates of a batch of windows: item, start, end and the scores of both."""
    batch = outputs[begin : begin + _WINDOW_BATCH]
    lengths = np.array([len(window) for window in batch], dtype=np.int64)
    is_token = np.arange(lengths.max(initial=0)) < lengths[:, None]
    scores = np.full((*is_token.shape, 2), -np.inf, dtype=np.float64)
    may_start = np.zeros(is_token.shape, dtype=bool)
    if len(batch):
        scores[is_token] = np.concatenate(batch)
        bounds = features.may_start.starts
        may_start[is_token] = features.may_start.tokens[bounds[begin] : bounds[begin + len(batch)]] > 0
    best = np.argsort(-scores, axis=1, kind="stable")[:, :n_best]
    starts, ends = best[..., 0], best[..., 1]
    first, shown = features.first[begin : begin + len(batch)], features.shown[begin : begin + len(batch)]
    is_inside = (ends >= first[:, None]) & (ends < (first + shown)[:, None])
    # (windows, starts, ends)
    tokens = ends[:, None, :] - starts[:, :, None] + 1
    is_answer = np.take_along_axis(may_start, starts, 1)[:, :, None] & is_inside[:, None, :]
    window, start, end = np.nonzero(is_answer & (tokens >= 1) & (tokens <= max_answer_length))
    start, end = starts[window, start], ends[window, end]
    return window + begin, start, end, scores[window, start, 0], scores[window, end, 1]


def no_answer_scores(features: WindowFeatures, outputs: Sequence[np.ndarray]) -> np.ndarray:
    """Start and end score of the first token, from the window of each example with the lowest sum.

    Shape: (examples, 2)
    """
    firsts = np.array([window[0] for window in outputs], dtype=np.float64).reshape(-1, 2)
    order = np.lexsort((firsts.sum(-1), features.example))
    bounds = np.searchsorted(features.example[order], np.arange(len(features.context)))
    lowest: np.ndarray = firsts[order][bounds]
    return lowest


def distinct_texts(
    candidates: Candidates, example: int, features: WindowFeatures, context: str, n_best: int
) -> list[Span]:
    """Return the best spans of one question with distinct texts."""
    spans: list[Span] = []
    seen: set[str] = set()
    for index in range(candidates.bounds[example], candidates.bounds[example + 1]):
        if len(spans) == n_best:
            break
        begin, end = features.span(int(candidates.item[index]), candidates.start[index], candidates.end[index])
        covered = context[begin:end]
        text = covered.strip()
        if not text or text in seen:
            continue
        seen.add(text)
        begin += covered.index(text)
        scores = float(candidates.start_score[index]), float(candidates.end_score[index])
        spans.append(Span(text, *scores, begin, begin + len(text)))
    return spans


def with_no_answer(spans: list[Span], null: Span, n_best: int) -> list[Span]:
    """Insert "no answer" into the best spans by its score; it is never dropped."""
    index = sum(span.score >= null.score for span in spans)
    return [*spans[:index], null, *spans[index : max(index, n_best - 1)]]


def read_passage_question(table: Table, index: int, *, id: str, question: str, context: str) -> SpanExample:
    """Read the question of a row without targets, given the names of its columns."""
    question_id = table.rows[index].get(id, index)
    return SpanExample(str(question_id), table.text(index, question), table.text(index, context))


def span_answers(
    examples: Sequence[SpanExample],
    features: WindowFeatures,
    outputs: Sequence[np.ndarray],
    *,
    n_best: int,
    max_answer_length: int,
    null_threshold: float,
    may_be_unanswered: bool | None,
) -> list[SpanAnswer]:
    """Return the best answer to each question and its n best; outputs (tokens, 2) per window."""
    candidates = best_spans(features, outputs, n_best, max_answer_length)
    null_scores = no_answer_scores(features, outputs)
    answers: list[SpanAnswer] = []
    for index, example in enumerate(examples):
        spans = distinct_texts(candidates, index, features, example.context, n_best)
        null = Span("", *null_scores[index].tolist())
        best = with_no_answer(spans, null, n_best) if may_be_unanswered or not spans else spans
        odds = null.score - spans[0].score if spans else NO_CANDIDATE
        is_unanswered = not spans or (bool(may_be_unanswered) and odds > null_threshold)
        answers.append(_answer(best, null if is_unanswered else spans[0], odds))
    return answers


def _answer(best: list[Span], chosen: Span, odds: float) -> SpanAnswer:
    probabilities = softmax(np.array([span.score for span in best])).tolist()
    return {
        "answer": chosen.text,
        "score": probabilities[best.index(chosen)],
        "begin": chosen.begin,
        "end": chosen.end,
        "null_odds": odds,
        "n_best": [
            {
                "text": span.text,
                "probability": probability,
                "start_logit": span.start_score,
                "end_logit": span.end_score,
                "begin": span.begin,
                "end": span.end,
            }
            for span, probability in zip(best, probabilities, strict=True)
        ],
    }

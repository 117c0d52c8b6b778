"""Scores of starts and ends → texts: the best spans of all windows of a question, and the score of no answer.

The rules are those of BERT's code; the text of a span is cut from the passage by character offsets.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bertsmith.runtime.tasks.spans_windows import WindowFeatures

NO_CANDIDATE = 1e9  # stands for infinity, which JSON cannot say
_WINDOWS = 2048  # that are looked at together


@dataclass(frozen=True)
class Candidates:
    """Spans of all examples, those of an example side by side, the best first.

    Shape: (candidates,) each but `bounds`, (examples + 1,). `start` and `end` are places in the window.
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
class Found:
    """One of the best answers to a question; no text means that there is no answer."""

    text: str
    start_score: float
    end_score: float
    begin: int | None = None
    end: int | None = None

    @property
    def score(self) -> float:
        return self.start_score + self.end_score


def best_spans(features: WindowFeatures, outputs: Sequence[np.ndarray], n_best: int, longest: int) -> Candidates:
    """Pairs of the n best starts and n best ends of every window that can be answers.

    A pair can be one if it lies inside the passage, does not end before it starts, is not longer than `longest` tokens
    and starts at a token that no other window shows with more context.

    Shape: outputs (tokens, 2) each, window by window.
    """
    parts = [
        _window_spans(features, outputs, begin, n_best, longest) for begin in range(0, max(1, len(outputs)), _WINDOWS)
    ]
    item, start, end, start_score, end_score = (np.concatenate(column) for column in zip(*parts, strict=True))
    example = features.example[item]
    # stable, so that equals stay in the order of windows, then of their best starts, then of their best ends
    order = np.lexsort((-(start_score + end_score), example))
    bounds = np.searchsorted(example[order], np.arange(len(features.context) + 1))
    columns = (column[order] for column in (item, start, end, start_score, end_score))
    return Candidates(bounds, *columns)


def _window_spans(
    features: WindowFeatures, outputs: Sequence[np.ndarray], begin: int, n_best: int, longest: int
) -> tuple[np.ndarray, ...]:
    """The candidates of some windows: item, start, end and the scores of both."""
    some = outputs[begin : begin + _WINDOWS]
    lengths = np.array([len(own) for own in some], dtype=np.int64)
    is_token = np.arange(lengths.max(initial=0)) < lengths[:, None]
    scores = np.full((*is_token.shape, 2), -np.inf, dtype=np.float64)
    may_start = np.zeros(is_token.shape, dtype=bool)
    if len(some):
        scores[is_token] = np.concatenate(some)
        bounds = features.may_start.starts
        may_start[is_token] = features.may_start.tokens[bounds[begin] : bounds[begin + len(some)]] > 0
    best = np.argsort(-scores, axis=1, kind="stable")[:, :n_best]
    starts, ends = best[..., 0], best[..., 1]
    first, shown = features.first[begin : begin + len(some)], features.shown[begin : begin + len(some)]
    is_inside = (ends >= first[:, None]) & (ends < (first + shown)[:, None])
    # (windows, starts, ends)
    tokens = ends[:, None, :] - starts[:, :, None] + 1
    is_answer = np.take_along_axis(may_start, starts, 1)[:, :, None] & is_inside[:, None, :]
    window, start, end = np.nonzero(is_answer & (tokens >= 1) & (tokens <= longest))
    start, end = starts[window, start], ends[window, end]
    return window + begin, start, end, scores[window, start, 0], scores[window, end, 1]


def no_answer_scores(features: WindowFeatures, outputs: Sequence[np.ndarray]) -> np.ndarray:
    """The scores of the first token as start and end, in that window of each example where their sum is least.

    Shape: (examples, 2)
    """
    firsts = np.array([own[0] for own in outputs], dtype=np.float64).reshape(-1, 2)
    order = np.lexsort((firsts.sum(-1), features.example))
    bounds = np.searchsorted(features.example[order], np.arange(len(features.context)))
    least: np.ndarray = firsts[order][bounds]
    return least


def distinct_texts(
    candidates: Candidates, example: int, features: WindowFeatures, context: str, n_best: int
) -> list[Found]:
    """The best answers to one question that differ in their text."""
    found: list[Found] = []
    seen: set[str] = set()
    for index in range(candidates.bounds[example], candidates.bounds[example + 1]):
        if len(found) == n_best:
            break
        begin, end = features.span(int(candidates.item[index]), candidates.start[index], candidates.end[index])
        whole = context[begin:end]
        text = whole.strip()
        if not text or text in seen:
            continue
        seen.add(text)
        begin += whole.index(text)
        scores = float(candidates.start_score[index]), float(candidates.end_score[index])
        found.append(Found(text, *scores, begin, begin + len(text)))
    return found


def with_no_answer(found: list[Found], none: Found, n_best: int) -> list[Found]:
    """The best answers with "no answer" among them at the place of its score; it is never left out."""
    place = sum(answer.score >= none.score for answer in found)
    return [*found[:place], none, *found[place : max(place, n_best - 1)]]

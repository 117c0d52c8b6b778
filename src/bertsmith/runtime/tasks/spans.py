"""A question about a passage, and what scores of the passage's tokens mean: the best spans of it, or no answer."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from bertsmith.runtime.rows import Table
from bertsmith.runtime.tasks.spans_text import (
    NO_CANDIDATE,
    Found,
    best_spans,
    distinct_texts,
    no_answer_scores,
    with_no_answer,
)
from bertsmith.runtime.tasks.spans_windows import SpanExample, WindowFeatures
from bertsmith.runtime.tasks.texts import softmax


def asked_question(table: Table, index: int, *, id: str, question: str, context: str) -> SpanExample:
    """The question of a row whose answer is not known, given the names of its columns."""
    name = table.rows[index].get(id, index)
    return SpanExample(str(name), table.text(index, question), table.text(index, context))


def span_answers(
    examples: Sequence[SpanExample],
    features: WindowFeatures,
    outputs: Sequence[np.ndarray],
    *,
    n_best: int,
    longest: int,
    null_threshold: float,
    may_be_unanswered: bool | None,
) -> list[dict[str, Any]]:
    """The best answer to each question with all that were nearly as good; outputs (tokens, 2) window by window."""
    candidates = best_spans(features, outputs, n_best, longest)
    none = no_answer_scores(features, outputs)
    found = []
    for index, example in enumerate(examples):
        texts = distinct_texts(candidates, index, features, example.context, n_best)
        nothing = Found("", *none[index].tolist())
        kept = with_no_answer(texts, nothing, n_best) if may_be_unanswered or not texts else texts
        odds = nothing.score - texts[0].score if texts else NO_CANDIDATE
        says_none = not texts or (bool(may_be_unanswered) and odds > null_threshold)
        found.append(_answer(kept, nothing if says_none else texts[0], odds))
    return found


def _answer(kept: list[Found], chosen: Found, odds: float) -> dict[str, Any]:
    """What is said of one question: the answer chosen among those kept."""
    shares = softmax(np.array([one.score for one in kept])).tolist()
    return {
        "answer": chosen.text,
        "score": shares[kept.index(chosen)],
        "begin": chosen.begin,
        "end": chosen.end,
        "null_odds": odds,
        "n_best": [
            {
                "text": one.text,
                "probability": share,
                "start_logit": one.start_score,
                "end_logit": one.end_score,
                "begin": one.begin,
                "end": one.end,
            }
            for one, share in zip(kept, shares, strict=True)
        ],
    }

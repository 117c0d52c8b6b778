"""How good answers are that are texts: exact match and F1 as SQuAD's own scorers compute them."""

import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np

from bertsmith.tasks.base import Evaluation
from bertsmith.tasks.metrics.base import main_metric

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

"""How good vectors of texts are: do cosines follow what people say, does a text find its like."""

import numpy as np
import torch

from bertsmith.tasks.base import Evaluation
from bertsmith.tasks.metrics.base import evaluate_metrics
from bertsmith.tasks.metrics.labels import average_precision, ranked_counts
from bertsmith.tasks.metrics.values import pearson, spearman

_CHUNK = 1024  # texts that are compared with all others at once


def evaluate_similarity(cosines: np.ndarray, values: np.ndarray, metric: str | None) -> Evaluation:
    """How well cosines follow how alike texts are; the main figure is Spearman's correlation.

    Shape: cosines and values (pairs,).
    """
    return evaluate_metrics({"spearman": spearman, "pearson": pearson}, (cosines, values), metric)


def evaluate_likeness(cosines: np.ndarray, is_alike: np.ndarray, metric: str | None) -> Evaluation:
    """How well cosines tell like pairs from unlike ones; the main figure is average precision.

    Shape: cosines and is_alike (pairs,).
    """
    return evaluate_metrics({"average_precision": _precision, "roc_area": roc_area}, (cosines, is_alike), metric)


def evaluate_retrieval(ranks: np.ndarray, metric: str | None) -> Evaluation:
    """How well texts find their likes; the main figure is the mean reciprocal rank.

    Shape: ranks (pairs,), those of the likes, from 1.
    """
    return evaluate_metrics({"mrr": mean_reciprocal_rank, "accuracy_at_1": accuracy_at_1}, (ranks,), metric)


def evaluate_spread(vectors: np.ndarray, metric: str | None) -> Evaluation:
    """How evenly vectors of length 1 lie, all that can be said of texts alone.

    Shape: (texts, width).
    """
    return evaluate_metrics({"uniformity": uniformity}, (vectors,), metric)


def roc_area(cosines: np.ndarray, is_alike: np.ndarray) -> float:
    """How often a like pair has a greater cosine than an unlike one, in percent; 50 where there are not both."""
    if is_alike.all() or not is_alike.any():
        return 50.0
    hits, false = ranked_counts(_shares(cosines), torch.from_numpy(is_alike))
    start = torch.zeros(1)
    true_rate, false_rate = (torch.cat([start, counts / counts[-1]]) for counts in (hits, false))
    return 100 * float(torch.trapezoid(true_rate, false_rate))


def mean_reciprocal_rank(ranks: np.ndarray) -> float:
    return 100 * float((1 / ranks).mean())


def accuracy_at_1(ranks: np.ndarray) -> float:
    """The share of texts whose like comes first."""
    return 100 * float((ranks == 1).mean())


def uniformity(vectors: np.ndarray) -> float:
    """Minus the log of the mean of exp(−2 · squared distance) over pairs of texts (Wang & Isola 2020, section 4.1.2).

    Their sign turned, so that more is better: 0 if all vectors are one, up to about 4 if they lie evenly.
    """
    count, total = len(vectors), 0.0
    if count < 2:
        return 0.0
    for begin in range(0, count, _CHUNK):
        cosines = vectors[begin : begin + _CHUNK] @ vectors.T
        total += float(np.exp(-4 * (1 - cosines)).sum())  # the squared distance is 2 · (1 − cosine)
    return -float(np.log((total - count) / (count * (count - 1))))


def _precision(cosines: np.ndarray, is_alike: np.ndarray) -> float:
    return average_precision(_shares(cosines).numpy(), is_alike) if is_alike.any() else 0.0


def _shares(cosines: np.ndarray) -> torch.Tensor:
    """Cosines scaled to the range 0 to 1."""
    return torch.from_numpy((cosines.astype(np.float64) + 1) / 2).clamp(0, 1)

"""How good answers are that are numbers."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from bertsmith.tasks.base import Evaluation
from bertsmith.tasks.metrics.base import evaluate_metrics


def pearson(said: np.ndarray, right: np.ndarray) -> float:
    """The correlation in percent; 0 where either side is one number over and over."""
    if len(said) == 0 or said.min() == said.max() or right.min() == right.max():
        return 0.0
    first, second = (_standard(values.astype(np.float64)) for values in (said, right))
    return 100 * float((first * second).mean())


def spearman(said: np.ndarray, right: np.ndarray) -> float:
    """The correlation of the ranks in percent; equal numbers share the mean of their ranks."""
    return pearson(ranks(said), ranks(right))


def squared_error(said: np.ndarray, right: np.ndarray) -> float:
    """The mean squared error, in the squares of the answers' own unit."""
    return float(((said.astype(np.float64) - right) ** 2).mean())


VALUE_METRICS = {"spearman": spearman, "pearson": pearson}


def evaluate_values(said: np.ndarray, right: np.ndarray, metric: str | None) -> Evaluation:
    """The metrics of some answers; the main one is Spearman's correlation unless told otherwise.

    The mean squared error is among them and cannot be the main one: less of it is better.
    Shape: said and right (examples,).
    """
    evaluation = evaluate_metrics(VALUE_METRICS, (said, right), metric)
    return replace(evaluation, metrics={**evaluation.metrics, "mse": squared_error(said, right)})


def ranks(values: np.ndarray) -> np.ndarray:
    """The place of every number among all of them by size, from 1; equal ones share the mean of theirs.

    Shape: (values,) -> (values,).
    """
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    shared: np.ndarray = (last - (counts - 1) / 2)[group]
    return shared


def _standard(values: np.ndarray) -> np.ndarray:
    centred = values - values.mean()
    standard: np.ndarray = centred / np.sqrt((centred**2).mean())
    return standard


def micro_f1(said: np.ndarray, scores: np.ndarray, right: np.ndarray) -> float:
    """F1 over all labels of all examples together."""
    return 100 * float(_f1((said & right).sum(), said.sum(), right.sum()))


def macro_f1(said: np.ndarray, scores: np.ndarray, right: np.ndarray) -> float:
    """The mean of each label's F1; that of a label neither said nor right anywhere is 0."""
    return 100 * float(_f1((said & right).sum(0), said.sum(0), right.sum(0)).mean())


def subset_accuracy(said: np.ndarray, scores: np.ndarray, right: np.ndarray) -> float:
    """The share of examples with exactly the right labels."""
    return 100 * float((said == right).all(-1).mean())


def mean_average_precision(said: np.ndarray, scores: np.ndarray, right: np.ndarray) -> float:
    """The mean of the average precision of the labels that some example has."""
    has_examples = right.any(0)
    if not has_examples.any():
        return 0.0
    columns = np.flatnonzero(has_examples).tolist()
    found = [average_precision(scores[:, column], right[:, column]) for column in columns]
    return sum(found) / len(found)


def average_precision(scores: np.ndarray, right: np.ndarray) -> float:
    """The mean, over what is right, of the precision down to it in the order of the scores.

    Shape: (examples,) each.
    """
    hits, false = ranked_counts(torch.from_numpy(scores), torch.from_numpy(right))
    precision = (hits / (hits + false)).flip(0)
    recall = torch.cat([(hits / hits[-1]).flip(0), torch.zeros(1)])
    return 100 * float(-torch.sum((recall[1:] - recall[:-1]) * precision))


def ranked_counts(scores: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """True and false positives at each distinct score taken as the threshold, from the highest down.

    Shape: (examples,) each -> (thresholds,) each, int64.
    """
    order = scores.argsort(descending=True)
    ends = torch.cat([scores[order].diff().nonzero()[:, 0], torch.tensor([len(order) - 1])])
    hits = right[order].long().cumsum(0)[ends]
    return hits, ends + 1 - hits


LABEL_METRICS = {
    "micro_f1": micro_f1,
    "macro_f1": macro_f1,
    "subset_accuracy": subset_accuracy,
    "mean_average_precision": mean_average_precision,
}


def evaluate_labels(said: np.ndarray, scores: np.ndarray, right: np.ndarray, metric: str | None) -> Evaluation:
    """The metrics of some answers; the main one is micro F1 unless told otherwise.

    Shape: (examples, labels) each; said and right bool, scores between 0 and 1.
    """
    return evaluate_metrics(LABEL_METRICS, (said, scores, right), metric)


def _f1(hits: np.ndarray, said: np.ndarray, right: np.ndarray) -> np.ndarray:
    """F1 from counts, 0 where there is nothing at all."""
    shares: np.ndarray = 2 * hits / np.maximum(said + right, 1)
    return shares


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

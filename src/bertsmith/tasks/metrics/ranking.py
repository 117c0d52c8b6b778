"""Metrics of values, label sets and embeddings: correlations, F1, average precision, ROC AUC, retrieval ranks."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from bertsmith.tasks.base import Evaluation
from bertsmith.tasks.metrics.base import evaluate_metrics


def pearson(predicted: np.ndarray, values: np.ndarray) -> float:
    """Pearson correlation in percent; 0 if either side is constant."""
    if len(predicted) == 0 or predicted.min() == predicted.max() or values.min() == values.max():
        return 0.0
    first, second = (_standardise(array.astype(np.float64)) for array in (predicted, values))
    return 100 * float((first * second).mean())


def spearman(predicted: np.ndarray, values: np.ndarray) -> float:
    """Spearman correlation in percent; ties get their mean rank."""
    return pearson(ranks(predicted), ranks(values))


def squared_error(predicted: np.ndarray, values: np.ndarray) -> float:
    """Mean squared error in the squared unit of the values."""
    return float(((predicted.astype(np.float64) - values) ** 2).mean())


VALUE_METRICS = {"spearman": spearman, "pearson": pearson}


def evaluate_values(predicted: np.ndarray, values: np.ndarray, metric: str | None) -> Evaluation:
    """Compute the metrics of predicted values; the default main metric is Spearman's correlation.

    The mean squared error is reported but cannot be the main metric, because lower is better.
    Shape: predicted and values (examples,).
    """
    evaluation = evaluate_metrics(VALUE_METRICS, (predicted, values), metric)
    return replace(evaluation, metrics={**evaluation.metrics, "mse": squared_error(predicted, values)})


def ranks(values: np.ndarray) -> np.ndarray:
    """Ascending ranks from 1; ties get their mean rank.

    Shape: (values,) -> (values,).
    """
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean_ranks: np.ndarray = (last - (counts - 1) / 2)[group]
    return mean_ranks


def _standardise(values: np.ndarray) -> np.ndarray:
    centred = values - values.mean()
    standardised: np.ndarray = centred / np.sqrt((centred**2).mean())
    return standardised


def micro_f1(predicted: np.ndarray, scores: np.ndarray, labels: np.ndarray) -> float:
    """F1 over all labels of all examples together."""
    return 100 * float(_f1((predicted & labels).sum(), predicted.sum(), labels.sum()))


def macro_f1(predicted: np.ndarray, scores: np.ndarray, labels: np.ndarray) -> float:
    """Mean F1 over labels; 0 for a label that is neither predicted nor present."""
    return 100 * float(_f1((predicted & labels).sum(0), predicted.sum(0), labels.sum(0)).mean())


def subset_accuracy(predicted: np.ndarray, scores: np.ndarray, labels: np.ndarray) -> float:
    """Percentage of examples whose set of labels is predicted exactly."""
    return 100 * float((predicted == labels).all(-1).mean())


def mean_average_precision(predicted: np.ndarray, scores: np.ndarray, labels: np.ndarray) -> float:
    """Mean average precision over the labels that occur in at least one example."""
    has_examples = labels.any(0)
    if not has_examples.any():
        return 0.0
    columns = np.flatnonzero(has_examples).tolist()
    precisions = [average_precision(scores[:, column], labels[:, column]) for column in columns]
    return sum(precisions) / len(precisions)


def average_precision(scores: np.ndarray, labels: np.ndarray) -> float:
    """Average precision: precision at each threshold, weighted by the gain in recall.

    Shape: (examples,) each.
    """
    hits, false = ranked_counts(torch.from_numpy(scores), torch.from_numpy(labels))
    precision = (hits / (hits + false)).flip(0)
    recall = torch.cat([(hits / hits[-1]).flip(0), torch.zeros(1)])
    return 100 * float(-torch.sum((recall[1:] - recall[:-1]) * precision))


def ranked_counts(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """True and false positives at each distinct score used as threshold, in descending order.

    Shape: (examples,) each -> (thresholds,) each, int64.
    """
    order = scores.argsort(descending=True)
    ends = torch.cat([scores[order].diff().nonzero()[:, 0], torch.tensor([len(order) - 1])])
    hits = labels[order].long().cumsum(0)[ends]
    return hits, ends + 1 - hits


LABEL_METRICS = {
    "micro_f1": micro_f1,
    "macro_f1": macro_f1,
    "subset_accuracy": subset_accuracy,
    "mean_average_precision": mean_average_precision,
}


def evaluate_labels(predicted: np.ndarray, scores: np.ndarray, labels: np.ndarray, metric: str | None) -> Evaluation:
    """Compute the metrics of multi-label predictions; the default main metric is micro F1.

    Shape: (examples, labels) each; predicted and labels bool, scores between 0 and 1.
    """
    return evaluate_metrics(LABEL_METRICS, (predicted, scores, labels), metric)


def _f1(hits: np.ndarray, predicted: np.ndarray, actual: np.ndarray) -> np.ndarray:
    """F1 from counts; 0 if all are 0."""
    scores: np.ndarray = 2 * hits / np.maximum(predicted + actual, 1)
    return scores


_CHUNK = 1024  # vectors compared with all others in one matrix product


def evaluate_similarity(cosines: np.ndarray, values: np.ndarray, metric: str | None) -> Evaluation:
    """Correlate cosines with similarity scores; the default main metric is Spearman's correlation.

    Shape: cosines and values (pairs,).
    """
    return evaluate_metrics({"spearman": spearman, "pearson": pearson}, (cosines, values), metric)


def evaluate_pair_labels(cosines: np.ndarray, is_similar: np.ndarray, metric: str | None) -> Evaluation:
    """Score cosines as a classifier of similar pairs; the default main metric is average precision.

    Shape: cosines and is_similar (pairs,).
    """
    return evaluate_metrics({"average_precision": _precision, "roc_area": roc_area}, (cosines, is_similar), metric)


def evaluate_retrieval(ranks: np.ndarray, metric: str | None) -> Evaluation:
    """Score the retrieval of paired texts; the default main metric is the mean reciprocal rank.

    Shape: ranks (pairs,), of the paired texts, from 1.
    """
    return evaluate_metrics({"mrr": mean_reciprocal_rank, "accuracy_at_1": accuracy_at_1}, (ranks,), metric)


def evaluate_uniformity(vectors: np.ndarray, metric: str | None) -> Evaluation:
    """Uniformity of unit vectors, the only metric of texts without pairs.

    Shape: (texts, width).
    """
    return evaluate_metrics({"uniformity": uniformity}, (vectors,), metric)


def evaluate_target_vectors(vectors: np.ndarray, targets: np.ndarray, metric: str | None) -> Evaluation:
    """Mean cosine of vectors and their targets, in percent.

    Shape: unit vectors (texts, width) each.
    """
    cosines = (vectors * targets).sum(-1)
    return evaluate_metrics({"cosine": lambda values: 100 * float(values.mean())}, (cosines,), metric)


def roc_area(cosines: np.ndarray, is_similar: np.ndarray) -> float:
    """Area under the ROC curve in percent; 50 if all pairs have the same label."""
    if is_similar.all() or not is_similar.any():
        return 50.0
    hits, false = ranked_counts(_unit_scores(cosines), torch.from_numpy(is_similar))
    start = torch.zeros(1)
    true_rate, false_rate = (torch.cat([start, counts / counts[-1]]) for counts in (hits, false))
    return 100 * float(torch.trapezoid(true_rate, false_rate))


def mean_reciprocal_rank(ranks: np.ndarray) -> float:
    return 100 * float((1 / ranks).mean())


def accuracy_at_1(ranks: np.ndarray) -> float:
    """Percentage of texts whose paired text is ranked first."""
    return 100 * float((ranks == 1).mean())


def uniformity(vectors: np.ndarray) -> float:
    """Minus the log of the mean of exp(−2 · squared distance) over pairs of texts (Wang & Isola 2020, section 4.1.2).

    The sign is reversed so that higher is better: 0 if all vectors are equal, about 4 if they are spread evenly.
    """
    count, total = len(vectors), 0.0
    if count < 2:
        return 0.0
    for start in range(0, count, _CHUNK):
        cosines = vectors[start : start + _CHUNK] @ vectors.T
        total += float(np.exp(-4 * (1 - cosines)).sum())  # the squared distance is 2 · (1 − cosine)
    return -float(np.log((total - count) / (count * (count - 1))))


def _precision(cosines: np.ndarray, is_similar: np.ndarray) -> float:
    return average_precision(_unit_scores(cosines).numpy(), is_similar) if is_similar.any() else 0.0


def _unit_scores(cosines: np.ndarray) -> torch.Tensor:
    """Cosines rescaled to [0, 1]."""
    return torch.from_numpy((cosines.astype(np.float64) + 1) / 2).clamp(0, 1)

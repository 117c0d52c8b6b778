"""How good answers are that are any number of labels."""

import numpy as np
import torch
from torch import Tensor

from bertsmith.tasks.base import Evaluation
from bertsmith.tasks.metrics.base import evaluate_metrics


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

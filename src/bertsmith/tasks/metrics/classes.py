"""How good answers are that are one of several classes."""

import numpy as np
import torch
from torchmetrics.functional.classification import (
    multiclass_accuracy,
    multiclass_f1_score,
    multiclass_matthews_corrcoef,
)

from bertsmith.errors import InputError, nearest
from bertsmith.tasks.base import Judgement


def accuracy(said: np.ndarray, right: np.ndarray, classes: int) -> float:
    return 100 * float(multiclass_accuracy(*_tensors(said, right), num_classes=classes, average="micro"))


def f1(said: np.ndarray, right: np.ndarray, classes: int) -> float:
    """Of class 1 where there are two, else the mean over all classes."""
    scores = multiclass_f1_score(*_tensors(said, right), num_classes=classes, average="none")
    return 100 * float(scores[1] if classes == 2 else scores.mean())


def matthews(said: np.ndarray, right: np.ndarray, classes: int) -> float:
    return 100 * float(multiclass_matthews_corrcoef(*_tensors(said, right), num_classes=classes))


CLASS_METRICS = {"accuracy": accuracy, "f1": f1, "matthews": matthews}


def class_judgement(said: np.ndarray, right: np.ndarray, classes: int, metric: str | None) -> Judgement:
    """The figures of some answers; the main one is accuracy unless told otherwise.

    Shape: said and right (examples,), the numbers of classes.
    """
    main = metric or "accuracy"
    if main not in CLASS_METRICS:
        raise InputError(f"task.metric is {main!r}; {nearest(main, CLASS_METRICS)}")
    figures = {name: compute(said, right, classes) for name, compute in CLASS_METRICS.items()}
    return Judgement(main, figures, lambda chosen: CLASS_METRICS[main](said[chosen], right[chosen], classes))


def _tensors(said: np.ndarray, right: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(said), torch.from_numpy(right)

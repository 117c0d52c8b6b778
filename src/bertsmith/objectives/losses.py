"""One right class out of several: what all objectives that ask for one compute."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bertsmith.answers.sequences import IGNORED
from bertsmith.objectives.base import Share, Sums


def wide(scores: Tensor) -> Tensor:
    """Scores in at least float32: sums of exponentials would lose most of their digits in half precision."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def class_sums(scores: Tensor, targets: Tensor, weights: tuple[float, ...] = ()) -> Sums:
    """Cross-entropy and hits over some targets, those that are IGNORED left out; `weights` are those of the classes.

    Shape: scores (targets, classes), targets (targets,).
    """
    weight = wide(scores).new_tensor(weights) if weights else None
    loss = cross_entropy(wide(scores), targets, weight=weight, ignore_index=IGNORED, reduction="sum")
    hits = (scores.detach().argmax(-1) == targets).sum()
    return Sums(loss, {"accuracy": Share(hits, (targets != IGNORED).sum())})


_LOWEST = -1e4  # a score whose share is 0 in every precision, and whose logarithm is still a number


def taught(scores: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """Cross-entropy of beliefs under a teacher's, which gets no gradient; of a single score, the squared error.

    With a temperature T both are softened by it, and the loss is multiplied by T², so that its gradient keeps its size.
    Shape: both (items, …, outcomes); the result (items,), the mean over the axes between.
    """
    if scores.shape[-1] == 1:
        return squared_error(scores, teacher.detach())
    shares = (bounded(teacher.detach()) / temperature).softmax(-1)
    entropies = -(shares * (bounded(scores) / temperature).log_softmax(-1)).sum(-1)
    return temperature**2 * by_item(entropies)


def squared_error(scores: Tensor, other: Tensor) -> Tensor:
    """The mean squared difference of the scores themselves; shapes as in `taught`."""
    return by_item((bounded(scores) - bounded(other)).square().mean(-1))


def bounded(scores: Tensor) -> Tensor:
    """Scores in at least float32; an outcome that is impossible may have the score -inf."""
    return wide(scores).clamp(min=_LOWEST)


def by_item(values: Tensor) -> Tensor:
    """The mean of what belongs to one item: (items, …) -> (items,)."""
    return values if values.dim() == 1 else values.flatten(1).mean(1)

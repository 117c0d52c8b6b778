"""One right class out of several: what all objectives that ask for one compute."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bertsmith.batches.batch import IGNORED
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

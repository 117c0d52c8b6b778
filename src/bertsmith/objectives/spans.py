"""Learn where an answer begins and ends in a window of text."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bertsmith.batches.batch import IGNORED
from bertsmith.batches.examples import TaskBatch
from bertsmith.objectives.base import Share, Sums
from bertsmith.objectives.supervised import Supervised


@dataclass(frozen=True)
class Spans(Supervised):
    """The mean of two cross-entropies over the tokens of a window: targets "start" and "end", (items,).

    Both are taken over real tokens only, so that the loss of a window is the same however it lies in memory; BERT's
    code lets the pads of a row take part.
    """

    def sums(self, outputs: Tensor, batch: TaskBatch) -> Sums:
        """Shape: outputs (batch, length, 2) or (tokens, 2)."""
        wide = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        rows, layout = batch.layout.pad(wide)
        if layout.is_token is not None:
            rows = torch.where(layout.is_token[..., None], rows, torch.finfo(rows.dtype).min)
        start, end = rows.unbind(-1)
        is_target = batch.targets["start"] != IGNORED
        loss = _cross_entropy(start, batch.targets["start"]) + _cross_entropy(end, batch.targets["end"])
        hits = (start.detach().argmax(-1) == batch.targets["start"]) & (end.detach().argmax(-1) == batch.targets["end"])
        return Sums(loss / 2, {"accuracy": Share(hits.sum(), is_target.sum())})

    def count(self, batch: TaskBatch) -> Tensor:
        return (batch.targets["start"] != IGNORED).sum()


def _cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(scores, targets, ignore_index=IGNORED, reduction="sum")

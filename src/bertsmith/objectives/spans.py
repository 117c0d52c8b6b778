"""Learn where an answer begins and ends in a window of text."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bertsmith.batches.batch import IGNORED
from bertsmith.batches.examples import TaskBatch
from bertsmith.objectives.base import Share, Sums
from bertsmith.objectives.class_sums import wide
from bertsmith.objectives.supervised import Supervised


@dataclass(frozen=True)
class Spans(Supervised):
    """The mean of two cross-entropies over the tokens of a window: targets "start" and "end", (items,).

    Both are taken over real tokens only, so that the loss of a window is the same however it lies in memory; BERT's
    code lets the pads of a row take part.
    """

    def sums(self, outputs: Tensor, batch: TaskBatch) -> Sums:
        """Shape: outputs (batch, length, 2) or (tokens, 2)."""
        scores = self.beliefs(wide(outputs), batch)
        targets = torch.stack([batch.targets["start"], batch.targets["end"]], dim=-1)
        # two targets for each item: (items, 2, tokens) -> (2 items, tokens)
        loss = cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum") / 2
        hits = (scores.detach().argmax(-1) == targets).all(-1).sum()
        return Sums(loss, {"accuracy": Share(hits, self.count(batch))})

    def count(self, batch: TaskBatch) -> Tensor:
        return (batch.targets["start"] != IGNORED).sum()

    def beliefs(self, outputs: Tensor, batch: TaskBatch) -> Tensor:
        """The scores of the tokens of each window as a start and as an end, -inf at pads.

        Shape: (items, 2, tokens of the longest)
        """
        rows, layout = batch.layout.pad(outputs)
        if layout.is_token is not None:
            rows = torch.where(layout.is_token[..., None], rows, -torch.inf)
        return rows.transpose(1, 2)

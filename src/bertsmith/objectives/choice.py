"""Learn which of several sequences is the right one."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bertsmith.batches.batch import IGNORED
from bertsmith.batches.examples import TaskBatch
from bertsmith.objectives.base import Sums
from bertsmith.objectives.class_sums import class_sums, wide
from bertsmith.objectives.supervised import Supervised


@dataclass(frozen=True)
class Choices(Supervised):
    """One right sequence among those of an item, by a softmax over their scores (Devlin et al. 2019, section 4.4).

    Targets: "label", (items,), the place of the right one; "is_choice", (items, most), True at as many places as the
    item has sequences, the first ones.
    """

    def sums(self, outputs: Tensor, batch: TaskBatch) -> Sums:
        return class_sums(choice_table(outputs, batch.targets["is_choice"]), batch.targets["label"])

    def count(self, batch: TaskBatch) -> Tensor:
        return (batch.targets["label"] != IGNORED).sum()

    def beliefs(self, outputs: Tensor, batch: TaskBatch) -> Tensor:
        return choice_table(outputs, batch.targets["is_choice"])


def choice_table(outputs: Tensor, is_choice: Tensor) -> Tensor:
    """The scores of sequences as a row for every item, minus infinity where it has no more, in at least float32.

    Shape: outputs (sequences, 1), is_choice (items, most) -> (items, most).
    """
    scores = wide(outputs.squeeze(-1))
    # sequences stand in the order of their items, which is the one a masked scatter fills in
    return scores.new_full(is_choice.shape, -torch.inf).masked_scatter(is_choice, scores)

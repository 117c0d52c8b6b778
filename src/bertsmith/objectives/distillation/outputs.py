"""What the heads say: the teacher's beliefs, and the labels."""

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from bertsmith.batches.examples import TaskBatch
from bertsmith.objectives.base import Sums
from bertsmith.objectives.distillation.base import DistillationTerm, Pair
from bertsmith.objectives.supervised import Supervised


class OutputTerm(DistillationTerm):
    """The teacher's beliefs by cross-entropy; numbers and vectors by squared error (Hinton et al. 2015)."""

    kind: Literal["outputs"] = "outputs"
    temperature: float = Field(default=1.0, gt=0)
    """What the scores of both are divided by; the loss is multiplied by its square."""
    reads_outputs: ClassVar[bool] = True

    def sums(self, pair: Pair) -> Sums:
        apart = pair.task.apart(pair.student.outputs, pair.shown.outputs, pair.batch, self.temperature)
        return Sums(apart.sum(), {})

    def count(self, task: Supervised, batch: TaskBatch) -> Tensor:
        return task.belief_count(batch)


class LabelTerm(DistillationTerm):
    """The labels of the data, as without a teacher."""

    kind: Literal["labels"] = "labels"
    needs_teacher: ClassVar[bool] = False
    reads_outputs: ClassVar[bool] = True

    def sums(self, pair: Pair) -> Sums:
        return Sums(pair.task.sums(pair.student.outputs, pair.batch).loss, {})

    def count(self, task: Supervised, batch: TaskBatch) -> Tensor:
        return task.count(batch)

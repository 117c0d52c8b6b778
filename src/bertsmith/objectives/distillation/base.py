"""The contract of a term: one loss between a student and its teacher over a batch."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from bertsmith.batches.examples import TaskBatch
from bertsmith.models.model import Observed
from bertsmith.objectives.base import Sums
from bertsmith.objectives.supervised import Supervised
from bertsmith.settings import Record


@dataclass(frozen=True)
class Pair:
    """A student and its teacher after the same batch."""

    task: Supervised
    batch: TaskBatch
    student: Observed
    teacher: Observed | None
    """None where no term needs it."""
    counterparts: tuple[int, ...]
    """For each state of the student's trail, embedding first, the number of the teacher's that it is to be like."""


class DistillationTerm(Record, ABC):
    """The settings of a loss and how it is computed; `kind` is its name in the table of terms."""

    kind: str
    weight: float = Field(default=1.0, gt=0)
    """How much its mean counts in the loss."""
    figures: ClassVar[tuple[str, ...]] = ()
    """What else is reported of it."""
    needs_teacher: ClassVar[bool] = True

    @abstractmethod
    def sums(self, pair: Pair) -> Sums:
        """The loss, summed over what `count` counts, in at least float32."""

    def count(self, task: Supervised, batch: TaskBatch) -> Tensor:
        """What the loss is a mean over: real tokens, unless a term says otherwise."""
        return torch.tensor(batch.real_tokens, device=batch.tokens.device)


def real_states(states: Tensor, batch: TaskBatch) -> Tensor:
    """The states of real tokens: (batch, length, width) or (tokens, width) -> (real tokens, width)."""
    is_token = batch.layout.is_token
    return states if is_token is None or states.dim() == 2 else states[is_token]

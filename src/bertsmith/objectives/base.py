"""The contract between an objective and the trainer."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from bertsmith.batches.batch import TokenBatch
from bertsmith.models.model import Model


@dataclass(frozen=True)
class Sums:
    """One loss over a micro-batch, not yet divided by the number of its targets."""

    loss: Tensor
    correct: Tensor


Prepared = TypeVar("Prepared")


class Objective(ABC, Generic[Prepared]):
    """Prepares a batch without the model, which fixes the number of targets, then computes the losses.

    The split lets the trainer divide by the targets of the *whole* step, over all micro-batches and processes, before
    the first backward pass.
    """

    terms: tuple[str, ...]
    """The names of the losses, which are also the names of the heads they need."""

    @abstractmethod
    def to(self, device: torch.device | str) -> "Objective[Prepared]":
        """The objective with its tables on a device."""

    @abstractmethod
    def prepare(self, batch: TokenBatch, seed: int) -> Prepared:
        """What the model gets to see and what it shall say: a pure function of (batch, seed)."""

    @abstractmethod
    def counts(self, prepared: Prepared) -> dict[str, Tensor]:
        """The number of targets of each term."""

    @abstractmethod
    def __call__(self, model: Model, prepared: Prepared) -> dict[str, Sums]:
        """The sums of each term."""

    @abstractmethod
    def for_evaluation(self) -> "Objective[Prepared]":
        """The objective in the form in which runs are compared, whatever they were trained with."""

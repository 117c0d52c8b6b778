"""The contract between an objective and the trainer."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from bertsmith.batches.batch import Batch
from bertsmith.models.model import Model


@dataclass(frozen=True)
class Sums:
    """One loss over a micro-batch, not yet divided by the number of its targets."""

    loss: Tensor
    others: dict[str, Tensor]
    """Further sums over the targets, under the names in the objective's `terms`."""


Given = TypeVar("Given", bound=Batch)
Prepared = TypeVar("Prepared")


class Objective(ABC, Generic[Given, Prepared]):
    """Prepares a batch without the model, which fixes the number of targets, then computes the losses.

    The split lets the trainer divide by the targets of the *whole* step, over all micro-batches and processes, before
    the first backward pass.
    """

    terms: dict[str, tuple[str, ...]]
    """The names of the losses, each with the names of what else it reports; all are divided by the term's targets."""

    @abstractmethod
    def to(self, device: torch.device | str) -> "Objective[Given, Prepared]":
        """The objective with its tables on a device."""

    @abstractmethod
    def prepare(self, batch: Given, seed: int) -> Prepared:
        """What the model gets to see and what it shall say: a pure function of (batch, seed)."""

    @abstractmethod
    def counts(self, prepared: Prepared) -> dict[str, Tensor]:
        """The number of targets of each term."""

    @abstractmethod
    def __call__(self, model: Model, prepared: Prepared) -> dict[str, Sums]:
        """The sums of each term."""

    @abstractmethod
    def for_evaluation(self) -> "Objective[Given, Prepared]":
        """The objective in the form in which runs are compared, whatever they were trained with."""

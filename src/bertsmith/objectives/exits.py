"""Teach a model's exits: what its own last head says, or the labels; the encoder rests, or learns with them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bertsmith.data.examples import TaskBatch
from bertsmith.models.exiting import exit_outputs
from bertsmith.models.model import Model
from bertsmith.objectives.base import Objective, Sums, Term
from bertsmith.objectives.supervised import Supervised, eval_mode

Weighting = Literal["even", "by_depth"]


@dataclass(frozen=True)
class ExitLearning(Objective[TaskBatch, TaskBatch]):
    """A mean of losses over the exits and, where the encoder learns, the last head.

    With a frozen encoder the exits alone move, so the last head goes on to say exactly what it said.
    """

    task: Supervised
    layers: tuple[int, ...]
    """After how many layers each head stands, the task's own last."""
    is_frozen: bool = True
    learn_from: Literal["answers", "labels"] = "answers"
    """Exits learn what the last head believes (FastBERT), or the labels (DeeBERT, PABEE)."""
    temperature: float = 1.0
    weighting: Weighting = "even"
    """In the mean, all count the same, or each as much as the layers below it are (PABEE)."""

    @property
    def terms(self) -> dict[str, Term]:  # type: ignore[override]
        if self.is_frozen:
            return {"exits": Term()}
        own = self._weights[-1] / sum(self._weights)
        return {"exits": Term(weight=1 - own), "task": Term(self.task.metrics, own)}

    def to(self, device: torch.device | str) -> "ExitLearning":
        return self

    def prepare(self, batch: TaskBatch, seed: int) -> TaskBatch:
        return batch

    def counts(self, prepared: TaskBatch) -> dict[str, Tensor]:
        by_answers = self.learn_from == "answers"
        counts = {"exits": self.task.comparable_count(prepared) if by_answers else self.task.count(prepared)}
        return counts if self.is_frozen else {**counts, "task": self.task.count(prepared)}

    def __call__(self, model: Model, prepared: TaskBatch) -> dict[str, Sums]:
        with _frozen(model) if self.is_frozen else nullcontext():
            *exits, last = exit_outputs(model, prepared.tokens, prepared.layout, prepared.types)
        weights = self._weights[:-1]
        losses = [weight * self._loss(said, last, prepared) for weight, said in zip(weights, exits, strict=True)]
        sums = {"exits": Sums(torch.stack(losses).sum() / sum(weights), {})}
        return sums if self.is_frozen else {**sums, "task": self.task.sums(last, prepared)}

    def for_evaluation(self) -> Supervised:
        return self.task.for_evaluation()

    def _loss(self, said: Tensor, last: Tensor, batch: TaskBatch) -> Tensor:
        if self.learn_from == "answers":
            return self.task.apart(said, last.detach(), batch, self.temperature).sum()
        return self.task.sums(said, batch).loss

    @property
    def _weights(self) -> list[float]:
        return [1.0 if self.weighting == "even" else float(layer) for layer in self.layers]


def freeze_all_but_exits(model: Model) -> None:
    """Makes the exits the only part of a model that learns; before anything wraps it to exchange gradients."""
    model.requires_grad_(False)
    model.heads["exits"].requires_grad_(True)


@contextmanager
def _frozen(model: Model) -> Iterator[None]:
    """Without dropout in all that is not an exit."""
    with ExitStack() as stack:
        for part in (model.encoder, *(head for kind, head in model.heads.items() if kind != "exits")):
            stack.enter_context(eval_mode(part))
        yield

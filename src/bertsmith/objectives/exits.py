"""Train early exits from the task head's predictions or from labels, with a frozen or trainable encoder."""

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
    """Mean of the losses of all exits and, if the encoder is trained, of the task head.

    With a frozen encoder only the exits are trained, so the task head's outputs do not change.
    """

    task: Supervised
    layers: tuple[int, ...]
    """Number of layers below each head, the task head last."""
    is_frozen: bool = True
    learn_from: Literal["answers", "labels"] = "answers"
    """Targets of the exits: the task head's predictions (FastBERT) or the labels (DeeBERT, PABEE)."""
    temperature: float = 1.0
    weighting: Weighting = "even"
    """Weights in the mean: equal, or proportional to the number of layers below (PABEE)."""

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
        is_distilled = self.learn_from == "answers"
        counts = {"exits": self.task.comparable_count(prepared) if is_distilled else self.task.count(prepared)}
        return counts if self.is_frozen else {**counts, "task": self.task.count(prepared)}

    def __call__(self, model: Model, prepared: TaskBatch) -> dict[str, Sums]:
        with _eval_mode_except_exits(model) if self.is_frozen else nullcontext():
            *exits, last = exit_outputs(model, prepared.tokens, prepared.layout, prepared.types)
        weights = self._weights[:-1]
        losses = [weight * self._loss(outputs, last, prepared) for weight, outputs in zip(weights, exits, strict=True)]
        sums = {"exits": Sums(torch.stack(losses).sum() / sum(weights), {})}
        return sums if self.is_frozen else {**sums, "task": self.task.sums(last, prepared)}

    def for_evaluation(self) -> Supervised:
        return self.task.for_evaluation()

    def _loss(self, outputs: Tensor, last: Tensor, batch: TaskBatch) -> Tensor:
        if self.learn_from == "answers":
            return self.task.distillation_loss(outputs, last.detach(), batch, self.temperature).sum()
        return self.task.sums(outputs, batch).loss

    @property
    def _weights(self) -> list[float]:
        return [1.0 if self.weighting == "even" else float(layer) for layer in self.layers]


def freeze_all_but_exits(model: Model) -> None:
    """Freeze everything except the exits; call it before wrapping the model in DDP or FSDP."""
    model.requires_grad_(False)
    model.heads["exits"].requires_grad_(True)


@contextmanager
def _eval_mode_except_exits(model: Model) -> Iterator[None]:
    """Disable dropout everywhere except in the exits."""
    with ExitStack() as stack:
        for part in (model.encoder, *(head for kind, head in model.heads.items() if kind != "exits")):
            stack.enter_context(eval_mode(part))
        yield

"""Learn a task and, with it, which heads and neurons it can do without: gates under an L0 constraint."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bertsmith.data.examples import TaskBatch
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.heads.gates import UnitGates
from bertsmith.models.model import Model
from bertsmith.objectives.base import Group, Objective, Portion, Share, Sums, Term
from bertsmith.objectives.supervised import Supervised


@dataclass(frozen=True)
class Gating(Objective[TaskBatch, TaskBatch]):
    """The task's loss through gates that are drawn for every micro-batch, plus pressure until enough of them close.

    The pressure is strength · units · (expected share of open gates − the share that shall stay)², for heads and for
    neurons. It lets go as the share is reached, and the gates are left to the task: those it needs open further, and
    others close for them. (Multipliers that learn, as in CoFi, overshoot in the few steps of a fine-tuning.)
    """

    task: Supervised
    heads: float
    """The share of the heads that shall stay open."""
    neurons: float
    rate: float = 1.0
    """The learning rate of the gates as a share of the run's."""
    strength: float = 1.0

    @property
    def terms(self) -> dict[str, Term]:  # type: ignore[override]
        return {**self.task.terms, "size": Term(("heads_open", "neurons_open"))}

    def to(self, device: torch.device | str) -> "Gating":
        return replace(self, task=self.task.to(device))

    def prepare(self, batch: TaskBatch, seed: int) -> TaskBatch:
        return batch

    def counts(self, prepared: TaskBatch) -> dict[str, Tensor]:
        return {**self.task.counts(prepared), "size": torch.ones((), device=prepared.item.device)}

    def __call__(self, model: Model, prepared: TaskBatch) -> dict[str, Sums]:
        gates = unit_gates(model)
        inputs = EncoderInputs(prepared.tokens, prepared.layout, prepared.types, gates=gates.sample())
        outputs = model.run(inputs, Want(task=True)).outputs
        return {"task": self.task.sums(outputs, prepared), "size": self._size(gates)}

    def for_evaluation(self) -> Supervised:
        return self.task.for_evaluation()

    def portions(self, model: Model) -> list[Portion]:
        """The task's own, and the gates apart: their gradients are of another size, and so is their learning rate."""
        gates = tuple(unit_gates(model).parameters())
        apart = {id(parameter) for parameter in gates}
        others = [
            Portion(
                tuple(
                    Group(tuple(parameter for parameter in group.parameters if id(parameter) not in apart), group.rate)
                    for group in portion.groups
                )
            )
            for portion in self.task.portions(model)
        ]
        return [*others, Portion.of(gates, self.rate)]

    def _size(self, gates: UnitGates) -> Sums:
        heads, neurons = gates.expected_open()
        # by unit, so that the pressure on one of them does not depend on how many there are
        gaps = (sum(map(len, gates.heads)), heads - self.heads), (sum(map(len, gates.neurons)), neurons - self.neurons)
        loss = torch.stack([self.strength * units * gap.square() for units, gap in gaps]).sum()
        one = torch.ones((), device=loss.device)
        metrics = {"heads_open": Share(heads.detach(), one), "neurons_open": Share(neurons.detach(), one)}
        return Sums(loss, metrics)


def unit_gates(model: Model) -> UnitGates:
    """The gates of a model that learns some."""
    gates = model.head("gates")
    assert isinstance(gates, UnitGates)
    return gates

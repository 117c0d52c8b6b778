"""Train a task together with gates on heads and neurons under an L0 constraint, for pruning."""

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
    """Task loss with gates sampled per micro-batch, plus a penalty until enough gates are closed.

    The penalty is strength · units · (expected fraction of open gates − target fraction)², for heads and for neurons.
    It vanishes at the target, where the task loss alone decides which gates open and which close. (Learned Lagrange
    multipliers, as in CoFi, overshoot in the few steps of fine-tuning.)
    """

    task: Supervised
    heads: float
    """Target fraction of open heads."""
    neurons: float
    """Target fraction of open neurons."""
    rate: float = 1.0
    """Factor on the run's learning rate for the gates."""
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
        """Return the task's portions and a separate one for the gates, whose gradients and rate differ in scale."""
        gates = tuple(unit_gates(model).parameters())
        own = {id(parameter) for parameter in gates}
        others = [
            Portion(
                tuple(
                    Group(tuple(parameter for parameter in group.parameters if id(parameter) not in own), group.rate)
                    for group in portion.groups
                )
            )
            for portion in self.task.portions(model)
        ]
        return [*others, Portion.of(gates, self.rate)]

    def _size(self, gates: UnitGates) -> Sums:
        heads, neurons = gates.expected_open()
        # times the number of units, so that the penalty per unit does not depend on their number
        gaps = (sum(map(len, gates.heads)), heads - self.heads), (sum(map(len, gates.neurons)), neurons - self.neurons)
        loss = torch.stack([self.strength * units * gap.square() for units, gap in gaps]).sum()
        one = torch.ones((), device=loss.device)
        metrics = {"heads_open": Share(heads.detach(), one), "neurons_open": Share(neurons.detach(), one)}
        return Sums(loss, metrics)


def unit_gates(model: Model) -> UnitGates:
    """Return the model's gates; raise InputError if it has none."""
    gates = model.head("gates")
    assert isinstance(gates, UnitGates)
    return gates

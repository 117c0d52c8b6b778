"""How good every sub-network of an elastic model is on dev; the mean over them is the model's score."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from bertsmith.answers.sequences import Features
from bertsmith.data.examples import ExampleConfig, TaskBatch
from bertsmith.layers.subnet import Subnet
from bertsmith.models.build import extract
from bertsmith.models.model import Model
from bertsmith.objectives.supervised import Supervised
from bertsmith.tasks.base import Evaluation, Task
from bertsmith.training.evaluator import Evaluator
from bertsmith.training.step import TrainStep


@dataclass(frozen=True)
class Member:
    """A sub-network and how good it is."""

    subnet: Subnet
    evaluation: Evaluation
    loss: float


class GridJudge:
    """Cuts every sub-network out and lets it answer all of dev, which is quicker than to run it in place."""

    def __init__(
        self,
        task: Task[Any],
        examples: Sequence[Any],
        features: Features,
        config: ExampleConfig,
        objective: Supervised,
        subnets: Sequence[Subnet],
    ) -> None:
        self.single = Evaluator(task, examples, features, config, objective)
        self.subnets = subnets

    def __call__(self, engine: TrainStep) -> dict[str, Any]:
        """The row of an evaluation."""
        with engine.accelerator.autocast():
            members = self.members(engine.model)
        row: dict[str, Any] = {
            "loss": fmean(member.loss for member in members),
            "metric": members[0].evaluation.metric,
            "score": fmean(member.evaluation.score for member in members),
        }
        return row | {name_of(member.subnet): member.evaluation.score for member in members}

    @torch.no_grad()
    def members(self, model: Model) -> list[Member]:
        """Every sub-network with its evaluation."""
        found = []
        for subnet in self.subnets:
            loss, count = torch.zeros(()), torch.zeros(())

            def watch(batch: TaskBatch, outputs: Tensor) -> None:
                nonlocal loss, count
                loss = loss + self.single.objective.sums(outputs, batch).loss.cpu()
                count = count + self.single.objective.count(batch).cpu()

            evaluation = self.single.evaluate(extract(model, subnet), watch)
            found.append(Member(subnet, evaluation, float(loss / count.clamp(min=1))))
        return found


def name_of(subnet: Subnet) -> str:
    """What an even sub-network is called in logs and tables.

    >>> name_of(Subnet(width=0.5, depth=0.75))
    'width 0.5 depth 0.75'
    """
    return f"width {subnet.width:g} depth {subnet.depth:g}"

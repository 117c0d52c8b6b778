"""Evaluation on dev during and after training, by the task's own metrics."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from bertsmith.answers.sequences import Answer, Features
from bertsmith.data.examples import ExampleConfig, TaskBatch
from bertsmith.engines.base import Runner
from bertsmith.models.model import Model
from bertsmith.objectives.supervised import Supervised
from bertsmith.tasks.base import Evaluation, Task
from bertsmith.tasks.outputs import WatchBatch, item_outputs
from bertsmith.training.step import TrainStep


class MeanLoss:
    """Mean loss over all batches it is called with."""

    def __init__(self, objective: Supervised) -> None:
        self.objective = objective
        self.loss: Tensor | float = 0.0  # a tensor on a GPU, which is read once at the end
        self.count: Tensor | float = 0.0

    def __call__(self, batch: TaskBatch, outputs: Tensor) -> None:
        self.loss = self.loss + self.objective.sums(outputs, batch).loss.double()
        self.count = self.count + self.objective.count(batch)

    @property
    def value(self) -> float:
        return float(self.loss) / max(1.0, float(self.count))


class Evaluator:
    """Evaluate a model on dev with the metrics of its task; every process evaluates all of dev."""

    def __init__(
        self,
        task: Task[Any],
        examples: Sequence[Any],
        features: Features,
        sequences: ExampleConfig,
        objective: Supervised,
    ) -> None:
        self.task, self.examples, self.features = task, examples, features
        self.sequences, self.objective = sequences, objective
        self.answers: Sequence[Answer] = []
        """Answers of the last evaluation."""

    def __call__(self, step: TrainStep) -> dict[str, Any]:
        """Return the log row of an evaluation: loss, metric, score and all metrics."""
        loss = MeanLoss(self.objective.for_model(step.model))
        with step.accelerator.autocast():
            evaluation = self.evaluate(step.model, loss)
        return {"loss": loss.value, "metric": evaluation.metric, "score": evaluation.score, **evaluation.metrics}

    def evaluate(self, model: Model, watch: WatchBatch | None = None) -> Evaluation:
        """Evaluate a model and keep its answers; `watch` is called with each batch and its outputs."""
        return self.score(self.outputs(model, watch))

    def outputs(self, model: Runner, watch: WatchBatch | None = None) -> list[np.ndarray]:
        """Return the outputs of the task's head for every item."""
        return item_outputs(model, self.features, self.sequences, watch)

    def score(self, outputs: Sequence[np.ndarray]) -> Evaluation:
        """Evaluate outputs of the task's head and keep the answers."""
        self.answers = self.task.answers(self.examples, self.features, outputs)
        return self.task.evaluate(self.examples, self.answers)

"""How good a model in training is on dev: by its task's own figures."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from bertsmith.answers.sequences import Answer, Features
from bertsmith.data.examples import ExampleConfig, TaskBatch
from bertsmith.models.model import Model
from bertsmith.objectives.supervised import Supervised
from bertsmith.tasks.base import Judgement, Task
from bertsmith.tasks.predictor import item_outputs
from bertsmith.training.step import Engine


class DevJudge:
    """Answers all examples of dev; every process does so by itself, which needs no talk between them."""

    def __init__(
        self,
        task: Task[Any],
        examples: Sequence[Any],
        features: Features,
        config: ExampleConfig,
        objective: Supervised,
    ) -> None:
        self.task, self.examples, self.features = task, examples, features
        self.config, self.objective = config, objective
        self.answers: Sequence[Answer] = []
        """Those of the last evaluation."""

    def __call__(self, engine: Engine) -> dict[str, Any]:
        """The row of an evaluation."""
        loss = count = 0.0

        def watch(batch: TaskBatch, outputs: Tensor) -> None:
            nonlocal loss, count
            loss += float(self.objective.sums(outputs, batch).loss)
            count += float(self.objective.count(batch))

        with engine.accelerator.autocast():
            judgement = self.judgement(engine.model, watch)
        main = {"metric": judgement.metric, "score": judgement.score}
        return {"loss": loss / max(1.0, count), **main, **judgement.figures}

    def judgement(self, model: Model, watch: Callable[[TaskBatch, Tensor], None] | None = None) -> Judgement:
        """How good a model is; its answers are kept."""
        outputs = item_outputs(model, self.features, self.config, watch)
        self.answers = self.task.answers(self.examples, self.features, outputs)
        return self.task.judged(self.examples, self.answers)

"""How good every exit of a model is on dev, and what each rule for using them would save and lose."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from bertsmith.answers.sequences import Features
from bertsmith.data.examples import ExampleConfig, TaskBatch
from bertsmith.engines.exit_runner import AllExits
from bertsmith.errors import InputError
from bertsmith.layers.elementwise import Activation
from bertsmith.models.attach_heads import fit_heads
from bertsmith.models.exiting import Certainty, exits_config
from bertsmith.models.heads import SequenceHeadConfig, TaskHeadConfig
from bertsmith.models.heads.exits import Answer, ExitRule, ExitsConfig
from bertsmith.models.heads.task import ClassifierConfig
from bertsmith.models.model import Model
from bertsmith.objectives.exits import ExitLearning, Weighting, freeze_all_but_exits
from bertsmith.objectives.supervised import Supervised
from bertsmith.settings import Record
from bertsmith.shrinking.settings import ShrinkSettings
from bertsmith.tasks.base import Evaluation, Task
from bertsmith.tasks.multi_label import MultiLabel
from bertsmith.tasks.predictor import item_outputs
from bertsmith.training.optimizer import OptimizerConfig, ScheduleConfig
from bertsmith.training.step import TrainStep
from bertsmith.training.task_trainer import ExampleBatchConfig, FinetuneRunConfig, task_trainer
from bertsmith.training.trainer import Trainer

THRESHOLDS: dict[str, tuple[float, ...]] = {
    "probability": (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999),
    "entropy": (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.01),
}
"""From the boldest to the most careful; those of patience are as many as there are exits to agree."""


class RuleFigures(Record):
    """A rule and what it does on dev."""

    threshold: float
    score: float
    mean_layers: float
    flops: float
    """Of the layers and exits that are computed, in the mean over items; an estimate."""
    saving: float
    """The share of the operations of all layers that is not computed; below 0 where exits cost more than they save."""


@dataclass(frozen=True)
class ExitAnswers:
    """What every head said of all items of dev, the task's own last.

    Shape: by_head[head][item] is (outputs,), or (sequences, outputs) where items have several.
    """

    by_head: list[list[np.ndarray]]

    def chosen(self, heads: np.ndarray) -> list[np.ndarray]:
        """The answer of one head for each item; Shape: (items,)."""
        return [self.by_head[head][item] for item, head in enumerate(heads.tolist())]


class ExitJudge:
    """Answers all of dev with every exit at once; every process does so by itself."""

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

    def __call__(self, engine: TrainStep) -> dict[str, Any]:
        """The row of an evaluation: the score is the mean over all exits and the task's head."""
        model = engine.model
        heads = self._heads(model)
        loss = count = 0.0

        def watch(batch: TaskBatch, outputs: Tensor) -> None:
            nonlocal loss, count
            loss += fmean(float(self.objective.sums(said, batch).loss) for said in outputs.chunk(len(heads), -1))
            count += float(self.objective.count(batch))

        with engine.accelerator.autocast():
            answers = self.answers(model, watch)
        evaluations = self.evaluations(answers)
        row = {
            "loss": loss / max(1.0, count),
            "metric": evaluations[0].metric,
            "score": fmean(evaluation.score for evaluation in evaluations),
        }
        return row | {f"layer {layer}": own.score for layer, own in zip(heads, evaluations, strict=True)}

    def answers(self, model: Model, watch: Any = None) -> ExitAnswers:
        """What every head says."""
        heads = self._heads(model)
        outputs = item_outputs(AllExits(model), self.features, self.config, watch)
        split = [np.split(own, len(heads), axis=-1) for own in outputs]
        return ExitAnswers([[own[place] for own in split] for place in range(len(heads))])

    def evaluations(self, answers: ExitAnswers) -> list[Evaluation]:
        """How good each head is."""
        return [self.evaluate(outputs) for outputs in answers.by_head]

    def evaluate(self, outputs: Sequence[np.ndarray]) -> Evaluation:
        """How good some outputs are."""
        return self.task.evaluate(self.examples, self.task.answers(self.examples, self.features, outputs))

    def rows(self, model: Model, answers: ExitAnswers, rules: Sequence[ExitRule]) -> list[RuleFigures]:
        """What each rule does: items decide by themselves, so one pass over dev tells it for all rules."""
        config, heads = exits_config(model), np.array(self._heads(model))
        costs = self._costs(model)
        found = []
        for rule in rules:
            leaves = leaving(config, answers, rule)
            flops = float(costs[leaves, np.arange(len(leaves))].mean())
            whole = float(costs[-1].mean()) - float(self._exit_costs(config, model))
            found.append(
                RuleFigures(
                    threshold=rule.threshold,
                    score=self.evaluate(answers.chosen(leaves)).score,
                    mean_layers=float(np.average(heads[leaves], weights=np.diff(self.features.items))),
                    flops=flops,
                    saving=1 - flops / whole,
                )
            )
        return found

    def _heads(self, model: Model) -> list[int]:
        """After how many layers each head stands."""
        return [*exits_config(model).layers, len(model.config.encoder.layers)]

    def _costs(self, model: Model) -> np.ndarray:
        """The operations of an item that is answered by each head, (heads, items), those of the exits below counted."""
        encoder, heads = model.config.encoder, self._heads(model)
        lengths = self.features.tokens.lengths
        distinct = {int(length) for length in lengths}
        by_head = []
        for place, layers in enumerate(heads):
            cut = encoder.changed(layers=encoder.layers[:layers])
            of_length = {length: length * cut.flops(length) for length in distinct}
            exits = min(place + 1, len(heads) - 1) * self._exit_cost(exits_config(model), encoder.width)
            sequences = np.array([of_length[int(length)] + exits for length in lengths], dtype=np.float64)
            by_head.append(np.add.reduceat(sequences, self.features.items[:-1]))
        return np.stack(by_head)

    def _exit_costs(self, config: ExitsConfig, model: Model) -> float:
        """The operations of all exits of an item, in the mean."""
        sequences = len(self.features.tokens) / len(self.features)
        return sequences * len(config.layers) * self._exit_cost(config, model.config.encoder.width)

    @staticmethod
    def _exit_cost(config: ExitsConfig, width: int) -> int:
        return 2 * width * (config.outputs + (width if config.hidden is not None else 0))


def leaving(config: ExitsConfig, answers: ExitAnswers, rule: ExitRule) -> np.ndarray:
    """Which head answers each item under a rule, by its place, (items,)."""
    certainty = Certainty(config, rule)
    last = len(answers.by_head) - 1
    found = np.full(len(answers.by_head[0]), last)
    for place, said in enumerate(answers.by_head[:-1]):
        rows = [np.atleast_2d(own) for own in said]
        sizes = torch.tensor([len(own) for own in rows])
        sure = certainty.are_sure(torch.from_numpy(np.concatenate(rows)), sizes).numpy()
        found = np.where(sure & (found == last), place, found)
    return found


def rules_of(
    measure: Literal["probability", "entropy", "patience"],
    thresholds: Sequence[float],
    exits: int,
    within: float,
) -> list[ExitRule]:
    """The rules to try, from the boldest to the most careful."""
    usual = tuple(range(1, exits)) if measure == "patience" else THRESHOLDS[measure]
    return [
        ExitRule.parse({"measure": measure, "threshold": threshold, "within": within}, source="leave.thresholds")
        for threshold in (thresholds or usual)
    ]


def best_row(rows: Sequence[RuleFigures], score: float, tolerance: float) -> int | None:
    """The place of the row that saves most of those that lose no more than the tolerance; None if none saves at all."""
    fitting = [place for place, row in enumerate(rows) if row.score >= score - tolerance and row.saving > 0]
    return max(fitting, key=lambda place: rows[place].saving, default=None)


ANSWERS: dict[str, Answer] = {
    "classification": "classes",
    "multi_label": "labels",
    "choice": "choices",
    "regression": "value",
}
"""What the outputs of each kind of task are; the others speak of tokens or give vectors, of which none can leave."""


class ExitChoice(Record):
    """The heads on the way."""

    layers: tuple[int, ...] = ()
    """After how many layers there is one; empty for after each but the last."""
    hidden: Activation | Literal["none"] = "tanh"
    """The activation of a layer between a sequence's vector and its scores; "none" for no such layer."""
    pooling: Literal["mean", "first", "as_task"] = "mean"
    """The vector of a sequence: the mean of its states, its first token's, or as in the task's head (the first token's
    where that has a pooler). Low layers have put little into the first token yet (docs/exits.md)."""
    dropout: float = Field(default=0.1, ge=0, lt=1)


class LeaveChoice(Record):
    """How the rule is chosen by which sequences leave, on dev."""

    measure: Literal["probability", "entropy", "patience"] | None = None
    """What is asked of an answer (docs/exits.md); None for the probability, and for patience in a regression."""
    thresholds: tuple[float, ...] = ()
    """Those that are tried; empty for a usual range."""
    within: float | None = Field(default=None, gt=0)
    """In a regression: how far apart two numbers may be that count as the same; None for a tenth of the deviation of
    the model's answers."""
    tolerance: float = Field(default=0.5, ge=0)
    """How many points of the score may be lost."""


class ExitSettings(ShrinkSettings):
    """All that a training of exits depends on."""

    method: Literal["exits"] = "exits"
    exits: ExitChoice = ExitChoice()
    leave: LeaveChoice = LeaveChoice()
    encoder: Literal["frozen", "joint"] = "frozen"
    """Whether the encoder and its head stay as they are (DeeBERT's two stages), or learn with the exits."""
    learn_from: Literal["answers", "labels"] = "answers"
    """Exits learn what the last head believes (FastBERT), or the labels (DeeBERT, PABEE)."""
    temperature: float = Field(default=1.0, gt=0)
    """What scores are divided by where exits learn from answers."""
    weighting: Weighting = "even"
    """In the loss, all exits count the same, or each as much as the layers below it are (PABEE)."""
    batch: ExampleBatchConfig = ExampleBatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-3, betas=(0.9, 0.999), weight_decay=0.0)
    schedule: ScheduleConfig = ScheduleConfig(warmup=0.1)
    run: FinetuneRunConfig = FinetuneRunConfig()

    @property
    def answer(self) -> Answer:
        """What the outputs of the task's head are."""
        return answer_of(self.task)

    @property
    def measure(self) -> Literal["probability", "entropy", "patience"]:
        """What is asked of an answer."""
        return self.leave.measure or ("patience" if self.answer == "value" else "probability")

    @model_validator(mode="after")
    def _check_measure(self) -> "ExitSettings":
        if self.task.kind not in ANSWERS:
            return self
        if self.answer == "value" and self.measure != "patience":
            raise ValueError(f"leave.measure is {self.measure!r} in a regression; allowed: 'patience'")
        rules_of(self.measure, self.leave.thresholds, exits=1, within=0.0)  # before anything is learned for them
        return self


def answer_of(task: Task[Any]) -> Answer:
    """What the outputs of a task's head are; a sentence where sequences cannot leave early."""
    if task.kind not in ANSWERS:
        raise InputError(
            f"the task is of kind {task.kind!r}, whose answers are not one for a sequence, so none can leave early; "
            f"allowed: {', '.join(ANSWERS)}"
        )
    return ANSWERS[task.kind]


def with_exits(model: Model, settings: ExitSettings) -> Model:
    """A model with the same encoder and the same head, and fresh exits."""
    choice, depth = settings.exits, len(model.config.encoder.layers)
    head = next((head for head in model.config.heads if isinstance(head, TaskHeadConfig)), None)
    if not isinstance(head, ClassifierConfig):
        kind = "none" if head is None else head.kind
        raise InputError(f"the head of the task is of kind {kind!r}; exits stand beside a classifier")
    layers = choice.layers or tuple(range(1, depth))
    if not layers:
        raise InputError("the model has one layer, below which no exit can stand; allowed: models of 2 or more")
    own = {
        "layers": layers,
        "outputs": len(head.labels),
        "answer": settings.answer,
        "yes_from": settings.task.threshold if isinstance(settings.task, MultiLabel) else 0.5,
        "pooling": _pooling(head) if choice.pooling == "as_task" else choice.pooling,
        "hidden": None if choice.hidden == "none" else choice.hidden,
        "dropout": choice.dropout,
    }
    exits = ExitsConfig.parse({key: value for key, value in own.items() if value is not None}, source="exits")
    heads = (*(other for other in model.config.heads if other.kind != "exits"), exits)
    if "exits" in model.heads:
        del model.heads["exits"]  # it learns anew
    return fit_heads(model, model.config.changed(heads=heads), "the model", seed=settings.run.seed)[0]


def _pooling(head: SequenceHeadConfig) -> Literal["first", "mean"]:
    return "mean" if head.pooling == "mean" else "first"


def make_exits(
    settings: ExitSettings,
    model: Model,
    train: tuple[Sequence[Any], Features],
    dev: tuple[Sequence[Any], Features],
    out: Path,
    *,
    processes: int = 1,
    device: str = "auto",
    show: bool = True,
    notices: Sequence[str] = (),
) -> Trainer:
    """The run, ready to go; the model, which has exits, is the one that learns."""
    task = settings.task.objective(train[0])
    is_frozen = settings.encoder == "frozen"
    if is_frozen:
        freeze_all_but_exits(model)
    objective = ExitLearning(
        task,
        (*exits_config(model).layers, len(model.config.encoder.layers)),
        is_frozen=is_frozen,
        learn_from=settings.learn_from,
        temperature=settings.temperature,
        weighting=settings.weighting,
    )
    return task_trainer(
        settings,
        model,
        objective,
        train[1],
        ExitJudge(settings.task, dev[0], dev[1], settings.sequences, task.for_evaluation()),
        out,
        processes=processes,
        cost=1 / 3 if is_frozen else 1.0,
        device=device,
        show=show,
        notices=notices,
    )

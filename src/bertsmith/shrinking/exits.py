"""Early exits: train small heads on the lower layers of a fine-tuned model and choose an exit rule on dev.

add exits -> train them -> evaluate every exit on dev -> choose the rule that saves most within the tolerance
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from bertsmith.data.examples import TaskBatch
from bertsmith.engines.exit_runner import AllExits, ExitRunner
from bertsmith.errors import InputError
from bertsmith.layers.elementwise import Activation
from bertsmith.models.attach_heads import fit_heads
from bertsmith.models.cost import parameters
from bertsmith.models.exiting import Certainty, exits_config, with_rule
from bertsmith.models.heads import SequenceHeadConfig, TaskHeadConfig
from bertsmith.models.heads.exits import Answer, ExitRule, ExitsConfig
from bertsmith.models.heads.task import ClassifierConfig
from bertsmith.models.model import Model
from bertsmith.objectives.exits import ExitLearning, Weighting, freeze_all_but_exits
from bertsmith.settings import Record
from bertsmith.shrinking.context import ShrinkContext, ShrinkSettings
from bertsmith.tasks.base import Evaluation, Task
from bertsmith.tasks.multi_label import MultiLabel
from bertsmith.tasks.outputs import WatchBatch
from bertsmith.training.evaluator import Evaluator
from bertsmith.training.log import LogRow
from bertsmith.training.optimizer import OptimizerConfig, ScheduleConfig
from bertsmith.training.step import TrainStep
from bertsmith.training.task_trainer import ExampleBatchConfig, FinetuneRunConfig, task_trainer
from bertsmith.training.trainer import Trainer

THRESHOLDS: dict[str, tuple[float, ...]] = {
    "probability": (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999),
    "entropy": (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.01),
}
"""Default thresholds, from the earliest exits to the latest. A patience threshold is the number of exits that must
agree, so its defaults depend on the number of exits."""


class RuleScore(Record):
    """A threshold with its score and cost on dev."""

    threshold: float
    score: float
    mean_layers: float
    flops: float
    """Estimated FLOP of all computed layers and exits, mean over items."""
    saving: float
    """Share of the full model's FLOP that is saved; negative if the exits cost more than they save."""


@dataclass(frozen=True)
class ExitOutputs:
    """Outputs of every head for all items of dev, the task head last.

    Shape: by_head[head][item] is (outputs,), or (sequences, outputs) for items with several sequences.
    """

    by_head: list[list[np.ndarray]]

    def select(self, heads: np.ndarray) -> list[np.ndarray]:
        """Return the outputs of one head per item; Shape: heads (items,)."""
        return [self.by_head[head][item] for item, head in enumerate(heads.tolist())]


class ExitEvaluator(Evaluator):
    """Evaluate every exit on dev in one pass."""

    def __call__(self, step: TrainStep) -> LogRow:
        """Return the log row of an evaluation; its score is the mean over all exits and the task head."""
        model = step.model
        heads = self._heads(model)
        loss = count = 0.0

        def watch(batch: TaskBatch, outputs: Tensor) -> None:
            nonlocal loss, count
            loss += fmean(float(self.objective.sums(one, batch).loss) for one in outputs.chunk(len(heads), -1))
            count += float(self.objective.count(batch))

        with step.accelerator.autocast():
            outputs = self.head_outputs(model, watch)
        evaluations = self.evaluate_heads(outputs)
        row: LogRow = {
            "loss": loss / max(1.0, count),
            "metric": evaluations[0].metric,
            "score": fmean(evaluation.score for evaluation in evaluations),
        }
        return row | {f"layer {layer}": one.score for layer, one in zip(heads, evaluations, strict=True)}

    def head_outputs(self, model: Model, watch: WatchBatch | None = None) -> ExitOutputs:
        """Return the outputs of every head."""
        heads = len(self._heads(model))
        by_item = [np.split(outputs, heads, axis=-1) for outputs in self.outputs(AllExits(model), watch)]
        return ExitOutputs([[item[index] for item in by_item] for index in range(heads)])

    def evaluate_heads(self, outputs: ExitOutputs) -> list[Evaluation]:
        """Score every head."""
        return [self.score(head_outputs) for head_outputs in outputs.by_head]

    def evaluate_rules(self, model: Model, outputs: ExitOutputs, rules: Sequence[ExitRule]) -> list[RuleScore]:
        """Score every rule; items exit independently of each other, so one pass over dev is enough for all rules."""
        config, heads = exits_config(model), np.array(self._heads(model))
        costs = self._costs(model)
        scores = []
        for rule in rules:
            exits = exit_indices(config, outputs, rule)
            flops = float(costs[exits, np.arange(len(exits))].mean())
            whole = float(costs[-1].mean()) - float(self._exit_costs(config, model))
            scores.append(
                RuleScore(
                    threshold=rule.threshold,
                    score=self.score(outputs.select(exits)).score,
                    mean_layers=float(np.average(heads[exits], weights=np.diff(self.features.items))),
                    flops=flops,
                    saving=1 - flops / whole,
                )
            )
        return scores

    def _heads(self, model: Model) -> list[int]:
        """Number of layers below each head."""
        return [*exits_config(model).layers, len(model.config.encoder.layers)]

    def _costs(self, model: Model) -> np.ndarray:
        """FLOP of answering each item with each head, lower exits included; Shape: (heads, items)."""
        encoder, heads = model.config.encoder, self._heads(model)
        lengths = self.features.tokens.lengths
        distinct = {int(length) for length in lengths}
        by_head = []
        for index, layers in enumerate(heads):
            cut = encoder.changed(layers=encoder.layers[:layers])
            by_length = {length: length * cut.flops(length) for length in distinct}
            exits = min(index + 1, len(heads) - 1) * self._exit_cost(exits_config(model), encoder.width)
            sequences = np.array([by_length[int(length)] + exits for length in lengths], dtype=np.float64)
            by_head.append(np.add.reduceat(sequences, self.features.items[:-1]))
        return np.stack(by_head)

    def _exit_costs(self, config: ExitsConfig, model: Model) -> float:
        """Mean FLOP of all exits per item."""
        sequences = len(self.features.tokens) / len(self.features)
        return sequences * len(config.layers) * self._exit_cost(config, model.config.encoder.width)

    @staticmethod
    def _exit_cost(config: ExitsConfig, width: int) -> int:
        return 2 * width * (config.outputs + (width if config.hidden is not None else 0))


def exit_indices(config: ExitsConfig, outputs: ExitOutputs, rule: ExitRule) -> np.ndarray:
    """Return the index of the head that answers each item under a rule; Shape: (items,)."""
    certainty = Certainty(config, rule)
    last = len(outputs.by_head) - 1
    exits = np.full(len(outputs.by_head[0]), last)
    for index, head in enumerate(outputs.by_head[:-1]):
        rows = [np.atleast_2d(item) for item in head]
        sizes = torch.tensor([len(item) for item in rows])
        is_confident = certainty.are_sure(torch.from_numpy(np.concatenate(rows)), sizes).numpy()
        exits = np.where(is_confident & (exits == last), index, exits)
    return exits


def candidate_rules(
    measure: Literal["probability", "entropy", "patience"],
    thresholds: Sequence[float],
    exits: int,
    within: float,
) -> list[ExitRule]:
    """Return the rules to evaluate, from the earliest exits to the latest."""
    defaults = tuple(range(1, exits)) if measure == "patience" else THRESHOLDS[measure]
    return [
        ExitRule.parse({"measure": measure, "threshold": threshold, "within": within}, source="leave.thresholds")
        for threshold in (thresholds or defaults)
    ]


def best_rule(rows: Sequence[RuleScore], score: float, tolerance: float) -> int | None:
    """Return the index of the rule that saves most within the tolerance; None if no such rule saves anything."""
    fitting = [index for index, row in enumerate(rows) if row.score >= score - tolerance and row.saving > 0]
    return max(fitting, key=lambda index: rows[index].saving, default=None)


ANSWERS: dict[str, Answer] = {
    "classification": "classes",
    "multi_label": "labels",
    "choice": "choices",
    "regression": "value",
}
"""Meaning of the outputs by kind of task. Other kinds label tokens or return vectors and cannot exit early."""


class ExitHeadsConfig(Record):
    """The exit heads on the lower layers."""

    layers: tuple[int, ...] = ()
    """Layers (counted from 1) that are followed by an exit; empty for all but the last."""
    hidden: Activation | Literal["none"] = "tanh"
    """Activation of a hidden layer between the pooled vector and the outputs; "none" for no hidden layer."""
    pooling: Literal["mean", "first", "last", "as_task"] = "mean"
    """Pooling of the hidden states: their mean, the first or the last token, or as in the task head (the first token if
    it has a pooler). In low layers the first token carries little information (docs/how-to/exits.md)."""
    dropout: float = Field(default=0.1, ge=0, lt=1)


class ExitRuleConfig(Record):
    """Selection of the exit rule on dev."""

    measure: Literal["probability", "entropy", "patience"] | None = None
    """Measure of confidence (docs/how-to/exits.md); None for "probability", or "patience" in regression."""
    thresholds: tuple[float, ...] = ()
    """Thresholds to evaluate; empty for a default range."""
    within: float | None = Field(default=None, gt=0)
    """For regression: maximum difference between two values that count as equal; None for a tenth of the standard
    deviation of the model's answers."""
    tolerance: float = Field(default=0.5, ge=0)
    """Maximum loss of score, in points."""


class ExitSettings(ShrinkSettings):
    """All settings of early exits."""

    method: Literal["exits"] = "exits"
    exits: ExitHeadsConfig = ExitHeadsConfig()
    leave: ExitRuleConfig = ExitRuleConfig()
    encoder: Literal["frozen", "joint"] = "frozen"
    """Whether encoder and task head are frozen (DeeBERT's two stages) or trained jointly with the exits."""
    learn_from: Literal["answers", "labels"] = "answers"
    """Targets of the exits: outputs of the task head (FastBERT) or the labels (DeeBERT, PABEE)."""
    temperature: float = Field(default=1.0, gt=0)
    """Softmax temperature of the distillation from the task head."""
    weighting: Weighting = "even"
    """Weights of the exits in the loss: equal, or proportional to the layer number (PABEE)."""
    batch: ExampleBatchConfig = ExampleBatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-3, betas=(0.9, 0.999), weight_decay=0.0)
    schedule: ScheduleConfig = ScheduleConfig(warmup=0.1)
    run: FinetuneRunConfig = FinetuneRunConfig()

    @property
    def answer(self) -> Answer:
        """Meaning of the outputs of the task head."""
        return answer_kind(self.task)

    @property
    def measure(self) -> Literal["probability", "entropy", "patience"]:
        """Measure of confidence."""
        return self.leave.measure or ("patience" if self.answer == "value" else "probability")

    @model_validator(mode="after")
    def _check_measure(self) -> "ExitSettings":
        if self.task.kind not in ANSWERS:
            return self
        if self.answer == "value" and self.measure != "patience":
            raise ValueError(f"leave.measure is {self.measure!r}; allowed for regression: 'patience'")
        candidate_rules(self.measure, self.leave.thresholds, exits=1, within=0.0)  # check before training
        return self


def answer_kind(task: Task[Any]) -> Answer:
    """Return the meaning of the outputs of a task head; InputError if its sequences cannot exit early."""
    if task.kind not in ANSWERS:
        raise InputError(
            f"the task is of kind {task.kind!r}, but early exits need one answer per sequence; "
            f"allowed: {', '.join(ANSWERS)}"
        )
    return ANSWERS[task.kind]


def with_exits(model: Model, settings: ExitSettings) -> Model:
    """Return the model with fresh exits beside its task head."""
    choice, depth = settings.exits, len(model.config.encoder.layers)
    head = next((head for head in model.config.heads if isinstance(head, TaskHeadConfig)), None)
    if not isinstance(head, ClassifierConfig):
        kind = "none" if head is None else head.kind
        raise InputError(f"the task head is of kind {kind!r}; early exits need a classifier head")
    layers = choice.layers or tuple(range(1, depth))
    if not layers:
        raise InputError("the model has one layer; early exits need at least 2")
    settings_of_exits = {
        "layers": layers,
        "outputs": len(head.labels),
        "answer": settings.answer,
        "yes_from": settings.task.threshold if isinstance(settings.task, MultiLabel) else 0.5,
        "pooling": _pooling(head) if choice.pooling == "as_task" else choice.pooling,
        "hidden": None if choice.hidden == "none" else choice.hidden,
        "dropout": choice.dropout,
    }
    exits = ExitsConfig.parse(
        {key: value for key, value in settings_of_exits.items() if value is not None}, source="exits"
    )
    heads = (*(other for other in model.config.heads if other.kind != "exits"), exits)
    if "exits" in model.heads:
        del model.heads["exits"]  # replaced by fresh ones
    return fit_heads(model, model.config.changed(heads=heads), "the model", seed=settings.run.seed)[0]


def _pooling(head: SequenceHeadConfig) -> Literal["first", "last", "mean"]:
    """Return the pooling of fresh exits that is nearest to the task head's."""
    if head.pooling in ("first", "pooler"):
        return "first"
    return "last" if head.pooling == "last" else "mean"


def make_exit_trainer(
    settings: ExitSettings, context: ShrinkContext, *, show: bool = True, notices: Sequence[str] = ()
) -> Trainer:
    """Return the trainer of the exits of the context's model."""
    model, task = context.model, settings.task.objective(context.train.examples)
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
        context.train.features,
        ExitEvaluator(settings.task, *context.dev, settings.sequences, task.for_evaluation()),
        context.out,
        processes=context.processes,
        cost=1 / 3 if is_frozen else 1.0,
        device=context.device,
        show=show,
        notices=notices,
    )


@dataclass(frozen=True)
class ChosenExits:
    """Dev scores of every exit and every rule, and the chosen rule."""

    metric: str
    score: float
    mean_layers: float
    full_score: float
    """Score of the task head, with all layers."""
    layers: int
    exit_scores: dict[str, float]
    """Score of every exit, by its layer."""
    rule: ExitRule | None = field(metadata={"nullable": True})
    """None if no rule saves anything within the tolerance."""
    table: tuple[RuleScore, ...]
    chosen_index: int | None = field(metadata={"hidden": True})
    """Index of the chosen rule in `table`."""


def choose_rule(settings: ExitSettings, trainer: Trainer) -> ChosenExits:
    """Evaluate exits and rules on dev and set the best rule in the trained model."""
    evaluator, model = trainer.evaluator, trainer.model
    assert isinstance(evaluator, ExitEvaluator)
    outputs = evaluator.head_outputs(model)
    *exits, last = evaluator.evaluate_heads(outputs)
    config, layers = exits_config(model), len(model.config.encoder.layers)
    within = 0.0
    if settings.answer == "value":
        within = settings.leave.within or 0.1 * float(np.std([item[0] for item in outputs.by_head[-1]]))
    rules = candidate_rules(settings.measure, settings.leave.thresholds, len(config.layers), within)
    rows = evaluator.evaluate_rules(model, outputs, rules)
    index = best_rule(rows, last.score, settings.leave.tolerance)
    rule = None if index is None else rules[index]
    with_rule(model, rule)
    score, mean_layers = last.score, float(layers)
    if rule is not None:
        runner = ExitRunner(model, rule)
        score = evaluator.score(evaluator.outputs(runner)).score
        mean_layers = float(runner.mean_layers or layers)
    return ChosenExits(
        metric=last.metric,
        score=score,
        mean_layers=mean_layers,
        full_score=last.score,
        layers=layers,
        exit_scores={str(layer): one.score for layer, one in zip(config.layers, exits, strict=True)},
        rule=rule,
        table=tuple(rows),
        chosen_index=index,
    )


def explain_exits(settings: ExitSettings, model: Model, examples: int) -> dict[str, str]:
    """Describe the exits of a model and the cost of training them."""
    config = model.config
    plain = config.changed(heads=tuple(head for head in config.heads if head.kind != "exits"))
    return {
        "exits after layers": ", ".join(str(layer) for layer in exits_config(model).layers),
        "parameters of the exits": f"{parameters(config) - parameters(plain):,}",
        "steps": f"{settings.run.steps(-(-examples // settings.batch.examples)):,}",
    }

"""Early exit for a fine-tuned model: heads on the way that learn what its own head says, and a rule for using them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from bertsmith.answers.sequences import Features
from bertsmith.errors import InputError
from bertsmith.layers.elementwise import Activation
from bertsmith.models.attach_heads import fit_heads
from bertsmith.models.exiting import exits_config
from bertsmith.models.heads import SequenceHeadConfig, TaskHeadConfig
from bertsmith.models.heads.exits import Answer, ExitsConfig
from bertsmith.models.heads.task import ClassifierConfig
from bertsmith.models.model import Model
from bertsmith.objectives.exits import ExitLearning, Weighting, freeze_all_but_exits
from bertsmith.settings import Record
from bertsmith.shrinking.exit_judge import ExitJudge, rules_of
from bertsmith.shrinking.settings import ShrinkSettings
from bertsmith.tasks.base import Task
from bertsmith.tasks.multi_label import MultiLabel
from bertsmith.training.optimizer import OptimizerConfig, ScheduleConfig
from bertsmith.training.task_trainer import ExampleBatchConfig, FinetuneRunConfig, task_trainer
from bertsmith.training.trainer import Trainer

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

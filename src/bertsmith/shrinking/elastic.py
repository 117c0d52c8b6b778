"""Elastic training (DynaBERT): a fine-tuned model whose sub-networks of every width and depth work as well."""

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from bertsmith.answers.sequences import Features
from bertsmith.data.examples import ExampleConfig, ExamplePlan, ExampleReader, TaskBatch
from bertsmith.layers.mixers.favor import FavorConfig
from bertsmith.models.build import rebuild
from bertsmith.models.model import Model
from bertsmith.objectives.distillation import AnyTerm
from bertsmith.objectives.distillation.objective import Distillation, Grid, named
from bertsmith.objectives.distillation.terms import LabelTerm, OutputTerm, StateTerm
from bertsmith.settings import Record
from bertsmith.shrinking.augmentation.words import AugmentationConfig
from bertsmith.shrinking.grid_judge import GridJudge
from bertsmith.shrinking.importance import ImportanceConfig, Order
from bertsmith.shrinking.settings import ShrinkSettings
from bertsmith.tasks.base import Encoding
from bertsmith.training.optimizer import OptimizerConfig, ScheduleConfig
from bertsmith.training.task_trainer import ExampleBatchConfig, FinetuneRunConfig, task_trainer
from bertsmith.training.trainer import Trainer

Stage = Literal["width", "depth", "labels"]


class StageConfig(Record):
    """What a stage of elastic training learns from."""

    terms: tuple[AnyTerm, ...] = Field(min_length=1)
    """The losses between a sub-network and its teacher, or the labels."""
    epochs: float | None = Field(default=None, gt=0)
    """None for as many as run.epochs says."""


class WidthStage(StageConfig):
    """All widths learn from the fine-tuned model."""

    terms: tuple[AnyTerm, ...] = Field(default=(OutputTerm(), StateTerm(weight=0.1)), min_length=1)


class DepthStage(StageConfig):
    """All widths and depths learn from the model of the first stage."""

    terms: tuple[AnyTerm, ...] = Field(default=(OutputTerm(), StateTerm()), min_length=1)


class LabelStage(StageConfig):
    """All widths and depths learn from the labels."""

    terms: tuple[AnyTerm, ...] = Field(default=(LabelTerm(),), min_length=1)


class ElasticSettings(ShrinkSettings):
    """All that an elastic training depends on."""

    method: Literal["elastic"] = "elastic"
    grid: Grid = Grid()
    importance: ImportanceConfig = ImportanceConfig()
    order: Order = "importance"
    """How the units of every layer are ordered before anything is learned; all but "importance" are to compare with."""
    stages: tuple[Stage, ...] = ("width", "depth")
    """One after the other: "width" learns all widths at full depth from the fine-tuned model, "depth" all of the grid
    from the model of the first stage, "labels" all of it from the labels, kept only if the mean score rises."""
    width: WidthStage = WidthStage()
    depth: DepthStage = DepthStage()
    labels: LabelStage = LabelStage()
    teacher_width: Literal["same", "full"] = "same"
    """In the depth stage: whether a sub-network learns from the teacher at its own width (the paper) or at full width
    (the released code)."""
    augmentation: AugmentationConfig = AugmentationConfig()
    """New rows for all stages but "labels", which needs labels that are sure."""
    batch: ExampleBatchConfig = ExampleBatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=2e-5, betas=(0.9, 0.999), weight_decay=0.0)
    schedule: ScheduleConfig = ScheduleConfig(warmup=0.0)
    run: FinetuneRunConfig = FinetuneRunConfig()

    def stage(self, stage: Stage) -> StageConfig:
        """What is learned from in a stage."""
        return {"width": self.width, "depth": self.depth, "labels": self.labels}[stage]

    def stage_grid(self, stage: Stage) -> Grid:
        """The sub-networks that learn in a stage."""
        return self.grid.changed(depths=(1.0,)) if stage == "width" else self.grid

    def stage_run(self, stage: Stage) -> FinetuneRunConfig:
        """How long a stage takes and how it is carried out."""
        epochs = self.stage(stage).epochs
        return self.run if epochs is None else self.run.changed(epochs=epochs)

    @model_validator(mode="after")
    def _check_stages(self) -> "ElasticSettings":
        allowed: list[tuple[Stage, ...]] = [("width",), ("width", "depth"), ("width", "depth", "labels")]
        allowed += [("width", "labels")]
        if self.stages not in allowed:
            names = "; ".join(", ".join(stages) for stages in allowed)
            raise ValueError(f"stages is {list(self.stages)}; allowed: {names}")
        return self


def make_stage(
    settings: ElasticSettings,
    stage: Stage,
    student: Model,
    teacher: Model,
    train: tuple[Sequence[Any], Features],
    dev: tuple[Sequence[Any], Features],
    out: Path,
    *,
    processes: int = 1,
    device: str = "auto",
    show: bool = True,
) -> Trainer:
    """The run of one stage; the teacher stays as it is, and so does the student that is given."""
    config, grid = settings.stage(stage), settings.stage_grid(stage)
    needs_teacher = any(term.needs_teacher for term in config.terms)
    student = copy.deepcopy(student)
    task = settings.task.objective(train[0])
    objective = Distillation(
        task,
        named(config.terms),
        teacher=copy.deepcopy(teacher) if needs_teacher else None,
        grid=grid,
        units=student.encoder.units,
        teacher_width=settings.teacher_width if stage == "depth" else "full",
    )
    evaluator = GridJudge(settings.task, dev[0], dev[1], settings.sequences, task.for_evaluation(), grid.subnets)
    learned = grid.subnets if grid.is_whole else grid.drawn(student.encoder.units, 0)
    shares = [subnet.width * subnet.depth for subnet in learned]
    return task_trainer(
        settings.changed(run=settings.stage_run(stage)),
        student,
        objective,
        train[1],
        evaluator,
        out,
        processes=processes,
        cost=sum(shares) + (1 / 3 if needs_teacher else 0),
        device=device,
        show=show,
    )


def scoring_batches(
    features: Features, config: ImportanceConfig, sequences: ExampleConfig, pad: int, seed: int
) -> Iterator[TaskBatch]:
    """The batches that importance is measured on: examples drawn from the training part, each at most once."""
    plan = ExamplePlan(features, sequences.changed(order="shuffled"), config.batch, seed)
    reader = ExampleReader(features, sequences, pad)
    count = min(plan.batches, -(-config.examples // config.batch))
    for _, place in zip(range(count), plan.one_epoch(), strict=False):
        batch = reader[place].batch
        assert isinstance(batch, TaskBatch)
        yield batch


def steady(model: Model) -> Model:
    """The model with random features that are never drawn anew: teacher and student must see through the same ones."""
    encoder = model.config.encoder
    layers = tuple(
        layer.changed(mixer=layer.mixer.changed(redraw_every=0)) if isinstance(layer.mixer, FavorConfig) else layer
        for layer in encoder.layers
    )
    if layers == encoder.layers:
        return model
    return rebuild(model, model.config.changed(encoder=encoder.changed(layers=layers)))


def encoded(settings: ShrinkSettings, model: Model, examples: Sequence[Any]) -> Features:
    """The features of some examples as the model reads them."""
    return settings.task.features(examples, Encoding.of(model, settings.sequences.length))

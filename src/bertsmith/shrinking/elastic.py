"""Elastic training (DynaBERT, Hou et al. 2020): train the sub-networks of a fine-tuned model at every width and depth.

importance -> rewiring (most important heads and neurons first) -> stages (width, depth, labels) -> scores and costs
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

from accelerate import PartialState
from pydantic import Field, model_validator
from rich.console import Console
from torch import Tensor

from bertsmith.checkpoint.store import load, write_model
from bertsmith.errors import InputError
from bertsmith.files import NewFolder, read_json, write_json
from bertsmith.models.heads import TaskHeadConfig
from bertsmith.models.model import Model
from bertsmith.objectives.distillation import AnyTerm
from bertsmith.objectives.distillation.objective import Distillation, Grid, name_terms
from bertsmith.objectives.distillation.terms import HiddenStateTerm, LabelTerm, OutputTerm
from bertsmith.settings import Record
from bertsmith.shrinking.context import STAGE_FILES, ShrinkContext, ShrinkSettings, Split, freeze_random_features
from bertsmith.shrinking.elastic_metadata import ElasticMetadata, SubnetworkMetadata
from bertsmith.shrinking.importance import ImportanceConfig, Order, orders, rewire
from bertsmith.shrinking.masked_words import AugmentationConfig
from bertsmith.shrinking.subnetworks import GridEvaluator, SubnetScore, subnet_costs
from bertsmith.training.optimizer import OptimizerConfig, ScheduleConfig
from bertsmith.training.task_trainer import ExampleBatchConfig, FinetuneRunConfig, task_trainer
from bertsmith.training.trainer import Trainer

REWIRED = "rewired"

Stage = Literal["width", "depth", "labels"]


class StageConfig(Record):
    """Losses and length of a stage of elastic training."""

    terms: tuple[AnyTerm, ...] = Field(min_length=1)
    """Losses between a sub-network and its teacher or the labels."""
    epochs: float | None = Field(default=None, gt=0)
    """Epochs of the stage; None for run.epochs."""


class WidthStage(StageConfig):
    """All widths learn from the fine-tuned model."""

    terms: tuple[AnyTerm, ...] = Field(default=(OutputTerm(), HiddenStateTerm(weight=0.1)), min_length=1)


class DepthStage(StageConfig):
    """All widths and depths learn from the model of the first stage."""

    terms: tuple[AnyTerm, ...] = Field(default=(OutputTerm(), HiddenStateTerm()), min_length=1)


class LabelStage(StageConfig):
    """All widths and depths learn from the labels."""

    terms: tuple[AnyTerm, ...] = Field(default=(LabelTerm(),), min_length=1)


class ElasticSettings(ShrinkSettings):
    """All settings of elastic training."""

    method: Literal["elastic"] = "elastic"
    grid: Grid = Grid()
    importance: ImportanceConfig = ImportanceConfig()
    order: Order = "importance"
    """Order of the units of every layer before training; all but "importance" are baselines."""
    stages: tuple[Stage, ...] = ("width", "depth")
    """Stages in order: "width" distils the fine-tuned model into all widths at full depth, "depth" distils the model of
    the first stage into the whole grid, "labels" trains the grid on the labels and is kept only if the mean score
    rises."""
    width: WidthStage = WidthStage()
    depth: DepthStage = DepthStage()
    labels: LabelStage = LabelStage()
    teacher_width: Literal["same", "full"] = "same"
    """Width of the teacher in the depth stage: the student's own (the paper) or full (the released code)."""
    augmentation: AugmentationConfig = AugmentationConfig()
    """Augmented rows for all stages except "labels", which needs correct labels."""
    batch: ExampleBatchConfig = ExampleBatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=2e-5, betas=(0.9, 0.999), weight_decay=0.0)
    schedule: ScheduleConfig = ScheduleConfig(warmup=0.0)
    run: FinetuneRunConfig = FinetuneRunConfig()

    def stage(self, stage: Stage) -> StageConfig:
        """Return the settings of a stage."""
        return {"width": self.width, "depth": self.depth, "labels": self.labels}[stage]

    def stage_grid(self, stage: Stage) -> Grid:
        """Return the sub-networks that a stage trains."""
        return self.grid.changed(depths=(1.0,)) if stage == "width" else self.grid

    @property
    def trained_grid(self) -> Grid:
        """Sub-networks that are trained after all stages."""
        return self.stage_grid("depth" if "depth" in self.stages else "width")

    def stage_run(self, stage: Stage) -> FinetuneRunConfig:
        """Return the run settings of a stage."""
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


@dataclass(frozen=True)
class ElasticModel:
    """An elastic model with the scores and costs of its sub-networks."""

    model: Model
    metadata: ElasticMetadata
    seconds: float
    """Time spent training."""
    notices: Sequence[str] = ()


def shrink_elastic(settings: ElasticSettings, context: ShrinkContext, augmented: Split) -> ElasticModel | None:
    """Order the units, train all stages and evaluate the grid; None on processes other than the main one.

    `augmented` has the training rows plus any new ones; only the "labels" stage trains on the plain rows.
    """
    console = Console(quiet=not context.is_main)
    console.rule("importance")
    student = rewired_model(settings, context)
    teacher, seconds = context.model, 0.0
    for stage in settings.stages:
        console.rule(f"stage: {stage}")
        folder, train = context.out / stage, context.train if stage == "labels" else augmented
        trained, took = context.finished_stage(folder) or context.run_stage(
            make_stage(settings, stage, student, teacher, context, train, folder), folder
        )
        seconds += took
        if stage == "labels" and not mean_score(settings, context, trained) > mean_score(settings, context, student):
            console.print("the labels stage did not raise the mean score; keeping the model of the previous stage")
            continue
        student = teacher = trained
    return describe_subnetworks(settings, context, student, seconds) if context.is_main else None


def check_head(settings: ElasticSettings) -> None:
    """Raise InputError if the task head reads layers that the shallowest sub-networks do not have."""
    config = settings.model.described_config()
    fewest = len(settings.trained_grid.subnets[0].kept_layers(len(config.encoder.layers)))
    for head in config.heads:
        if isinstance(head, TaskHeadConfig):
            reads = head.features.layers + head.features.skip
            if not head.features.layers or reads > fewest:
                raise InputError(
                    f"the model's head reads {reads} layers, but the smallest of grid.depths keeps {fewest}; "
                    f"allowed: 1 to {fewest}"
                )


def rewired_model(settings: ElasticSettings, context: ShrinkContext) -> Model:
    """Return the model with its units in order, loaded from an interrupted run or computed."""
    folder = context.out / REWIRED
    if not folder.is_dir() and context.is_main:
        scores = context.importance(context.model, settings.importance, settings.run.seed)
        unit_orders = orders(context.model, scores, settings.order, settings.run.seed)
        model = settings.model.load()
        rewire(model, unit_orders)
        lists = {"head_scores": scores.heads, "head_order": unit_orders.heads, "neuron_order": unit_orders.neurons}
        with NewFolder(folder) as new:
            write_model(model, new)
            write_json(new / "orders.json", {name: _lists(tensors) for name, tensors in lists.items()})
    PartialState().wait_for_everyone()
    return freeze_random_features(load(folder))


def _lists(tensors: tuple[Tensor, ...]) -> list[list[float]]:
    return [tensor.tolist() for tensor in tensors]


def make_stage(
    settings: ElasticSettings,
    stage: Stage,
    student: Model,
    teacher: Model,
    context: ShrinkContext,
    train: Split,
    out: Path,
    *,
    show: bool = True,
) -> Trainer:
    """Return the trainer of one stage; it trains a copy of the student."""
    config, grid = settings.stage(stage), settings.stage_grid(stage)
    needs_teacher = any(term.needs_teacher for term in config.terms)
    student = copy.deepcopy(student)
    task = settings.task.objective(train.examples)
    objective = Distillation(
        task,
        name_terms(config.terms),
        teacher=copy.deepcopy(teacher) if needs_teacher else None,
        grid=grid,
        units=student.encoder.units,
        teacher_width=settings.teacher_width if stage == "depth" else "full",
    )
    subnets = grid.subnets if grid.is_whole else grid.sample_subnets(student.encoder.units, 0)
    return task_trainer(
        settings.changed(run=settings.stage_run(stage)),
        student,
        objective,
        train.features,
        GridEvaluator(settings.task, *context.dev, settings.sequences, task.for_evaluation(), grid.subnets),
        out,
        processes=context.processes,
        cost=sum(subnet.width * subnet.depth for subnet in subnets) + (1 / 3 if needs_teacher else 0),
        device=context.device,
        show=show,
    )


def evaluate_grid(settings: ElasticSettings, context: ShrinkContext, model: Model) -> list[SubnetScore]:
    """Score every trained sub-network of a model on dev."""
    objective = settings.task.objective(context.train.examples).for_evaluation()
    subnets = settings.trained_grid.subnets
    evaluator = GridEvaluator(settings.task, *context.dev, settings.sequences, objective, subnets)
    return evaluator.evaluate_grid(model.to(context.model.device).eval())


def mean_score(settings: ElasticSettings, context: ShrinkContext, model: Model) -> float:
    """Mean score over all trained sub-networks."""
    return fmean(score.evaluation.score for score in evaluate_grid(settings, context, model))


def describe_subnetworks(
    settings: ElasticSettings, context: ShrinkContext, model: Model, seconds: float
) -> ElasticModel:
    """Evaluate and time every sub-network; the model is moved to the CPU."""
    teacher, scores = context.evaluate(context.model), evaluate_grid(settings, context, model)
    model = model.cpu()  # bertsmith fit measures on the CPU, so its budgets compare with these latencies
    costs = subnet_costs(model, [score.subnet for score in scores], context.length)
    metadata = ElasticMetadata.parse(
        {
            "metric": teacher.metric,
            "teacher_score": teacher.score,
            "depth_rule": settings.grid.depth_rule,
            "length": context.length,
            "grid": [
                SubnetworkMetadata(
                    width=score.subnet.width,
                    depth=score.subnet.depth,
                    score=score.evaluation.score,
                    parameters=cost.parameters,
                    flops=cost.flops,
                    latency_ms=cost.latency_ms,
                ).plain()
                for score, cost in zip(scores, costs, strict=True)
            ],
            **read_json(context.out / REWIRED / "orders.json"),
        },
        source="the elastic training",
    )
    return ElasticModel(model, metadata, seconds, context.notices)


def temporary_files(settings: ElasticSettings) -> list[str]:
    """Return patterns of the intermediate models, which a finished run does not need; logs stay."""
    return [REWIRED, *(f"{stage}/{name}" for stage in settings.stages for name in STAGE_FILES)]


def explain_elastic(settings: ElasticSettings, model: Model, rows: int, augmented: int) -> dict[str, str]:
    """Describe the cost of every stage; `augmented` is the maximum number of rows after augmentation."""
    facts = {} if augmented == rows else {"augmentation": f"{rows:,} rows become at most {augmented:,}"}
    for stage in settings.stages:
        batches = -(-(rows if stage == "labels" else augmented) // settings.batch.examples)
        grid, steps = settings.stage_grid(stage), settings.stage_run(stage).steps(batches)
        subnets = grid.subnets if grid.is_whole else grid.sample_subnets(model.encoder.units, 0)
        passes = sum(subnet.width * subnet.depth for subnet in subnets)
        facts[f"stage {stage}"] = (
            f"{len(subnets)} sub-networks per step (cost of {passes:.2f} whole models), {steps:,} steps"
        )
    return facts

"""Structured pruning: remove the least important heads and neurons in several cuts, with recovery training.

[train gates] -> for each cut: score units, select units, cut, [recover] -> scores and sizes
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from accelerate import PartialState
from pydantic import Field
from rich.console import Console

from bertsmith.checkpoint.store import write_model
from bertsmith.files import NewFolder, read_json, write_json
from bertsmith.models.cost import parameters
from bertsmith.models.model import Model
from bertsmith.objectives.gating import Gating
from bertsmith.settings import Record
from bertsmith.shrinking.context import STAGE_FILES, ShrinkContext, load_together
from bertsmith.shrinking.importance import Importance, ImportanceConfig
from bertsmith.shrinking.prune_selection import PruneConfig, Selector, Shares, magnitude, schedule
from bertsmith.shrinking.pruned_units import (
    KeptUnits,
    PruningMetadata,
    cut_down,
    cut_gated,
    gate_locations,
    with_folded_gates,
    with_gates,
)
from bertsmith.shrinking.recovery import RecoveryConfig, RecoverySettings, recovery_trainer
from bertsmith.tasks.base import Evaluation
from bertsmith.tasks.outputs import WatchBatch
from bertsmith.training.evaluator import Evaluator
from bertsmith.training.task_trainer import task_trainer
from bertsmith.training.trainer import Trainer

CUTS, GATES, RECOVERY = "cuts", "gates", "recovery"
TEMPORARY = (CUTS, *(f"{stage}/{name}" for stage in (GATES, f"{RECOVERY}/*") for name in STAGE_FILES))
"""Patterns of the intermediate models, which a finished run does not need; logs stay."""
CUT_FILE = "kept.json"


class GateTrainingConfig(Record):
    """Training of the gates if prune.by is "l0"."""

    epochs: float | None = Field(default=None, gt=0)
    """Epochs of joint training of weights and gates; None for run.epochs."""
    learning_rate: float = Field(default=0.1, gt=0)
    """Learning rate of the gates."""
    strength: float = Field(default=0.01, gt=0)
    """Weight of the L0 penalty while too many gates are open."""


class CutRecoveryConfig(RecoveryConfig):
    """Recovery training of a pruned model."""

    between: float = Field(default=0.0, ge=0)
    """Epochs after every other cut."""


class PruneSettings(RecoverySettings):
    """All settings of pruning."""

    method: Literal["prune"] = "prune"
    prune: PruneConfig = PruneConfig()
    importance: ImportanceConfig = ImportanceConfig()
    gates: GateTrainingConfig = GateTrainingConfig()
    recovery: CutRecoveryConfig = CutRecoveryConfig()

    @property
    def gate_epochs(self) -> float:
        """Epochs of gate training."""
        return self.run.epochs if self.gates.epochs is None else self.gates.epochs


@dataclass(frozen=True)
class CutScore:
    """Number of units of all layers after a cut, and the score before recovery."""

    heads: int
    neurons: int
    score: float


class CutMetadata(Record):
    """The remaining units after a cut, by their indices in the unpruned model."""

    heads: tuple[tuple[int, ...], ...]
    neurons: tuple[tuple[int, ...], ...]
    head_scores: tuple[tuple[float, ...], ...]
    """Score of every head before the cut."""
    score: float

    @property
    def summary(self) -> CutScore:
        return CutScore(sum(map(len, self.heads)), sum(map(len, self.neurons)), self.score)

    @property
    def units(self) -> KeptUnits:
        heads, neurons = (tuple(map(torch.tensor, layers)) for layers in (self.heads, self.neurons))
        return KeptUnits(heads, neurons)


@dataclass(frozen=True)
class PrunedSizes:
    """Sizes and costs of a model before and after pruning."""

    parameters: int
    parameters_before: int
    layer_parameters: int
    """Parameters of mixers and feed-forwards."""
    layer_parameters_before: int
    length: int
    """Sequence length in tokens for `flops`."""
    flops: float
    flops_before: float


@dataclass(frozen=True)
class PrunedModel:
    """A pruned model with its units, scores and sizes."""

    model: Model
    metadata: PruningMetadata
    evaluation: Evaluation
    cuts: tuple[CutScore, ...]
    sizes: PrunedSizes
    seconds: float
    """Time spent training."""


def shrink_prune(settings: PruneSettings, context: ShrinkContext) -> PrunedModel | None:
    """Prune in several cuts with recovery training; None on processes other than the main one."""
    console = Console(quiet=not context.is_main)
    device = context.model.device
    model, seconds = context.model, 0.0
    if settings.prune.by == "l0":
        console.rule("training gates")
        folder = context.out / GATES
        model, seconds = context.finished_stage(folder) or context.run_stage(
            make_gating(settings, context, folder), folder
        )
        model = model.to(device)
    cuts = schedule(settings.prune)
    for number, shares in enumerate(cuts, start=1):
        console.print(f"cut {number} of {len(cuts)}", highlight=False)
        model = cut_model(settings, context, model, shares, number)
        epochs = settings.recovery.between if number < len(cuts) else settings.epochs_after
        if epochs:
            console.rule(f"recovery after cut {number}")
            folder = context.out / RECOVERY / str(number)
            model, took = context.finished_stage(folder) or context.run_stage(
                make_recovery(settings, model, context, folder, epochs=epochs), folder
            )
            model, seconds = model.to(device), seconds + took
    return describe_pruned(settings, context, model, len(cuts), seconds) if context.is_main else None


def make_selector(settings: PruneSettings, model: Model) -> Selector:
    """Return the unit selector of the unpruned model; InputError if the share to keep is impossible."""
    return Selector(settings.prune, model.config.encoder, model.encoder.units)


def make_recovery(
    settings: PruneSettings, model: Model, context: ShrinkContext, out: Path, *, epochs: float, show: bool = True
) -> Trainer:
    """Return the trainer of a copy of a pruned model, which learns from the unpruned model or the labels."""
    return recovery_trainer(settings, model, context, out, run=settings.run.changed(epochs=epochs), show=show)


def make_gating(settings: PruneSettings, context: ShrinkContext, out: Path, *, show: bool = True) -> Trainer:
    """Return the trainer of a gated copy of the model; the target share of open gates is the share of kept units."""
    task, gates = settings.task.objective(context.train.examples), settings.gates
    rate = gates.learning_rate / settings.optimizer.learning_rate
    objective = Gating(task, *_open_shares(settings, context.model), rate=rate, strength=gates.strength)
    # the best evaluation is an early one, before gates close
    run = settings.run.changed(epochs=settings.gate_epochs, choose="last", patience=None)
    return task_trainer(
        settings.changed(run=run),
        with_gates(context.model),
        objective,
        context.train.features,
        GatedEvaluator(settings.task, *context.dev, settings.sequences, task.for_evaluation()),
        out,
        processes=context.processes,
        device=context.device,
        show=show,
    )


def _open_shares(settings: PruneSettings, model: Model) -> tuple[float, float]:
    """Shares of heads and of neurons that are kept if all have the same score."""
    units = model.encoder.units
    even = Importance(*(tuple(torch.ones(getattr(u, kind)) for u in units) for kind in ("heads", "neurons")))
    (shares,) = schedule(settings.prune)
    heads, neurons = make_selector(settings, model).select(even, shares).counts
    return sum(heads) / sum(u.heads for u in units), sum(neurons) / sum(u.neurons for u in units)


class GatedEvaluator(Evaluator):
    """Evaluate a gated model with its gates folded into the weights."""

    def evaluate(self, model: Model, watch: WatchBatch | None = None) -> Evaluation:
        """Score the model on dev."""
        return super().evaluate(with_folded_gates(model), watch)


def cut_model(settings: PruneSettings, context: ShrinkContext, model: Model, shares: Shares, number: int) -> Model:
    """Return the model after a cut, loaded from an interrupted run or cut now."""
    folder = context.out / CUTS / str(number)
    if not folder.is_dir() and context.is_main:
        scores = unit_scores(settings, context, model)
        chosen = make_selector(settings, context.model).select(scores, shares)
        small = cut_gated(model, chosen) if "gates" in model.heads else cut_down(model, chosen)
        earlier = (
            read_cut_metadata(context.out, number - 1).units
            if number > 1
            else KeptUnits.all_of(context.model.encoder.units)
        )
        units = chosen.within(earlier)
        cut = CutMetadata.parse(
            {
                "heads": [layer.tolist() for layer in units.heads],
                "neurons": [layer.tolist() for layer in units.neurons],
                "head_scores": [layer.tolist() for layer in scores.heads],
                "score": context.evaluate(small).score,
            },
            source="the cut",
        )
        folder.parent.mkdir(exist_ok=True)
        with NewFolder(folder) as new:
            write_model(small, new)
            write_json(new / CUT_FILE, cut.plain())
    PartialState().wait_for_everyone()
    return load_together(folder).to(context.model.device)


def read_cut_metadata(out: Path, number: int) -> CutMetadata:
    """Read the metadata of a cut of this run."""
    path = out / CUTS / str(number) / CUT_FILE
    return CutMetadata.parse(read_json(path), source=str(path))


def unit_scores(settings: PruneSettings, context: ShrinkContext, model: Model) -> Importance:
    """Score all units of a model by the measure `prune.by`."""
    if settings.prune.by == "l0":
        return gate_locations(model)
    if settings.prune.by == "magnitude":
        return magnitude(model)
    scores = context.importance(model, settings.importance, settings.run.seed)
    if settings.prune.by == "random":
        generator = torch.Generator().manual_seed(settings.run.seed)
        return scores.mapped(lambda layer: torch.rand(layer.shape, generator=generator).to(layer))
    return scores.mapped(torch.neg) if settings.prune.by == "reversed" else scores


def describe_pruned(
    settings: PruneSettings, context: ShrinkContext, model: Model, count: int, seconds: float
) -> PrunedModel:
    """Evaluate the pruned and the unpruned model and count their parameters and FLOP."""
    units = context.model.encoder.units
    evaluation, before = context.evaluate(model), context.evaluate(context.model)
    cuts = [read_cut_metadata(context.out, number) for number in range(1, count + 1)]
    metadata = PruningMetadata(
        by=settings.prune.by,
        scope=settings.prune.scope,
        metric=evaluation.metric,
        teacher_score=before.score,
        score=evaluation.score,
        heads_before=tuple(layer.heads for layer in units),
        neurons_before=tuple(layer.neurons for layer in units),
        heads=cuts[-1].heads,
        neurons=cuts[-1].neurons,
        head_scores=cuts[0].head_scores,
    )
    selector, length = make_selector(settings, context.model), context.length
    now, whole = model.config, context.model.config
    sizes = PrunedSizes(
        parameters=parameters(now),
        parameters_before=parameters(whole),
        layer_parameters=selector.parameters(KeptUnits.all_of(model.encoder.units)),
        layer_parameters_before=selector.whole,
        length=length,
        flops=float(now.encoder.flops(length)) * length,
        flops_before=float(whole.encoder.flops(length)) * length,
    )
    return PrunedModel(model, metadata, evaluation, tuple(cut.summary for cut in cuts), sizes, seconds)


def explain_prune(settings: PruneSettings, selector: Selector, examples: int) -> dict[str, str]:
    """Describe the cost of every step of pruning."""
    batches, run, cuts = -(-examples // settings.batch.examples), settings.run, schedule(settings.prune)
    facts = {"cuts": f"{len(cuts)}"}
    if settings.prune.by in ("importance", "reversed"):
        facts["importance"] = f"measured on {min(examples, settings.importance.examples):,} examples before each cut"
    if settings.prune.by == "l0":
        facts["gate training"] = f"{run.changed(epochs=settings.gate_epochs).steps(batches):,} steps"
    if settings.recovery.between:
        steps = run.changed(epochs=settings.recovery.between).steps(batches)
        facts["recovery between cuts"] = f"{(len(cuts) - 1) * steps:,} steps"
    if settings.epochs_after:
        facts["recovery after the cuts"] = f"{run.changed(epochs=settings.epochs_after).steps(batches):,} steps"
    facts["layer parameters"] = f"{selector.whole:,} before pruning"
    return facts

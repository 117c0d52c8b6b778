"""What is learned around a cut: gates before it, what was lost after it."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from bertsmith.answers.sequences import Features
from bertsmith.data.examples import TaskBatch
from bertsmith.models.heads import GatesConfig
from bertsmith.models.model import Model
from bertsmith.objectives.distillation.objective import Distillation, named
from bertsmith.objectives.gating import Gating, unit_gates
from bertsmith.shrinking.importance import Importance
from bertsmith.shrinking.prune.kept import Kept, closed, cut_down, fold
from bertsmith.shrinking.prune.settings import PruneSettings
from bertsmith.tasks.base import Judgement
from bertsmith.training.judging import DevJudge
from bertsmith.training.task_trainer import task_trainer
from bertsmith.training.trainer import Trainer

Part = tuple[Sequence[Any], Features]
"""The examples of a part of the data, and what is made of them."""


def make_recovery(
    settings: PruneSettings,
    model: Model,
    teacher: Model,
    train: Part,
    dev: Part,
    out: Path,
    *,
    epochs: float,
    processes: int = 1,
    device: str = "auto",
    show: bool = True,
) -> Trainer:
    """The run in which a pruned model learns from the unpruned one or from the labels; both stay as they are."""
    task, terms = settings.task.objective(train[0]), settings.recovery.terms
    needs_teacher = any(term.needs_teacher for term in terms)
    objective = Distillation(task, named(terms), teacher=copy.deepcopy(teacher) if needs_teacher else None)
    return task_trainer(
        settings.changed(run=settings.run.changed(epochs=epochs)),
        copy.deepcopy(model),
        objective,
        train[1],
        DevJudge(settings.task, *dev, settings.sequences, task.for_evaluation()),
        out,
        processes=processes,
        cost=4 / 3 if needs_teacher else 1.0,
        device=device,
        show=show,
    )


def make_gating(
    settings: PruneSettings,
    model: Model,
    shares: tuple[float, float],
    train: Part,
    dev: Part,
    out: Path,
    *,
    processes: int = 1,
    device: str = "auto",
    show: bool = True,
) -> Trainer:
    """The run in which a copy of a model learns gates, until these shares of heads and of neurons are open."""
    task, gates = settings.task.objective(train[0]), settings.gates
    rate = gates.learning_rate / settings.optimizer.learning_rate
    objective = Gating(task, *shares, rate=rate, strength=gates.strength)
    epochs = settings.run.epochs if gates.epochs is None else gates.epochs
    # the best evaluation is an early one, before anything was given up
    run = settings.run.changed(epochs=epochs, choose="last", patience=None)
    return task_trainer(
        settings.changed(run=run),
        with_gates(model),
        objective,
        train[1],
        GatedJudge(settings.task, *dev, settings.sequences, task.for_evaluation()),
        out,
        processes=processes,
        device=device,
        show=show,
    )


class GatedJudge(DevJudge):
    """Judges a model that learns gates as it would be if they stayed what they are."""

    def judgement(self, model: Model, watch: Callable[[TaskBatch, Tensor], None] | None = None) -> Judgement:
        """How good it is with its gates in its weights."""
        return super().judgement(settled(model), watch)


def with_gates(model: Model) -> Model:
    """A copy of a model with a gate on every head and neuron, all of them open."""
    encoder, units = model.config.encoder, model.encoder.units
    heads, neurons = tuple(layer.heads for layer in units), tuple(layer.neurons for layer in units)
    config = GatesConfig(
        heads=heads[:1] if encoder.shares_mixer else heads,
        neurons=neurons[:1] if encoder.shares_feedforward else neurons,
        layers=len(units),
    )
    gated = copy.deepcopy(model)
    gated.config = model.config.changed(heads=(*model.config.heads, config))
    gated.heads["gates"] = config.build(encoder.width, encoder.embedding_width, encoder.vocabulary).to(model.device)
    return gated


def without_gates(model: Model) -> Model:
    """A copy of a model that has learned gates, without them: its weights as they are."""
    plain = copy.deepcopy(model)
    del plain.heads["gates"]
    plain.config = model.config.changed(heads=tuple(head for head in model.config.heads if head.kind != "gates"))
    return plain


def settled(model: Model) -> Model:
    """A model of the same size with its gates in its weights."""
    plain = without_gates(model)
    fold(plain, unit_gates(model).settled())
    return plain


def locations(model: Model) -> Importance:
    """What units are worth by the gates that were learned: where each is."""
    heads, neurons = unit_gates(model).locations()
    # shared gates are listed for every use, and summed over uses they rank as before
    return Importance(tuple(own.detach().cpu() for own in heads), tuple(own.detach().cpu() for own in neurons))


def cut_gated(model: Model, kept: Kept) -> Model:
    """An ordinary model with the kept units alone, what their gates let through being part of the weights."""
    plain = without_gates(model)
    fold(plain, closed(kept, model.encoder.units, unit_gates(model).settled()))
    return cut_down(plain, kept)

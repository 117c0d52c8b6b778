"""Distillation of a whole student or of the sub-networks of an elastic model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from bertsmith.data.examples import TaskBatch
from bertsmith.data.random import generator
from bertsmith.layers.subnet import LayerCut, Subnet
from bertsmith.models.encoder import EncoderInputs, EncoderOutput, Want
from bertsmith.models.model import Model
from bertsmith.objectives.base import Objective, Portion, Sums, Term
from bertsmith.objectives.distillation.base import DistillationTerm, LayerMap, Pair, counterparts
from bertsmith.objectives.supervised import Supervised
from bertsmith.settings import Record


class Grid(Record):
    """Widths × depths of an elastic model, and how many sub-networks are trained per step."""

    widths: tuple[float, ...] = (1.0, 0.75, 0.5, 0.25)
    """Fractions of heads and neurons; must include 1."""
    depths: tuple[float, ...] = (1.0, 0.75, 0.5)
    """Fractions of layers; must include 1."""
    depth_rule: Literal["keep_last", "drop_last"] = "keep_last"
    """Layers to keep; "drop_last" is the rule of the released DynaBERT weights."""
    sample: int | None = Field(default=None, ge=0)
    """Sub-networks trained per step besides the largest and the smallest (the sandwich rule); None for all."""
    per_layer: bool = False
    """Whether sampled sub-networks have independent widths for heads and neurons in every layer, as needed for a search
    over such networks."""

    @model_validator(mode="after")
    def _check(self) -> "Grid":
        for name in ("widths", "depths"):
            shares = getattr(self, name)
            if 1.0 not in shares or len(set(shares)) < len(shares) or not all(0 < share <= 1 for share in shares):
                raise ValueError(f"{name} is {list(shares)}; allowed: distinct values above 0 up to 1, including 1")
        if self.per_layer and not self.sample:
            raise ValueError(f"per_layer is true, but sample is {self.sample}; allowed: 1 or more")
        return self

    @property
    def subnets(self) -> tuple[Subnet, ...]:
        """All sub-networks of the grid, the smallest first and the largest last."""
        return tuple(
            Subnet(width=width, depth=depth, depth_rule=self.depth_rule)
            for depth in sorted(self.depths)
            for width in sorted(self.widths)
        )

    @property
    def is_whole(self) -> bool:
        """Whether every step trains all sub-networks."""
        count = len(self.subnets)
        return count == 1 or (not self.per_layer and (self.sample is None or self.sample >= count - 2))

    def sample_subnets(self, units: Sequence[LayerCut], *seed: int) -> tuple[Subnet, ...]:
        """Return the sub-networks of one step, the largest last; `units` are the heads and neurons of every layer."""
        if self.is_whole:
            return self.subnets
        smallest, *between, largest = self.subnets
        random, sample = generator(*seed), self.sample or 0
        if self.per_layer:
            sampled = [self._sample_per_layer(units, random) for _ in range(sample)]
        else:
            sampled = [between[position] for position in sorted(random.permutation(len(between))[:sample])]
        return (smallest, *sampled, largest)

    def _sample_per_layer(self, units: Sequence[LayerCut], random: np.random.Generator) -> Subnet:
        """Return a sub-network with widths sampled for each layer."""
        depth = float(random.choice(self.depths))
        kept = Subnet(depth=depth, depth_rule=self.depth_rule).kept_layers(len(units))
        cuts = []
        for index in kept:
            heads, neurons = (
                Subnet(width=float(random.choice(self.widths))).cuts([units[index]])[0][1] for _ in range(2)
            )
            cuts.append((heads.heads, neurons.neurons))
        return Subnet(
            depth=depth,
            depth_rule=self.depth_rule,
            heads=tuple(heads for heads, _ in cuts),
            neurons=tuple(count for _, count in cuts),
        )


WHOLE = Subnet()
TEACHER_WIDTH = "teacher_width"  # projection head of a student whose width differs from its teacher's


@dataclass(frozen=True)
class DistillationBatch:
    """A batch, the sub-networks to train on it, and the teacher's output."""

    batch: TaskBatch
    subnets: tuple[Subnet, ...]
    """All sub-networks of the step; a single one after `parts`."""
    teacher: EncoderOutput | None = None


@dataclass(frozen=True)
class Distillation(Objective[TaskBatch, DistillationBatch]):
    """Sum over sub-networks of the losses against the teacher (Hou et al. 2020, eqs. 4 to 8).

    Each sub-network is a part of the step, with its backward pass before the next forward pass, so that memory holds
    one at a time. The whole network is last, so that every weight is used when processes exchange gradients.
    """

    keeps_shapes: ClassVar[bool] = False  # hidden states are compared at real tokens only

    task: Supervised
    terms_by_name: Mapping[str, DistillationTerm]
    teacher: Model | None = None
    grid: Grid | None = None
    """Sub-networks to train; None for the whole student only."""
    units: tuple[LayerCut, ...] = ()
    """Heads and neurons of every layer of the student, to sample sub-networks."""
    teacher_width: Literal["same", "full"] = "full"
    """Teacher of an even sub-network: "same" cuts the teacher to its width, at full depth."""
    layer_map: LayerMap = "uniform"
    """Teacher layers that a whole student learns from; a sub-network learns from the layers it was cut from."""

    @property
    def terms(self) -> dict[str, Term]:  # type: ignore[override]
        return {name: Term(term.metrics, term.weight) for name, term in self.terms_by_name.items()}

    def to(self, device: torch.device | str) -> "Distillation":
        if self.teacher is None:
            return self
        return replace(self, teacher=self.teacher.to(device).eval().requires_grad_(False))

    def prepare(self, batch: TaskBatch, seed: int) -> DistillationBatch:
        if self.grid is None or self.grid.is_whole:
            return DistillationBatch(batch, (WHOLE,) if self.grid is None else self.grid.subnets)
        return DistillationBatch(batch, self.grid.sample_subnets(self.units, seed, int(batch.item[0])))

    def counts(self, prepared: DistillationBatch) -> dict[str, Tensor]:
        return {name: term.count(self.task, prepared.batch) for name, term in self.terms_by_name.items()}

    def parts(self, prepared: DistillationBatch) -> Sequence[DistillationBatch]:
        outputs: dict[float, EncoderOutput | None] = {}
        parts = []
        for subnet in prepared.subnets:
            width = subnet.width if self.teacher_width == "same" and subnet.is_even else 1.0
            if width not in outputs:
                outputs[width] = self._teacher_output(prepared.batch, Subnet(width=width))
            parts.append(DistillationBatch(prepared.batch, (subnet,), outputs[width]))
        return parts

    def __call__(self, model: Model, prepared: DistillationBatch) -> dict[str, Sums]:
        batch, (subnet,) = prepared.batch, prepared.subnets
        student = self.run(model, batch, subnet)
        widen = model.heads[TEACHER_WIDTH] if TEACHER_WIDTH in model.heads else None  # noqa: SIM401 (no get)
        states, layers = self._counterparts(len(model.config.encoder.layers), subnet)
        pair = Pair(self.task.for_model(model), batch, student, prepared.teacher, states, layers, widen)
        return self.sums(pair)

    def sums(self, pair: Pair) -> dict[str, Sums]:
        """Return the sums of each term for a pair."""
        sums = {name: term.sums(pair) for name, term in self.terms_by_name.items()}
        if not any(term.reads_outputs for term in self.terms_by_name.values()):
            # DDP needs a gradient for every weight, zeros for weights that no term uses
            name, first = next(iter(sums.items()))
            sums[name] = first._replace(loss=first.loss + 0.0 * pair.student.outputs.sum())
        return sums

    def run(self, model: Model, batch: TaskBatch, subnet: Subnet) -> EncoderOutput:
        """Run a model on a batch and return the outputs of its head and all hidden states."""
        types = batch.types if model.config.encoder.embedding.types > 1 else None
        inputs = EncoderInputs(batch.tokens, batch.layout, types, subnet=None if subnet == WHOLE else subnet)
        return model.run(inputs, Want(task=True, all_hidden_states=True))

    def finish(self, model: Model) -> Model:
        if TEACHER_WIDTH not in model.heads:
            return model
        del model.heads[TEACHER_WIDTH]
        heads = tuple(head for head in model.config.heads if head.kind != TEACHER_WIDTH)
        model.config = model.config.changed(heads=heads)
        return model

    def for_evaluation(self) -> Supervised:  # type: ignore[override]
        return self.task.for_evaluation()

    def portions(self, model: Model) -> list[Portion]:
        return self.task.portions(model)

    @torch.no_grad()
    def _teacher_output(self, batch: TaskBatch, subnet: Subnet) -> EncoderOutput | None:
        """Return the teacher's output for a batch, or None without a teacher."""
        return None if self.teacher is None else self.run(self.teacher, batch, subnet)

    def _counterparts(self, layers: int, subnet: Subnet) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the teacher's counterparts of the student's hidden states and of its layers."""
        if self.grid is not None or self.teacher is None:
            return subnet.counterparts(layers), subnet.kept_layers(layers)
        states = counterparts(self.layer_map, layers, len(self.teacher.config.encoder.layers))
        return states, tuple(number - 1 for number in states[1:])


def name_terms(terms: Sequence[DistillationTerm]) -> dict[str, DistillationTerm]:
    """Return terms by their names in the log: their kinds, with a number from the second of a kind on."""
    names: dict[str, DistillationTerm] = {}
    for term in terms:
        number = sum(other.kind == term.kind for other in names.values())
        names[f"{term.kind}_{number + 1}" if number else term.kind] = term
    return names

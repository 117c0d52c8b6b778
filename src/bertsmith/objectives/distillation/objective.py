"""One step of learning from a teacher: a whole student, or every sub-network of an elastic one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

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
    """Widths × depths, and how many of them learn at a time."""

    widths: tuple[float, ...] = (1.0, 0.75, 0.5, 0.25)
    """Shares of heads and neurons; the whole width is always among them."""
    depths: tuple[float, ...] = (1.0, 0.75, 0.5)
    """Shares of layers; the whole depth is always among them."""
    depth_rule: Literal["keep_last", "drop_last"] = "keep_last"
    """Which layers stay; "drop_last" is the rule of the released DynaBERT weights."""
    sample: int | None = Field(default=None, ge=0)
    """How many sub-networks learn in a step besides the largest and the smallest (the sandwich rule); None for all."""
    per_layer: bool = False
    """Whether those that are drawn have a width of their own in every layer, heads and neurons apart: for a search over
    such networks, which are no use unless they were trained."""

    @model_validator(mode="after")
    def _check(self) -> "Grid":
        for name in ("widths", "depths"):
            shares = getattr(self, name)
            if 1.0 not in shares or len(set(shares)) < len(shares) or not all(0 < share <= 1 for share in shares):
                raise ValueError(f"{name} is {list(shares)}; allowed: different shares above 0 up to 1, 1 among them")
        if self.per_layer and not self.sample:
            raise ValueError(f"per_layer is true and sample is {self.sample}; allowed: a sample of 1 or more")
        return self

    @property
    def subnets(self) -> tuple[Subnet, ...]:
        """All of the grid, the smallest first and the largest last."""
        return tuple(
            Subnet(width=width, depth=depth, depth_rule=self.depth_rule)
            for depth in sorted(self.depths)
            for width in sorted(self.widths)
        )

    @property
    def is_whole(self) -> bool:
        """Whether all of the grid learns at every step."""
        count = len(self.subnets)
        return count == 1 or (not self.per_layer and (self.sample is None or self.sample >= count - 2))

    def drawn(self, units: Sequence[LayerCut], *seed: int) -> tuple[Subnet, ...]:
        """Those of one step, for an encoder of such layers; a function of the seed. The largest is the last."""
        if self.is_whole:
            return self.subnets
        smallest, *between, largest = self.subnets
        draw, sample = generator(*seed), self.sample or 0
        if self.per_layer:
            chosen = [self._uneven(units, draw) for _ in range(sample)]
        else:
            chosen = [between[position] for position in sorted(draw.permutation(len(between))[:sample])]
        return (smallest, *chosen, largest)

    def _uneven(self, units: Sequence[LayerCut], draw: np.random.Generator) -> Subnet:
        """A sub-network with widths drawn for each layer."""
        depth = float(draw.choice(self.depths))
        kept = Subnet(depth=depth, depth_rule=self.depth_rule).kept_layers(len(units))
        cuts = []
        for index in kept:
            heads, neurons = (
                Subnet(width=float(draw.choice(self.widths))).cuts([units[index]])[0][1] for _ in range(2)
            )
            cuts.append((heads.heads, neurons.neurons))
        return Subnet(
            depth=depth,
            depth_rule=self.depth_rule,
            heads=tuple(heads for heads, _ in cuts),
            neurons=tuple(count for _, count in cuts),
        )


WHOLE = Subnet()
TEACHER_WIDTH = "teacher_width"  # the head of a student whose states are not as wide as its teacher's


@dataclass(frozen=True)
class Lesson:
    """A batch, the sub-network that is to learn from it, and what the teacher said of it."""

    batch: TaskBatch
    subnets: tuple[Subnet, ...]
    """All that learn from this batch; one of them once the lesson is a part."""
    teacher: EncoderOutput | None = None


@dataclass(frozen=True)
class Distillation(Objective[TaskBatch, Lesson]):
    """The sum over sub-networks of losses between each and the teacher (Hou et al. 2020, eqs. 4 to 8).

    Each sub-network is a part of the step: its pass is sent backward before the next one begins, the whole network
    last, so that memory holds one of them and every weight is used when processes exchange gradients.
    """

    task: Supervised
    terms_by_name: Mapping[str, DistillationTerm]
    teacher: Model | None = None
    grid: Grid | None = None
    """The sub-networks that learn; None for the whole student alone."""
    units: tuple[LayerCut, ...] = ()
    """The heads and neurons of every layer of the student, of which sub-networks are drawn."""
    teacher_width: Literal["same", "full"] = "full"
    """Whether an even sub-network learns from the teacher cut to its own width, at full depth."""
    layer_map: LayerMap = "uniform"
    """Which of the teacher's layers each of a whole student's is to be like; a sub-network has those it was cut of."""

    @property
    def terms(self) -> dict[str, Term]:  # type: ignore[override]
        return {name: Term(term.metrics, term.weight) for name, term in self.terms_by_name.items()}

    def to(self, device: torch.device | str) -> "Distillation":
        if self.teacher is None:
            return self
        return replace(self, teacher=self.teacher.to(device).eval().requires_grad_(False))

    def prepare(self, batch: TaskBatch, seed: int) -> Lesson:
        if self.grid is None or self.grid.is_whole:
            return Lesson(batch, (WHOLE,) if self.grid is None else self.grid.subnets)
        return Lesson(batch, self.grid.drawn(self.units, seed, int(batch.item[0])))

    def counts(self, prepared: Lesson) -> dict[str, Tensor]:
        return {name: term.count(self.task, prepared.batch) for name, term in self.terms_by_name.items()}

    def parts(self, prepared: Lesson) -> Sequence[Lesson]:
        said: dict[float, EncoderOutput | None] = {}
        parts = []
        for subnet in prepared.subnets:
            width = subnet.width if self.teacher_width == "same" and subnet.is_even else 1.0
            if width not in said:
                said[width] = self._teacher_output(prepared.batch, Subnet(width=width))
            parts.append(Lesson(prepared.batch, (subnet,), said[width]))
        return parts

    def __call__(self, model: Model, prepared: Lesson) -> dict[str, Sums]:
        batch, (subnet,) = prepared.batch, prepared.subnets
        student = self.run(model, batch, subnet)
        widen = model.heads[TEACHER_WIDTH] if TEACHER_WIDTH in model.heads else None  # noqa: SIM401 (no get)
        pair = Pair(
            self.task, batch, student, prepared.teacher, *self._like(len(model.config.encoder.layers), subnet), widen
        )
        return self.sums(pair)

    def sums(self, pair: Pair) -> dict[str, Sums]:
        """The sums of each term for a pair."""
        sums = {name: term.sums(pair) for name, term in self.terms_by_name.items()}
        if not any(term.reads_outputs for term in self.terms_by_name.values()):
            # processes exchange the gradients of every weight: what no term asks for gets that of nothing
            first, found = next(iter(sums.items()))
            sums[first] = found._replace(loss=found.loss + 0.0 * pair.student.outputs.sum())
        return sums

    def run(self, model: Model, batch: TaskBatch, subnet: Subnet) -> EncoderOutput:
        """Run a model on a batch and return the outputs of its head and all hidden states."""
        types = batch.types if model.config.encoder.embedding.types > 1 else None
        inputs = EncoderInputs(batch.tokens, batch.layout, types, subnet=None if subnet == WHOLE else subnet)
        return model.run(inputs, Want(task=True, all_hidden_states=True))

    def finished(self, model: Model) -> Model:
        if TEACHER_WIDTH not in model.heads:
            return model
        del model.heads[TEACHER_WIDTH]
        kept = tuple(head for head in model.config.heads if head.kind != TEACHER_WIDTH)
        model.config = model.config.changed(heads=kept)
        return model

    def for_evaluation(self) -> Supervised:  # type: ignore[override]
        return self.task.for_evaluation()

    def portions(self, model: Model) -> list[Portion]:
        return self.task.portions(model)

    @torch.no_grad()
    def _teacher_output(self, batch: TaskBatch, subnet: Subnet) -> EncoderOutput | None:
        """What the teacher says of a batch; None where nothing is asked of it."""
        return None if self.teacher is None else self.run(self.teacher, batch, subnet)

    def _like(self, layers: int, subnet: Subnet) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The counterparts of a student's states, and those of its layers."""
        if self.grid is not None or self.teacher is None:
            return subnet.counterparts(layers), subnet.kept_layers(layers)
        states = counterparts(self.layer_map, layers, len(self.teacher.config.encoder.layers))
        return states, tuple(number - 1 for number in states[1:])


def named(terms: Sequence[DistillationTerm]) -> dict[str, DistillationTerm]:
    """Terms by the names that the log has for them: their kinds, numbered where one comes again."""
    names: dict[str, DistillationTerm] = {}
    for term in terms:
        number = sum(other.kind == term.kind for other in names.values())
        names[f"{term.kind}_{number + 1}" if number else term.kind] = term
    return names

"""What the encoders go through: states of corresponding layers."""

from typing import ClassVar, Literal

from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from bertsmith.batches.examples import TaskBatch
from bertsmith.errors import InputError
from bertsmith.objectives.base import Sums
from bertsmith.objectives.distillation.base import DistillationTerm, Pair, added, real_sequences
from bertsmith.objectives.supervised import Supervised


class StateTerm(DistillationTerm):
    """Squared errors of the embedding's and of every layer's states, each a mean over the width, added up over layers.

    Real tokens count, pads do not: a sequence teaches the same however it lies in memory.
    """

    kind: Literal["states"] = "states"
    layers: tuple[int, ...] | None = None
    """Which states of the student, 0 being the embedding's and i those that leave layer i; None for all."""
    compares_states: ClassVar[bool] = True

    def sums(self, pair: Pair) -> Sums:
        losses = []
        for number in range(len(pair.student.encoded.trail)) if self.layers is None else self.layers:
            own, like = pair.real_states(number)
            losses.append((own - like).square().mean(-1).sum())
        return Sums(added(losses), {})


class CosineTerm(DistillationTerm):
    """One minus the cosine of states of real tokens, added up over layers (Sanh et al. 2019)."""

    kind: Literal["cosine"] = "cosine"
    layers: tuple[int, ...] | None = None
    """Which states of the student, counted as in "states"; None for the last."""
    compares_states: ClassVar[bool] = True

    def sums(self, pair: Pair) -> Sums:
        last = len(pair.student.encoded.trail) - 1
        losses = []
        for number in (last,) if self.layers is None else self.layers:
            own, like = pair.real_states(number)
            losses.append((1 - cosine_similarity(own, like, dim=-1)).sum())
        return Sums(added(losses), {})


class PatienceTerm(DistillationTerm):
    """Squared distances between first tokens' states of length 1, over layers (Sun et al. 2019, BERT-PKD, eq. 7)."""

    kind: Literal["patience"] = "patience"
    layers: tuple[int, ...] | None = None
    """Which states of the student, counted as in "states"; None for all layers but the last, which the outputs
    cover."""
    reduction: Literal["sum", "mean"] = "sum"
    """Over width and layers: the sum of the paper's formula, or the mean of the released code, with which the weights
    of the paper's grid were used."""
    compares_states: ClassVar[bool] = True

    def sums(self, pair: Pair) -> Sums:
        numbers = range(1, len(pair.student.encoded.trail) - 1) if self.layers is None else self.layers
        if not numbers:
            raise InputError("a patience term finds no layer below the student's last one; allowed: 2 layers or more")
        losses = []
        for number in numbers:
            own, like = (normalize(states, dim=-1) for states in pair.first_states(number))
            apart = (own - like).square()
            losses.append(apart.sum() if self.reduction == "sum" else apart.mean(-1).sum() / len(numbers))
        return Sums(added(losses), {})

    def count(self, task: Supervised, batch: TaskBatch) -> Tensor:
        return real_sequences(batch).sum()

"""What the encoders go through: states of corresponding layers."""

from typing import Literal

from bertsmith.objectives.base import Sums
from bertsmith.objectives.class_sums import wide
from bertsmith.objectives.distillation.base import DistillationTerm, Pair, real_states


class StateTerm(DistillationTerm):
    """Squared errors of the embedding's and of every layer's states, each a mean over the width, added up over layers.

    Real tokens count, pads do not: a sequence teaches the same however it lies in memory.
    """

    kind: Literal["states"] = "states"

    def sums(self, pair: Pair) -> Sums:
        assert pair.teacher is not None
        mine, theirs = pair.student.encoded.trail, pair.teacher.encoded.trail
        errors = [
            (wide(real_states(own, pair.batch)) - wide(real_states(theirs[like].detach(), pair.batch))).square()
            for own, like in zip(mine, pair.counterparts, strict=True)
        ]
        return Sums(sum((error.mean(-1).sum() for error in errors[1:]), start=errors[0].mean(-1).sum()), {})

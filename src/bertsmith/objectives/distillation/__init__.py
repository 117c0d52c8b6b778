"""Learn from another model: what a student says and goes through, against a teacher. The table of terms."""

from typing import Annotated

from bertsmith.objectives.distillation.base import DistillationTerm
from bertsmith.objectives.distillation.outputs import LabelTerm, OutputTerm
from bertsmith.objectives.distillation.states import StateTerm
from bertsmith.settings import ByKind

TERMS: dict[str, type[DistillationTerm]] = {"outputs": OutputTerm, "labels": LabelTerm, "states": StateTerm}

AnyTerm = Annotated[DistillationTerm, ByKind(TERMS)]

"""Knowledge distillation: loss terms between the outputs and hidden states of a student and its teacher."""

from typing import Annotated

from bertsmith.objectives.distillation.base import DistillationTerm
from bertsmith.objectives.distillation.terms import (
    AttentionTerm,
    CosineTerm,
    HiddenStateTerm,
    LabelTerm,
    OutputTerm,
    PatienceTerm,
    RelationTerm,
)
from bertsmith.settings import ByKind

TERMS: dict[str, type[DistillationTerm]] = {
    "outputs": OutputTerm,
    "labels": LabelTerm,
    "hidden_states": HiddenStateTerm,
    "cosine": CosineTerm,
    "patience": PatienceTerm,
    "attention": AttentionTerm,
    "relations": RelationTerm,
}

AnyTerm = Annotated[DistillationTerm, ByKind(TERMS)]

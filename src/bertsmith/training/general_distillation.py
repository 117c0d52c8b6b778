"""A teacher for a pre-training: what is learned from it, and the student and the objective for it."""

from typing import Any

from pydantic import Field

from bertsmith.checkpoint.source import ModelSource
from bertsmith.errors import InputError
from bertsmith.models.config import ModelConfig
from bertsmith.models.model import Model
from bertsmith.objectives.base import Objective
from bertsmith.objectives.distillation import AnyTerm
from bertsmith.objectives.distillation.masked import MaskedDistillation
from bertsmith.objectives.distillation.terms import CosineTerm, LabelTerm, OutputTerm
from bertsmith.objectives.masked_lm import MaskedLM
from bertsmith.training import sharding
from bertsmith.training.distilling import DistillationConfig, check_tokenizer, fitted_student, read_teacher


class GeneralDistillationConfig(DistillationConfig):
    """What a pre-training learns from a teacher, over the same masks."""

    teacher: str
    """The folder of a pre-trained model with the corpus's tokenizer."""
    terms: tuple[AnyTerm, ...] = Field(
        default=(OutputTerm(weight=5.0, temperature=2.0), LabelTerm(weight=2.0), CosineTerm()),
        min_length=1,
    )
    """The losses, each with its weight; "labels" are the masked tokens themselves. The defaults are DistilBERT's."""

    @property
    def teacher_config(self) -> ModelConfig:
        """The teacher's network, without its weights being read."""
        return ModelSource(folder=self.teacher).described_config()


def taught(
    config: GeneralDistillationConfig,
    student: Model,
    objective: Objective[Any, Any],
    *,
    seed: int,
) -> tuple[Model, MaskedDistillation]:
    """The student, ready to be compared, and the objective with its teacher."""
    if sharding.is_asked_for():
        raise InputError(
            "distillation is given and accelerate's config asks for sharded weights (FSDP); allowed with it: whole "
            "copies (DDP), such as configs/accelerate/one-machine-ddp.yaml"
        )
    if not isinstance(objective, MaskedLM) or objective.ponder_weight is not None:
        raise InputError(
            "distillation is given and the encoder halts; allowed with it: encoder.universal without halting"
        )
    teacher = read_teacher(config.teacher)
    check_tokenizer(student.require_tokenizer(), teacher, config.teacher)
    if any(term.kind == "outputs" for term in config.terms):
        teacher.head("masked_tokens")  # a sentence if it has none
    fitted = fitted_student(student, teacher.config, config.terms, config.layers, seed=seed)
    return fitted, MaskedDistillation.of(objective, config.terms, teacher, config.layers)

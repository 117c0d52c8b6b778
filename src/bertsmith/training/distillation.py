"""Distillation from a teacher: settings, checks that it fits the student, and its evaluation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from bertsmith.bundled import model_folder
from bertsmith.checkpoint.source import ModelSource, check_encoder
from bertsmith.checkpoint.store import load
from bertsmith.errors import InputError
from bertsmith.models.attach_heads import fit_heads
from bertsmith.models.config import ModelConfig
from bertsmith.models.cost import training_flops
from bertsmith.models.heads import HeadConfig, TaskHeadConfig, TeacherWidthConfig
from bertsmith.models.model import Model
from bertsmith.objectives.base import Objective
from bertsmith.objectives.distillation import AnyTerm
from bertsmith.objectives.distillation.base import DistillationTerm, LayerMap, counterparts
from bertsmith.objectives.distillation.masked import MaskedDistillation
from bertsmith.objectives.distillation.terms import CosineTerm, LabelTerm, OutputTerm
from bertsmith.objectives.masked_lm import MaskedLM
from bertsmith.settings import Record
from bertsmith.tasks.base import Evaluation, Task
from bertsmith.tasks.degenerate import mismatch_reason
from bertsmith.tasks.predictor import TASK_FILE, read_task_record
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.training import sharding
from bertsmith.training.evaluator import Evaluator


class DistillationConfig(Record):
    """Distillation of a fine-tuned teacher into the model."""

    teacher: str
    """The folder of a model that was fine-tuned for the same task, with the same labels in the same order."""
    terms: tuple[AnyTerm, ...] = Field(
        default=(OutputTerm(weight=0.5), LabelTerm(weight=0.5)),
        min_length=1,
    )
    """Loss terms with their weights; "labels" is the loss of the task."""
    layers: LayerMap = "uniform"
    """Teacher layer that each student layer learns from: "uniform", "skip", "last", or one number, counted from 1, per
    student layer."""


def read_teacher(folder: str) -> Model:
    """Load the teacher, frozen and in evaluation mode."""
    teacher = load(folder).float().eval().requires_grad_(False)
    check_encoder(teacher.config, folder)
    teacher.require_tokenizer()
    return teacher


def check_task(config: DistillationConfig, task: Task[Any], student: Model, teacher: Model) -> None:
    """Raise InputError if the teacher was not fine-tuned for the student's task with the same labels."""
    folder, head = model_folder(config.teacher), _task_head(student)
    own = _task_head(teacher)
    if own is None or head is None:
        raise InputError(
            f"distillation.teacher {config.teacher!r} was not fine-tuned for a task; run bertsmith finetune first"
        )
    kind = read_task_record(folder).task.kind if (folder / TASK_FILE).is_file() else task.kind
    if kind != task.kind or own.kind != head.kind:
        raise InputError(
            f"distillation.teacher {config.teacher!r} was fine-tuned for a task of kind {kind!r} (head {own.kind}); "
            f"this one is of kind {task.kind!r} (head {head.kind})"
        )
    theirs, mine = (getattr(one, "labels", ()) for one in (own, head))
    if theirs != mine:
        raise InputError(
            f"distillation.teacher {config.teacher!r} has the labels {list(theirs)} and the task {list(mine)}; "
            "allowed: the same in the same order (set task.labels)"
        )
    _check_scale(folder, task)


def _task_head(model: Model) -> HeadConfig | None:
    return next((head for head in model.config.heads if isinstance(head, TaskHeadConfig)), None)


def _check_scale(folder: Path, task: Task[Any]) -> None:
    """Raise InputError if teacher and student scale the numbers of a regression differently."""
    if task.kind != "regression" or not (folder / TASK_FILE).is_file():
        return
    theirs = read_task_record(folder).task
    names = ("scale", "lowest", "highest") if getattr(task, "scale", False) else ("scale",)
    for name in names:
        own, other = getattr(task, name), getattr(theirs, name)
        if own != other:
            raise InputError(
                f"task.{name} is {own} and distillation.teacher has {other}; allowed: the same value, so that numbers "
                "are on one scale"
            )


def check_tokenizer(own: Tokenizer, teacher: Model, folder: str) -> None:
    """Raise InputError if student and teacher have different tokenizers."""
    if own.hash != teacher.require_tokenizer().hash:
        raise InputError(
            f"the student's tokenizer differs from the teacher's ({folder!r}); allowed: a student made with the same "
            "tokenizer.json, or a preset, which takes the teacher's"
        )


def fit_student(
    student: Model, teacher: ModelConfig, terms: Sequence[DistillationTerm], layers: LayerMap, *, seed: int
) -> Model:
    """Add a head that projects the student's hidden states to the teacher's width, if a term compares them.

    The head belongs to the student, so that the optimiser, checkpoints and other processes include it; the objective
    removes it from the finished model.
    """
    # raises if the layer map does not fit
    counterparts(layers, len(student.config.encoder.layers), len(teacher.encoder.layers))
    head = width_head(student.config, teacher, terms)
    if head is None:
        return student
    fitted, _ = fit_heads(student, student.config.changed(heads=(*student.config.heads, head)), "student", seed=seed)
    return fitted


def width_head(
    student: ModelConfig, teacher: ModelConfig, terms: Sequence[DistillationTerm]
) -> TeacherWidthConfig | None:
    """Return the projection head that terms on hidden states need; None if the widths are equal or no term does."""
    is_compared = any(term.compares_states for term in terms)
    has_one = any(isinstance(head, TeacherWidthConfig) for head in student.heads)  # from a checkpoint
    if has_one or not is_compared or student.encoder.width == teacher.encoder.width:
        return None
    return TeacherWidthConfig(teacher=teacher.encoder.width)


def evaluate_teacher(teacher: Model, evaluator: Evaluator, folder: str) -> Evaluation:
    """Evaluate the teacher on dev; raise InputError if its answers cannot be for this task."""
    evaluation = evaluator.evaluate(teacher)
    reason = mismatch_reason(evaluator.task, evaluator.examples, evaluator.answers, evaluation)
    if reason is not None:
        raise InputError(f"distillation.teacher {folder!r} {reason}; allowed: a model fine-tuned for this task")
    return evaluation


def teaching_cost(student: ModelConfig, teacher: ModelConfig, length: int) -> float:
    """Return the cost of a step relative to one without a teacher, which runs forward only."""
    return 1 + training_flops(teacher, length, 0.0) / 3 / training_flops(student, length, 0.0)


class GeneralDistillationConfig(DistillationConfig):
    """Distillation of a pre-trained teacher, which reads the same masked tokens."""

    teacher: str
    """The folder of a pre-trained model with the corpus's tokenizer."""
    terms: tuple[AnyTerm, ...] = Field(
        default=(OutputTerm(weight=5.0, temperature=2.0), LabelTerm(weight=2.0), CosineTerm()),
        min_length=1,
    )
    """Loss terms with their weights; "labels" is the masked-token loss. The defaults are DistilBERT's."""

    @property
    def teacher_config(self) -> ModelConfig:
        """Config of the teacher; its weights are not read."""
        return ModelSource(folder=self.teacher).described_config()


def make_student(
    config: GeneralDistillationConfig,
    student: Model,
    objective: Objective[Any, Any],
    *,
    seed: int,
) -> tuple[Model, MaskedDistillation]:
    """Return the student with the heads it needs, and the objective with its teacher."""
    if sharding.is_requested():
        raise InputError(
            "distillation is given and accelerate's config requests sharded weights (FSDP); allowed with it: whole "
            "copies (DDP), such as configs/accelerate/one-machine-ddp.yaml"
        )
    if not isinstance(objective, MaskedLM) or objective.ponder_weight is not None:
        raise InputError(
            "distillation is given and the encoder halts; allowed with it: encoder.universal without halting"
        )
    if objective.jacobian_weight is not None:
        raise InputError("distillation is given and the encoder is an equilibrium; allowed with it: other encoders")
    teacher = read_teacher(config.teacher)
    check_tokenizer(student.require_tokenizer(), teacher, config.teacher)
    if any(term.kind == "outputs" for term in config.terms):
        teacher.head("masked_tokens")  # raises if it has none
    fitted = fit_student(student, teacher.config, config.terms, config.layers, seed=seed)
    return fitted, MaskedDistillation.of(objective, config.terms, teacher, config.layers)

"""A teacher for a fine-tuning: what is learned from it, whether it fits the student, and how good it is itself."""

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
    """What a fine-tuning learns from a teacher."""

    teacher: str
    """The folder of a model that was fine-tuned for the same task, with the same labels in the same order."""
    terms: tuple[AnyTerm, ...] = Field(
        default=(OutputTerm(weight=0.5), LabelTerm(weight=0.5)),
        min_length=1,
    )
    """The losses, each with its weight; the labels of the data are one of them, "labels"."""
    layers: LayerMap = "uniform"
    """Which of the teacher's layers each of the student's is to be like: "uniform", "skip", "last", or a number from 1
    for every layer of the student."""


def read_teacher(folder: str) -> Model:
    """The teacher in its folder, as it will stay."""
    teacher = load(folder).float().eval().requires_grad_(False)
    check_encoder(teacher.config, folder)
    teacher.require_tokenizer()
    return teacher


def check_task(config: DistillationConfig, task: Task[Any], student: Model, teacher: Model) -> None:
    """Raises a sentence if the teacher was not fine-tuned for the student's task with its labels."""
    folder, head = model_folder(config.teacher), _task_head(student)
    own = _task_head(teacher)
    if own is None or head is None:
        raise InputError(
            f"distillation.teacher {config.teacher!r} was not fine-tuned for a task; bertsmith finetune does that"
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
            "allowed: the same in the same order (task.labels gives them an order)"
        )
    _check_scale(folder, task)


def _task_head(model: Model) -> HeadConfig | None:
    return next((head for head in model.config.heads if isinstance(head, TaskHeadConfig)), None)


def _check_scale(folder: Path, task: Task[Any]) -> None:
    """Numbers are learned from the teacher as they are, so both must be on one scale."""
    if task.kind != "regression" or not (folder / TASK_FILE).is_file():
        return
    theirs = read_task_record(folder).task
    names = ("scale", "lowest", "highest") if getattr(task, "scale", False) else ("scale",)
    for name in names:
        own, other = getattr(task, name), getattr(theirs, name)
        if own != other:
            raise InputError(
                f"task.{name} is {own} and that of distillation.teacher {other}; allowed: the same, so that numbers "
                "are on one scale"
            )


def check_tokenizer(own: Tokenizer, teacher: Model, folder: str) -> None:
    """Raises a sentence if a student does not read what its teacher reads."""
    if own.hash != teacher.require_tokenizer().hash:
        raise InputError(
            f"the student's tokenizer is not that of the teacher {folder!r}; allowed: a student made with the same "
            "tokenizer.json, or a preset, which takes the teacher's"
        )


def fitted_student(
    student: Model, teacher: ModelConfig, terms: Sequence[DistillationTerm], layers: LayerMap, *, seed: int
) -> Model:
    """The student, with a head that makes its states as wide as the teacher's where a term compares them.

    The head is one of the student's, so that optimiser, checkpoints and processes know of it; the objective takes it
    away from the finished model.
    """
    # a sentence if they do not fit
    counterparts(layers, len(student.config.encoder.layers), len(teacher.encoder.layers))
    head = width_head(student.config, teacher, terms)
    if head is None:
        return student
    fitted, _ = fit_heads(student, student.config.changed(heads=(*student.config.heads, head)), "student", seed=seed)
    return fitted


def width_head(
    student: ModelConfig, teacher: ModelConfig, terms: Sequence[DistillationTerm]
) -> TeacherWidthConfig | None:
    """The head that a student needs for terms that compare states; None where it needs none."""
    is_compared = any(term.compares_states for term in terms)
    has_one = any(isinstance(head, TeacherWidthConfig) for head in student.heads)  # that of a checkpoint
    if has_one or not is_compared or student.encoder.width == teacher.encoder.width:
        return None
    return TeacherWidthConfig(teacher=teacher.encoder.width)


def evaluate_teacher(teacher: Model, evaluator: Evaluator, folder: str) -> Evaluation:
    """How good the teacher is on dev; a sentence if it cannot have been trained for this task."""
    evaluation = evaluator.evaluate(teacher)
    trouble = mismatch_reason(evaluator.task, evaluator.examples, evaluator.answers, evaluation)
    if trouble is not None:
        raise InputError(f"distillation.teacher {folder!r} {trouble}; allowed: a model fine-tuned for this task")
    return evaluation


def teaching_cost(student: ModelConfig, teacher: ModelConfig, length: int) -> float:
    """The cost of a step with a teacher in plain ones: it is asked, and learns nothing."""
    return 1 + training_flops(teacher, length, 0.0) / 3 / training_flops(student, length, 0.0)


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


def make_student(
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

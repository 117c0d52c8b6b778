"""Small students and teachers in float64, and the loss of one distillation term between them."""

import torch
from small_tasks import gradients, make_batch
from torch import Tensor

from bertsmith.models.attach_heads import fit_heads, with_task_head
from bertsmith.models.build import build
from bertsmith.models.heads import HeadConfig, TeacherWidthConfig
from bertsmith.models.heads.task import ClassifierConfig
from bertsmith.models.model import Model
from bertsmith.models.published import overridable, preset
from bertsmith.objectives.distillation.base import DistillationTerm
from bertsmith.objectives.distillation.objective import Distillation, name_terms
from bertsmith.objectives.supervised import Classes, Supervised

LABELS = ("a", "b", "c")


def model_of(
    name: str = "bert-tiny",
    *,
    seed: int,
    width: int = 16,
    layers: int = 2,
    heads: int = 2,
    head: HeadConfig | None = None,
) -> Model:
    """Return a model in float64 with weights large enough for every module to matter."""
    sizes = {"width": width, "layers": layers, "heads": heads, "max_length": 16, "dropout": 0.0, "init_std": 0.3}
    sizes |= {"vocabulary": 20, "embedding_width": 8, "features": 8, "span": 4, "max_distance": 8, "neurons": 32}
    config = preset(name, **{key: value for key, value in sizes.items() if key in overridable(name)})
    head = head or ClassifierConfig(labels=LABELS, dropout=0.0)
    model = with_task_head(build(config, seed=seed), head.changed(dropout=0.0), seed=seed).double()
    draws = torch.Generator().manual_seed(seed + 50)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draws).double() * 0.2)
    return model.train()


def with_width(student: Model, teacher: Model) -> Model:
    """Return the student with a projection to the teacher's width."""
    head = TeacherWidthConfig(teacher=teacher.config.encoder.width)
    fitted, _ = fit_heads(student, student.config.changed(heads=(*student.config.heads, head)), "student", seed=3)
    return fitted.double()


def mean_of(
    term: DistillationTerm, student: Model, teacher: Model, layout: str, task: Supervised | None = None
) -> Tensor:
    """Return the mean loss of one term, as the trainer computes it."""
    objective = Distillation(task or Classes(), name_terms([term]), teacher=teacher)
    (part,) = objective.parts(objective.prepare(make_batch(layout), 0))
    name = term.kind
    return objective(student, part)[name].loss / objective.counts(part)[name]


def assert_same(model: Model, loss: Tensor, expected: Tensor) -> None:
    """Assert that two losses and their gradients are equal; a missing gradient counts as 0."""
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-9)
    found, reference = gradients(model, loss), gradients(model, expected)
    assert any(gradient.abs().max() > 0 for gradient in reference.values())
    for name, parameter in model.named_parameters():
        nothing = torch.zeros_like(parameter)
        own, other = found.get(name, nothing), reference.get(name, nothing)
        torch.testing.assert_close(own, other, rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")

"""Learn a task so that a small change of the input's vectors does not change what is said: SiFT, and VAT.

Three passes. The clean one gives the task's loss and its scores z. In the second, noise δ is added to the vectors that
entered, and one step of gradient ascent makes δ worse. The third, with that δ, gives z₂, and the loss is how far
z and z₂ are apart (He et al. 2021, section 4; docs/how-to/adversarial.md).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import layer_norm

from bertsmith.data.examples import TaskBatch
from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.models.model import Model
from bertsmith.objectives.base import Objective, Portion, Sums, Term, soft_cross_entropy, squared_error
from bertsmith.objectives.supervised import Supervised
from bertsmith.settings import Record

_EPSILON = 1e-7  # of the norm that stands before the noise


class AdversarialConfig(Record):
    """Whether the model also learns to say the same of vectors that were moved a little."""

    kind: Literal["none", "sift", "vat"] = "none"
    """Not at all; on normalised vectors, so that the change is as large for every word and model (SiFT); or on the
    vectors as they are (virtual adversarial training)."""
    weight: float = Field(default=5.0, gt=0)
    """How much it counts beside the task."""
    noise_std: float = Field(default=1e-2, gt=0)
    """Of the noise, which is cut off at twice as much."""
    rate: float = Field(default=1e-4, gt=0)
    """The length of the step that makes the noise worse: so much is added at most to any number of a vector."""
    divergence: Literal["symmetric_kl", "kl", "mse"] = "symmetric_kl"
    """What that step makes larger. By the gradient, "symmetric_kl" and "kl" are the same, as in the official code."""

    @property
    def cost(self) -> float:
        """A training step in steps without it: three passes forward, two back, one back to the vectors alone."""
        return 1.0 if self.kind == "none" else 8 / 3

    def applied(self, task: Supervised) -> "Supervised | Adversarial":
        """A task's objective, learned in this way."""
        return task if self.kind == "none" else Adversarial(task, self)


@dataclass(frozen=True)
class Adversarial(Objective[TaskBatch, TaskBatch]):
    """The loss of a task, and how much small changes of the vectors change what the head says."""

    task: Supervised
    config: AdversarialConfig

    def __post_init__(self) -> None:
        if self.task.frozen == "all":
            kind = self.config.kind
            raise InputError(f"adversarial.kind is {kind!r} and the encoder is frozen, so that it cannot learn from it")

    @property
    def terms(self) -> dict[str, Term]:  # type: ignore[override]
        return {**self.task.terms, "adversarial": Term(weight=self.config.weight)}

    def to(self, device: torch.device | str) -> "Adversarial":
        return Adversarial(self.task.to(device), self.config)

    def prepare(self, batch: TaskBatch, seed: int) -> TaskBatch:
        return self.task.prepare(batch, seed)

    def counts(self, prepared: TaskBatch) -> dict[str, Tensor]:
        return {**self.task.counts(prepared), "adversarial": self.task.comparable_count(prepared)}

    def __call__(self, model: Model, prepared: TaskBatch) -> dict[str, Sums]:
        entered: list[Tensor] = []

        def enter(vectors: Tensor) -> Tensor:
            is_normalised = self.config.kind == "sift"
            entered.append(layer_norm(vectors, vectors.shape[-1:], eps=_EPSILON) if is_normalised else vectors)
            return entered[0]

        outputs = self.task.outputs(model, prepared, enter)
        clean, vectors = self.task.comparable_logits(outputs, prepared), entered[0].detach()

        def perturbed(noise: Tensor) -> Tensor:
            moved = (vectors + noise).to(vectors.dtype)
            return self.task.comparable_logits(self.task.outputs(model, prepared, lambda _: moved), prepared)

        noise = self._worst(vectors, prepared.layout, perturbed, clean.detach())
        loss = symmetric_kl(perturbed(noise), clean).sum()
        return {"task": self.task.sums(outputs, prepared), "adversarial": Sums(loss, {})}

    def for_evaluation(self) -> Supervised:
        return self.task.for_evaluation()

    def portions(self, model: Model) -> list[Portion]:
        return self.task.portions(model)

    def _worst(
        self, vectors: Tensor, layout: SequenceLayout, perturbed: Callable[[Tensor], Tensor], clean: Tensor
    ) -> Tensor:
        """Noise for the vectors after one step that made it worse."""
        noise = draw_noise(vectors, layout, self.config.noise_std)
        with torch.enable_grad():
            noise.requires_grad_()
            distance = DIVERGENCES[self.config.divergence](perturbed(noise), clean).sum()
        with torch.autocast(vectors.device.type, enabled=False):  # a backward pass has the precisions of its forward
            # with respect to the noise alone: PyTorch goes no other way back, so that no weight gets a gradient, no
            # time is spent on one, and no hook of those who wrap the model runs
            (gradient,) = torch.autograd.grad(distance, noise)
        return ascended(noise.detach(), gradient, self.config.rate)


def draw_noise(vectors: Tensor, layout: SequenceLayout, noise_std: float) -> Tensor:
    """Normal noise in at least float32, cut off at two deviations.

    On a CPU nothing is drawn for pads, so that packed and padded runs stay the same run, as in layers/elementwise.py.
    Shape: vectors (batch, length, width) or (tokens, width); the result alike.
    """
    dtype, is_token = torch.promote_types(vectors.dtype, torch.float32), layout.is_token
    if is_token is None or vectors.is_cuda:
        noise = torch.randn(vectors.shape, dtype=dtype, device=vectors.device)
    else:
        noise = torch.zeros(vectors.shape, dtype=dtype, device=vectors.device)
        noise[is_token] = torch.randn(int(is_token.sum()), vectors.shape[-1], dtype=dtype, device=vectors.device)
    return (noise_std * noise).clamp(-2 * noise_std, 2 * noise_std)


def ascended(noise: Tensor, gradient: Tensor, rate: float) -> Tensor:
    """The noise after a step up the gradient, which in every vector is `rate` where the gradient is largest.

    Where the norm of the gradient is not finite, the noise stays what it was.
    """
    step = gradient / (1e-6 + gradient.abs().amax(-1, keepdim=True))
    return torch.where(gradient.norm().isfinite(), noise + rate * step, noise)


def symmetric_kl(scores: Tensor, other: Tensor) -> Tensor:
    """Return the symmetric cross-entropy of two predictions, each in turn the teacher of the other.

    That is the symmetric Kullback-Leibler divergence but for the entropies, which teach nothing. Of a single score, a
    number, cross-entropy is always 0 (the official code has that for regression): the squared error stands for it.
    Shape: both (items, …, outcomes); the result (items,), the mean over the axes between.
    """
    return soft_cross_entropy(scores, other) + soft_cross_entropy(other, scores)


DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "symmetric_kl": symmetric_kl,
    "kl": soft_cross_entropy,
    "mse": squared_error,
}

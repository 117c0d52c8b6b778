"""Adversarial fine-tuning: train a task so that small perturbations of the embeddings do not change the predictions.

A step has three forward passes. The clean one gives the task loss and the logits z. In the second, noise δ is added to
the embeddings and improved by one step of gradient ascent. The third, with that δ, gives logits z₂; the loss is the
divergence of z and z₂ (SiFT, VAT; He et al. 2021, section 4; docs/how-to/adversarial.md).
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

_NORM_EPSILON = 1e-7


class AdversarialConfig(Record):
    """Adversarial regularisation of fine-tuning."""

    kind: Literal["none", "sift", "vat"] = "none"
    """No perturbation; of normalised embeddings, so that its relative size is the same for every word and model (SiFT);
    or of the raw embeddings (virtual adversarial training)."""
    weight: float = Field(default=5.0, gt=0)
    """Weight of the adversarial loss relative to the task loss."""
    noise_std: float = Field(default=1e-2, gt=0)
    """Standard deviation of the noise, truncated at two standard deviations."""
    rate: float = Field(default=1e-4, gt=0)
    """Step size of the gradient ascent: the largest change of any element of the noise."""
    divergence: Literal["symmetric_kl", "kl", "mse"] = "symmetric_kl"
    """Divergence that this step increases. "symmetric_kl" and "kl" have the same gradient, as in the official code."""

    @property
    def cost(self) -> float:
        """Cost of a training step relative to plain training: three forward passes and the extra backward passes."""
        return 1.0 if self.kind == "none" else 8 / 3

    def wrap(self, task: Supervised) -> "Supervised | Adversarial":
        """Return the task's objective with this regularisation."""
        return task if self.kind == "none" else Adversarial(task, self)


@dataclass(frozen=True)
class Adversarial(Objective[TaskBatch, TaskBatch]):
    """Task loss plus the divergence of the predictions under a perturbation of the embeddings."""

    task: Supervised
    config: AdversarialConfig

    def __post_init__(self) -> None:
        if self.task.frozen == "all":
            kind = self.config.kind
            raise InputError(f"adversarial.kind is {kind!r}, but the encoder is frozen; allowed: 'none'")

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
        embeddings: list[Tensor] = []

        def record(vectors: Tensor) -> Tensor:
            is_normalised = self.config.kind == "sift"
            embeddings.append(layer_norm(vectors, vectors.shape[-1:], eps=_NORM_EPSILON) if is_normalised else vectors)
            return embeddings[0]

        outputs = self.task.outputs(model, prepared, record)
        clean, vectors = self.task.comparable_logits(outputs, prepared), embeddings[0].detach()

        def perturbed(noise: Tensor) -> Tensor:
            noisy = (vectors + noise).to(vectors.dtype)
            return self.task.comparable_logits(self.task.outputs(model, prepared, lambda _: noisy), prepared)

        noise = self._adversarial_noise(vectors, prepared.layout, perturbed, clean.detach())
        loss = symmetric_kl(perturbed(noise), clean).sum()
        return {"task": self.task.sums(outputs, prepared), "adversarial": Sums(loss, {})}

    def for_evaluation(self) -> Supervised:
        return self.task.for_evaluation()

    def portions(self, model: Model) -> list[Portion]:
        return self.task.portions(model)

    def _adversarial_noise(
        self, vectors: Tensor, layout: SequenceLayout, perturbed: Callable[[Tensor], Tensor], clean: Tensor
    ) -> Tensor:
        """Return random noise after one step of gradient ascent."""
        noise = draw_noise(vectors, layout, self.config.noise_std)
        with torch.enable_grad():
            noise.requires_grad_()
            distance = DIVERGENCES[self.config.divergence](perturbed(noise), clean).sum()
        with torch.autocast(vectors.device.type, enabled=False):  # backward uses the precisions of its forward pass
            # only with respect to the noise: computes no weight gradients and runs no hooks of DDP or FSDP
            (gradient,) = torch.autograd.grad(distance, noise)
        return ascend(noise.detach(), gradient, self.config.rate)


def draw_noise(vectors: Tensor, layout: SequenceLayout, noise_std: float) -> Tensor:
    """Return truncated normal noise in at least float32.

    On a CPU nothing is drawn for padding, so that packed and padded runs are identical, as in layers/elementwise.py.
    Shape: vectors (batch, length, width) or (tokens, width); same for the result.
    """
    dtype, is_token = torch.promote_types(vectors.dtype, torch.float32), layout.is_token
    if is_token is None or vectors.is_cuda:
        noise = torch.randn(vectors.shape, dtype=dtype, device=vectors.device)
    else:
        noise = torch.zeros(vectors.shape, dtype=dtype, device=vectors.device)
        noise[is_token] = torch.randn(int(is_token.sum()), vectors.shape[-1], dtype=dtype, device=vectors.device)
    return (noise_std * noise).clamp(-2 * noise_std, 2 * noise_std)


def ascend(noise: Tensor, gradient: Tensor, rate: float) -> Tensor:
    """Return the noise after a step along the gradient, scaled per vector so that its largest element is `rate`.

    If the norm of the gradient is not finite, return the noise unchanged.
    """
    step = gradient / (1e-6 + gradient.abs().amax(-1, keepdim=True))
    return torch.where(gradient.norm().isfinite(), noise + rate * step, noise)


def symmetric_kl(scores: Tensor, other: Tensor) -> Tensor:
    """Return the symmetric cross-entropy of two predictions, each the teacher of the other.

    This is the symmetric Kullback-Leibler divergence without the entropies, which have no gradient. A single score
    (regression) uses the squared error, because its cross-entropy is always 0, as in the official code.
    Shape: both (items, …, outcomes); the result (items,), the mean over the axes in between.
    """
    return soft_cross_entropy(scores, other) + soft_cross_entropy(other, scores)


DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "symmetric_kl": symmetric_kl,
    "kl": soft_cross_entropy,
    "mse": squared_error,
}

"""The interface between objectives and the trainer, and losses that several objectives share."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bertsmith.answers.sequences import IGNORED
from bertsmith.data.batch import TrainingBatch
from bertsmith.models.config import ModelConfig
from bertsmith.models.model import Model
from bertsmith.ops.token_loss import TokenLoss
from bertsmith.settings import Record
from bertsmith.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Term:
    """One loss of an objective."""

    metrics: tuple[str, ...] = ()
    """Names of its metrics in the log."""
    weight: float = 1.0
    """Weight of its mean over its targets in the total loss."""


class Share(NamedTuple):
    """A metric as numerator and denominator, which are summed over micro-batches and processes before dividing."""

    part: Tensor
    whole: Tensor


class Sums(NamedTuple):
    """One loss over a micro-batch, unweighted and summed over its targets.

    A tuple, so that DDP and FSDP find the tensors in it.
    """

    loss: Tensor
    metrics: dict[str, Share]
    """Metrics by the names listed in the term."""


@dataclass(frozen=True)
class Group:
    """Parameters with one learning rate."""

    parameters: tuple[nn.Parameter, ...]
    rate: float = 1.0
    """Factor on the run's learning rate."""


@dataclass(frozen=True)
class Portion:
    """Parameters of one optimiser, whose gradients are clipped together."""

    groups: tuple[Group, ...]

    @classmethod
    def of(cls, parameters: Iterable[nn.Parameter], rate: float = 1.0) -> "Portion":
        """Return a portion with one learning rate."""
        return cls((Group(tuple(parameters), rate),))

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        return tuple(parameter for group in self.groups for parameter in group.parameters)


class ObjectiveConfig(Record, ABC):
    """Settings of a pre-training objective; `kind` is its name in the table of objectives."""

    kind: str

    @property
    @abstractmethod
    def heads(self) -> tuple[str, ...]:
        """Heads that this objective trains."""

    @property
    def passes(self) -> int:
        """Forward passes of the model per batch, to estimate operations."""
        return 1

    @property
    @abstractmethod
    def targets_per_token(self) -> float:
        """Fraction of tokens whose vocabulary scores are computed per pass, to estimate operations."""

    @property
    @abstractmethod
    def token_term(self) -> str:
        """The term that predicts tokens; its loss is compared with the unigram level of the corpus."""

    def network(self, config: ModelConfig) -> ModelConfig:
        """Return the model config that this objective trains; raise InputError if it does not support the model."""
        return config

    @abstractmethod
    def build(
        self, tokenizer: Tokenizer, ponder_weight: float | None = None, jacobian_weight: float | None = None
    ) -> "Objective[Any, Any]":
        """Return the objective; the weights are those of the same name in the `EncoderConfig`."""


Given = TypeVar("Given", bound=TrainingBatch)
Prepared = TypeVar("Prepared")


class Objective(ABC, Generic[Given, Prepared]):
    """Prepares a batch without the model, which determines the number of targets, then computes the losses.

    The split lets the trainer divide by the targets of the *whole* step, over all micro-batches and processes, before
    the first backward pass.
    """

    terms: dict[str, Term]
    """Losses by name."""
    keeps_shapes: ClassVar[bool] = True
    """Whether batches of one shape lead to tensors of the same shapes, so that a step can be recorded and replayed."""

    @abstractmethod
    def to(self, device: torch.device | str) -> "Objective[Given, Prepared]":
        """Return the objective with its tensors on a device."""

    @abstractmethod
    def prepare(self, batch: Given, seed: int) -> Prepared:
        """Return inputs and targets: a pure function of (batch, seed)."""

    @abstractmethod
    def counts(self, prepared: Prepared) -> dict[str, Tensor]:
        """Return the number of targets of each term."""

    @abstractmethod
    def __call__(self, model: Model, prepared: Prepared) -> dict[str, Sums]:
        """Return the sums of each term."""

    def parts(self, prepared: Prepared) -> Sequence[Prepared]:
        """Return parts of a micro-batch with separate forward and backward passes, whose gradients are summed.

        Each part has all targets. The last one must use every weight, because processes exchange gradients after it.
        """
        return (prepared,)

    @abstractmethod
    def for_evaluation(self) -> "Objective[Given, Prepared]":
        """Return the objective used for evaluation, which makes runs with different settings comparable."""

    def finish(self, model: Model) -> Model:
        """Return the model without modules that only training needs."""
        return model

    def portions(self, model: Model) -> list[Portion]:
        """Return the trainable parameters per optimiser; by default one optimiser has all of them."""
        return [Portion.of(parameter for parameter in model.parameters() if parameter.requires_grad)]


def wide(scores: Tensor) -> Tensor:
    """Return scores in at least float32: sums of exponentials lose too much precision in half precision."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def token_sums(loss: TokenLoss) -> Sums:
    """Return cross-entropy and accuracy over the vocabulary."""
    return Sums(loss.loss, {"accuracy": Share(loss.hits, loss.targets)})


def class_sums(scores: Tensor, targets: Tensor, weights: tuple[float, ...] = ()) -> Sums:
    """Return cross-entropy and accuracy over all targets that are not IGNORED; `weights` are class weights.

    Shape: scores (targets, classes), targets (targets,).
    """
    weight = wide(scores).new_tensor(weights) if weights else None
    loss = cross_entropy(wide(scores), targets, weight=weight, ignore_index=IGNORED, reduction="sum")
    hits = (scores.detach().argmax(-1) == targets).sum()
    return Sums(loss, {"accuracy": Share(hits, (targets != IGNORED).sum())})


_MIN_SCORE = -1e4  # its softmax is 0 in every precision, and its log-softmax is finite


def soft_cross_entropy(scores: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the cross-entropy with a teacher's softmax as target; the squared error if there is a single score.

    A temperature T divides both, and the loss is multiplied by T², which preserves the scale of its gradient. The
    teacher gets no gradient.
    Shape: both (items, …, outcomes); the result (items,), the mean over the axes in between.
    """
    if scores.shape[-1] == 1:
        return squared_error(scores, teacher.detach())
    targets = (bounded(teacher.detach()) / temperature).softmax(-1)
    entropies = -(targets * (bounded(scores) / temperature).log_softmax(-1)).sum(-1)
    return temperature**2 * by_item(entropies)


def squared_error(scores: Tensor, other: Tensor) -> Tensor:
    """Return the mean squared difference of the scores; shapes as in `soft_cross_entropy`."""
    return by_item((bounded(scores) - bounded(other)).square().mean(-1))


def bounded(scores: Tensor) -> Tensor:
    """Return scores in at least float32, with -inf (an impossible outcome) clamped to a finite value."""
    return wide(scores).clamp(min=_MIN_SCORE)


def by_item(values: Tensor) -> Tensor:
    """Return the mean per item: (items, …) -> (items,)."""
    return values if values.dim() == 1 else values.flatten(1).mean(1)

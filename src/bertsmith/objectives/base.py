"""The contract between an objective and the trainer, and the losses that several objectives share."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bertsmith.answers.sequences import IGNORED
from bertsmith.data.batch import TrainingBatch
from bertsmith.models.config import ModelConfig
from bertsmith.models.model import Model
from bertsmith.settings import Record
from bertsmith.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Term:
    """One loss of an objective, as the trainer and the log know it."""

    metrics: tuple[str, ...] = ()
    """What else is reported of it."""
    weight: float = 1.0
    """How much its mean over its targets counts in the loss."""


class Share(NamedTuple):
    """A figure as a part of a whole: both are added up over micro-batches and processes before they are divided."""

    part: Tensor
    whole: Tensor


class Sums(NamedTuple):
    """One loss over a micro-batch, neither weighted nor divided by the number of its targets.

    A tuple, so that those who wrap the step (DDP, FSDP) find the tensors in it.
    """

    loss: Tensor
    metrics: dict[str, Share]
    """Under the names in the objective's term."""


@dataclass(frozen=True)
class Group:
    """Weights of one learning rate."""

    parameters: tuple[nn.Parameter, ...]
    rate: float = 1.0
    """Their learning rate as a share of the run's."""


@dataclass(frozen=True)
class Portion:
    """Weights that one optimiser moves: their gradient is clipped as a whole."""

    groups: tuple[Group, ...]

    @classmethod
    def of(cls, parameters: Iterable[nn.Parameter], rate: float = 1.0) -> "Portion":
        """Weights that all have one learning rate."""
        return cls((Group(tuple(parameters), rate),))

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        return tuple(parameter for group in self.groups for parameter in group.parameters)


class ObjectiveConfig(Record, ABC):
    """The settings of an objective over a corpus; `kind` is its name in the table of objectives."""

    kind: str

    @property
    @abstractmethod
    def heads(self) -> tuple[str, ...]:
        """The heads this objective trains."""

    @property
    def passes(self) -> int:
        """How often a batch goes through the model in one step, for the count of operations."""
        return 1

    @property
    @abstractmethod
    def targets_per_token(self) -> float:
        """The share of tokens whose scores over the vocabulary are computed in one pass, for that count."""

    @property
    @abstractmethod
    def token_term(self) -> str:
        """The term that guesses tokens, whose loss compares with the unigram level of the corpus."""

    def network(self, config: ModelConfig) -> ModelConfig:
        """The config of the model as this objective trains it; raises InputError if it cannot train such a one."""
        return config

    @abstractmethod
    def build(self, tokenizer: Tokenizer, ponder_weight: float | None = None) -> "Objective[Any, Any]":
        """The objective; a model whose positions halt needs the weight of the ponder cost (EncoderConfig has it)."""


Given = TypeVar("Given", bound=TrainingBatch)
Prepared = TypeVar("Prepared")


class Objective(ABC, Generic[Given, Prepared]):
    """Prepares a batch without the model, which fixes the number of targets, then computes the losses.

    The split lets the trainer divide by the targets of the *whole* step, over all micro-batches and processes, before
    the first backward pass.
    """

    terms: dict[str, Term]
    """The losses by name."""

    @abstractmethod
    def to(self, device: torch.device | str) -> "Objective[Given, Prepared]":
        """The objective with its tables on a device."""

    @abstractmethod
    def prepare(self, batch: Given, seed: int) -> Prepared:
        """What the model gets to see and what it shall say: a pure function of (batch, seed)."""

    @abstractmethod
    def counts(self, prepared: Prepared) -> dict[str, Tensor]:
        """The number of targets of each term."""

    @abstractmethod
    def __call__(self, model: Model, prepared: Prepared) -> dict[str, Sums]:
        """The sums of each term."""

    def parts(self, prepared: Prepared) -> Sequence[Prepared]:
        """What of a micro-batch is computed and sent backward at a time; their gradients add up.

        Each part has all the targets, and the last one uses every weight: processes exchange gradients after it.
        """
        return (prepared,)

    @abstractmethod
    def for_evaluation(self) -> "Objective[Given, Prepared]":
        """The objective in the form in which runs are compared, whatever they were trained with."""

    def finished(self, model: Model) -> Model:
        """The model without what only its training needed."""
        return model

    def portions(self, model: Model) -> list[Portion]:
        """The model's weights by the optimiser that moves them; one moves all unless the objective says otherwise."""
        return [Portion.of(parameter for parameter in model.parameters() if parameter.requires_grad)]


def wide(scores: Tensor) -> Tensor:
    """Scores in at least float32: sums of exponentials would lose most of their digits in half precision."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def class_sums(scores: Tensor, targets: Tensor, weights: tuple[float, ...] = ()) -> Sums:
    """Cross-entropy and hits over some targets, those that are IGNORED left out; `weights` are those of the classes.

    Shape: scores (targets, classes), targets (targets,).
    """
    weight = wide(scores).new_tensor(weights) if weights else None
    loss = cross_entropy(wide(scores), targets, weight=weight, ignore_index=IGNORED, reduction="sum")
    hits = (scores.detach().argmax(-1) == targets).sum()
    return Sums(loss, {"accuracy": Share(hits, (targets != IGNORED).sum())})


_LOWEST = -1e4  # a score whose share is 0 in every precision, and whose logarithm is still a number


def soft_cross_entropy(scores: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the cross-entropy under a teacher's softmax, which gets no gradient; the squared error of a single score.

    With a temperature T both are softened by it, and the loss is multiplied by T², so that its gradient keeps its size.
    Shape: both (items, …, outcomes); the result (items,), the mean over the axes between.
    """
    if scores.shape[-1] == 1:
        return squared_error(scores, teacher.detach())
    shares = (bounded(teacher.detach()) / temperature).softmax(-1)
    entropies = -(shares * (bounded(scores) / temperature).log_softmax(-1)).sum(-1)
    return temperature**2 * by_item(entropies)


def squared_error(scores: Tensor, other: Tensor) -> Tensor:
    """Return the mean squared difference of the scores; shapes as in `soft_cross_entropy`."""
    return by_item((bounded(scores) - bounded(other)).square().mean(-1))


def bounded(scores: Tensor) -> Tensor:
    """Scores in at least float32; an outcome that is impossible may have the score -inf."""
    return wide(scores).clamp(min=_LOWEST)


def by_item(values: Tensor) -> Tensor:
    """The mean of what belongs to one item: (items, …) -> (items,)."""
    return values if values.dim() == 1 else values.flatten(1).mean(1)

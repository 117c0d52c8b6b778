"""Supervised objectives: one loss per kind of task over the outputs of its head."""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from bertsmith.answers.sequences import IGNORED
from bertsmith.data.examples import TaskBatch
from bertsmith.errors import InputError
from bertsmith.layers.embedding import Perturbation
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.model import Model
from bertsmith.objectives.base import Group, Objective, Portion, Share, Sums, Term, class_sums, soft_cross_entropy, wide

Frozen = Literal["none", "embedding", "all"]
"""Frozen weights of the encoder: none, the embedding, or all, so that only heads are trained."""


@dataclass(frozen=True)
class Supervised(Objective[TaskBatch, TaskBatch]):
    """Base of losses over the outputs of a task head; subclasses define the loss and the number of targets.

    Losses are sums over targets; the trainer divides by the number of targets in the whole step.
    """

    layer_decay: float = 1.0
    """Factor on the learning rate from each layer to the one below, as in ELECTRA."""
    frozen: Frozen = "none"
    """Frozen weights of the encoder; with "all" its dropout is off as well."""

    @property
    def terms(self) -> dict[str, Term]:  # type: ignore[override]
        return {"task": Term(self.metrics)}

    metrics: ClassVar[tuple[str, ...]] = ("accuracy",)
    """Names of the metrics in the log."""

    def to(self, device: torch.device | str) -> "Supervised":
        return self

    def prepare(self, batch: TaskBatch, seed: int) -> TaskBatch:
        return batch

    def counts(self, prepared: TaskBatch) -> dict[str, Tensor]:
        return {"task": self.count(prepared)}

    def __call__(self, model: Model, prepared: TaskBatch) -> dict[str, Sums]:
        return {"task": self.for_model(model).sums(self.outputs(model, prepared), prepared)}

    def for_model(self, model: Model) -> "Supervised":
        """Return the objective with weights of the model's head that the loss reads besides its outputs, if any."""
        return self

    def for_evaluation(self) -> "Supervised":
        return self

    def outputs(self, model: Model, batch: TaskBatch, perturb: Perturbation | None = None) -> Tensor:
        """Return the outputs of the task head; `perturb` changes the vectors that enter the encoder."""
        inputs, want = EncoderInputs(batch.tokens, batch.layout, batch.types, perturb=perturb), Want(task=True)
        if self.frozen != "all":
            return model.run(inputs, want).outputs
        with eval_mode(model.encoder):
            return model.run(inputs, want).outputs

    @abstractmethod
    def sums(self, outputs: Tensor, batch: TaskBatch) -> Sums:
        """Return the loss and the metrics of a batch, in at least float32."""

    def count(self, batch: TaskBatch) -> Tensor:
        """Return the number of targets; by default one per item."""
        return torch.full((), len(batch.item), device=batch.item.device)  # torch.tensor would wait for a GPU

    def comparable_logits(self, outputs: Tensor, batch: TaskBatch) -> Tensor:
        """Return the outputs as logits whose softmax over the last axis is one prediction, to compare two models.

        Impossible outcomes are -inf; a single score is a regression. Tasks that do not define it support neither
        adversarial training nor distillation.
        Shape: (comparable_count, …, outcomes); axes in between are averaged.
        """
        name = type(self).__name__
        raise InputError(f"{name} has no comparable logits; adversarial training and distillation do not support it")

    def distillation_loss(self, outputs: Tensor, teacher: Tensor, batch: TaskBatch, temperature: float = 1.0) -> Tensor:
        """Return the distance of the outputs from a teacher's, (comparable_count,), for distillation."""
        return soft_cross_entropy(
            self.comparable_logits(outputs, batch), self.comparable_logits(teacher, batch), temperature
        )

    def comparable_count(self, batch: TaskBatch) -> Tensor:
        """Return the length of the first axis of the comparable logits."""
        return torch.full((), len(batch.item), device=batch.item.device)  # without synchronisation

    def portions(self, model: Model) -> list[Portion]:
        """Return one portion, whose learning rate decreases from the heads down to the embedding.

        At depth d the factor is decay^(layers + 2 - d): the embedding is at depth 0, the first layer at 1 and the heads
        at layers + 2, so that the top layer has decay², not decay (as in the code of ELECTRA and ConvBERT).
        """
        frozen = {"none": (), "embedding": (model.encoder.embedding,), "all": (model.encoder,)}
        for module in frozen[self.frozen]:
            module.requires_grad_(False)
        depths = parameter_depths(model)
        top = len(model.config.encoder.layers) + 2
        groups: dict[int, list[nn.Parameter]] = {}
        for parameter in model.parameters():
            if parameter.requires_grad:
                groups.setdefault(depths[parameter], []).append(parameter)
        if self.layer_decay == 1.0:
            return [Portion.of([parameter for group in groups.values() for parameter in group])]
        return [Portion(tuple(Group(tuple(group), self.layer_decay ** (top - d)) for d, group in groups.items()))]


def parameter_depths(model: Model) -> dict[nn.Parameter, int]:
    """Return the depth of every parameter: 0 for the embedding, i + 1 for layer i, layers + 2 for heads.

    A parameter that several layers share has the depth of the topmost one.
    """
    encoder, layers = model.encoder, len(model.config.encoder.layers)
    depths: dict[nn.Parameter, int] = dict.fromkeys(model.parameters(), layers + 2)
    for parameter in encoder.parameters():
        depths[parameter] = layers  # the final norm and the relative table
    for parameter in encoder.embedding.parameters():
        depths[parameter] = 0
    for index, block in enumerate(encoder.blocks):
        for parameter in block.parameters():
            depths[parameter] = index + 1
    return depths


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Switch a module to eval mode, and back to its previous mode on exit."""
    was_training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(was_training)


@dataclass(frozen=True)
class Classes(Supervised):
    """Single-label classification of a sequence: targets "label", (items,)."""

    weights: tuple[float, ...] = ()
    """Class weights; empty for equal weights."""

    def sums(self, outputs: Tensor, batch: TaskBatch) -> Sums:
        return class_sums(outputs, batch.targets["label"], _rescale_weights(self.weights))

    def count(self, batch: TaskBatch) -> Tensor:
        return class_count(batch.targets["label"], self.weights)

    def comparable_logits(self, outputs: Tensor, batch: TaskBatch) -> Tensor:
        return outputs


def class_count(targets: Tensor, weights: tuple[float, ...] = ()) -> Tensor:
    """Return the number of targets, weighted by class."""
    is_target = targets != IGNORED
    if not weights:
        return is_target.sum()
    table = torch.tensor(_rescale_weights(weights), device=targets.device)
    return torch.where(is_target, table[targets.clamp(min=0)], 0.0).sum()


def _rescale_weights(weights: tuple[float, ...]) -> tuple[float, ...]:
    """Scale class weights so that the smallest positive one is 1.

    The trainer divides the loss by the sum of weights, but by at least 1; small weights could otherwise sum to less.
    """
    smallest = min((weight for weight in weights if weight > 0), default=1.0)
    return tuple(weight / smallest for weight in weights)


@dataclass(frozen=True)
class Values(Supervised):
    """Regression with squared error: targets "value", (items,)."""

    metrics = ()

    def sums(self, outputs: Tensor, batch: TaskBatch) -> Sums:
        return Sums(((wide(outputs.squeeze(-1)) - batch.targets["value"]) ** 2).sum(), {})

    def comparable_logits(self, outputs: Tensor, batch: TaskBatch) -> Tensor:
        return outputs


@dataclass(frozen=True)
class Labels(Supervised):
    """Multi-label classification of a sequence: targets "labels", (items, labels) of 0 and 1."""

    weights: tuple[float, ...] = ()
    """Weight of positive targets per label; empty for 1."""

    def sums(self, outputs: Tensor, batch: TaskBatch) -> Sums:
        scores, targets = wide(outputs), batch.targets["labels"]
        weight = scores.new_tensor(self.weights) if self.weights else None
        losses = binary_cross_entropy_with_logits(scores, targets.to(scores), pos_weight=weight, reduction="none")
        hits = ((outputs.detach() > 0) == (targets > 0.5)).float().mean(-1).sum()
        return Sums(losses.mean(-1).sum(), {"accuracy": Share(hits, self.count(batch))})

    def comparable_logits(self, outputs: Tensor, batch: TaskBatch) -> Tensor:
        # sigmoid(score) equals the softmax of (score, 0): (items, labels) -> (items, labels, 2)
        return torch.stack([outputs, torch.zeros_like(outputs)], dim=-1)


@dataclass(frozen=True)
class Tags(Supervised):
    """Classification of every token that has a target: targets "tags", shaped like the tokens."""

    weights: tuple[float, ...] = ()

    def sums(self, outputs: Tensor, batch: TaskBatch) -> Sums:
        # (batch, length, labels) or (tokens, labels) -> (tokens, labels)
        return class_sums(outputs.flatten(0, -2), batch.targets["tags"].flatten(), _rescale_weights(self.weights))

    def count(self, batch: TaskBatch) -> Tensor:
        return class_count(batch.targets["tags"], self.weights)

    def comparable_logits(self, outputs: Tensor, batch: TaskBatch) -> Tensor:
        return outputs.flatten(0, -2)[batch.targets["tags"].flatten() != IGNORED]

    def distillation_loss(self, outputs: Tensor, teacher: Tensor, batch: TaskBatch, temperature: float = 1.0) -> Tensor:
        """Return the distance of the outputs from a teacher's, (comparable_count,), for distillation."""
        return soft_cross_entropy(
            self.comparable_logits(outputs, batch), self.comparable_logits(teacher, batch), temperature
        )

    def comparable_count(self, batch: TaskBatch) -> Tensor:
        return (batch.targets["tags"] != IGNORED).sum()


@dataclass(frozen=True)
class Choices(Supervised):
    """Multiple choice: a softmax over the scores of an item's sequences (Devlin et al. 2019, section 4.4).

    Targets: "label", (items,), the index of the correct choice; "is_choice", (items, max choices), True for the choices
    that the item has.
    """

    def sums(self, outputs: Tensor, batch: TaskBatch) -> Sums:
        return class_sums(choice_table(outputs, batch.targets["is_choice"]), batch.targets["label"])

    def count(self, batch: TaskBatch) -> Tensor:
        return (batch.targets["label"] != IGNORED).sum()

    def comparable_logits(self, outputs: Tensor, batch: TaskBatch) -> Tensor:
        return choice_table(outputs, batch.targets["is_choice"])


def choice_table(outputs: Tensor, is_choice: Tensor) -> Tensor:
    """Return one row of scores per item, -inf where it has no choice, in at least float32.

    Shape: outputs (sequences, 1), is_choice (items, max choices) -> (items, max choices).
    """
    scores = wide(outputs.squeeze(-1))
    # sequences are in the order of their items, as masked_scatter expects
    return scores.new_full(is_choice.shape, -torch.inf).masked_scatter(is_choice, scores)


@dataclass(frozen=True)
class Spans(Supervised):
    """Span extraction: mean cross-entropy of start and end over the tokens of a window: targets "start" and "end".

    The softmax is over real tokens only, so that the loss does not depend on the layout; BERT's code includes padding.
    Shape: targets (items,) each.
    """

    def sums(self, outputs: Tensor, batch: TaskBatch) -> Sums:
        """Shape: outputs (batch, length, 2) or (tokens, 2)."""
        scores = self.comparable_logits(wide(outputs), batch)
        targets = torch.stack([batch.targets["start"], batch.targets["end"]], dim=-1)
        # two targets for each item: (items, 2, tokens) -> (2 items, tokens)
        loss = cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum") / 2
        hits = (scores.detach().argmax(-1) == targets).all(-1).sum()
        return Sums(loss, {"accuracy": Share(hits, self.count(batch))})

    def count(self, batch: TaskBatch) -> Tensor:
        return (batch.targets["start"] != IGNORED).sum()

    def comparable_logits(self, outputs: Tensor, batch: TaskBatch) -> Tensor:
        """Return the start and end scores of each window's tokens, -inf at padding.

        Shape: (items, 2, max_length).
        """
        rows, layout = batch.layout.pad(outputs)
        if layout.is_token is not None:
            rows = torch.where(layout.is_token[..., None], rows, -torch.inf)
        return rows.transpose(1, 2)

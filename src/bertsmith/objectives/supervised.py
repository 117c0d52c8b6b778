"""Learn a task from examples: what its head says against what it should say."""

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
"""What of an encoder keeps its weights: nothing, the tables it begins with, or all of it, so that only heads learn."""


@dataclass(frozen=True)
class Supervised(Objective[TaskBatch, TaskBatch]):
    """A loss over the outputs of a task's head. A kind of task says what the loss is and how many targets there are.

    Sums are over targets: the trainer divides by the number of them in the whole step.
    """

    layer_decay: float = 1.0
    """What the learning rate is multiplied by from each depth to the one below, as ELECTRA does it."""
    frozen: Frozen = "none"
    """What of the encoder keeps its weights; one that keeps all rests: without dropout."""

    @property
    def terms(self) -> dict[str, Term]:  # type: ignore[override]
        return {"task": Term(self.metrics)}

    metrics: ClassVar[tuple[str, ...]] = ("accuracy",)
    """What else is reported of the loss."""

    def to(self, device: torch.device | str) -> "Supervised":
        return self

    def prepare(self, batch: TaskBatch, seed: int) -> TaskBatch:
        return batch

    def counts(self, prepared: TaskBatch) -> dict[str, Tensor]:
        return {"task": self.count(prepared)}

    def __call__(self, model: Model, prepared: TaskBatch) -> dict[str, Sums]:
        return {"task": self.sums(self.outputs(model, prepared), prepared)}

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
        """The loss over a batch and the figures, in at least float32."""

    def count(self, batch: TaskBatch) -> Tensor:
        """The number of targets: one for each item, unless a kind of task says otherwise."""
        return torch.tensor(len(batch.item), device=batch.item.device)

    def comparable_logits(self, outputs: Tensor, batch: TaskBatch) -> Tensor:
        """Return the outputs as logits whose softmax over the last axis is one prediction, to compare two models.

        Impossible outcomes are -inf; a single score is a regression. Tasks that do not define it cannot be trained
        adversarially or with a teacher: a guess would be wrong without notice.
        Shape: (comparable_count, …, outcomes); axes between are averaged.
        """
        name = type(self).__name__
        raise InputError(f"what {name} learns from is no belief: there is no adversarial training for it")

    def apart(self, outputs: Tensor, teacher: Tensor, batch: TaskBatch, temperature: float = 1.0) -> Tensor:
        """Return the distance of the outputs from a teacher's, (comparable_count,), for distillation."""
        return soft_cross_entropy(
            self.comparable_logits(outputs, batch), self.comparable_logits(teacher, batch), temperature
        )

    def comparable_count(self, batch: TaskBatch) -> Tensor:
        """Return the length of the first axis of the comparable logits."""
        return torch.tensor(len(batch.item), device=batch.item.device)

    def portions(self, model: Model) -> list[Portion]:
        """One portion, whose learning rate falls from the head down to the embedding.

        At depth d it is decay^(layers + 2 - d) of the head's: the embedding is at depth 0, the first layer at 1 and the
        heads at layers + 2, so that the top layer has decay², not decay (ELECTRA's code; ConvBERT's as well).
        """
        kept = {"none": (), "embedding": (model.encoder.embedding,), "all": (model.encoder,)}
        for part in kept[self.frozen]:
            part.requires_grad_(False)
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
    """How deep every weight of an encoder and its heads lies: 0 the embedding, i + 1 layer i, layers + 2 the heads.

    A weight that several layers share counts with the topmost one.
    """
    encoder, layers = model.encoder, len(model.config.encoder.layers)
    depths: dict[nn.Parameter, int] = dict.fromkeys(model.parameters(), layers + 2)
    for parameter in encoder.parameters():
        depths[parameter] = layers  # a final norm, a table that all layers read
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
    """One right class for a sequence: targets "label", (items,)."""

    weights: tuple[float, ...] = ()
    """How much each class counts; empty for all the same."""

    def sums(self, outputs: Tensor, batch: TaskBatch) -> Sums:
        return class_sums(outputs, batch.targets["label"], _at_least_one(self.weights))

    def count(self, batch: TaskBatch) -> Tensor:
        return class_count(batch.targets["label"], self.weights)

    def comparable_logits(self, outputs: Tensor, batch: TaskBatch) -> Tensor:
        return outputs


def class_count(targets: Tensor, weights: tuple[float, ...] = ()) -> Tensor:
    """The number of targets, each as much as its class counts."""
    is_target = targets != IGNORED
    if not weights:
        return is_target.sum()
    table = torch.tensor(_at_least_one(weights), device=targets.device)
    return torch.where(is_target, table[targets.clamp(min=0)], 0.0).sum()


def _at_least_one(weights: tuple[float, ...]) -> tuple[float, ...]:
    """Weights of classes in the same proportions, the smallest that counts at all being 1.

    The loss is divided by the sum of weights, but never by less than 1, which a few targets of small weights would be.
    """
    smallest = min((weight for weight in weights if weight > 0), default=1.0)
    return tuple(weight / smallest for weight in weights)


@dataclass(frozen=True)
class Values(Supervised):
    """One number for a sequence, by squared error: targets "value", (items,)."""

    metrics = ()

    def sums(self, outputs: Tensor, batch: TaskBatch) -> Sums:
        return Sums(((wide(outputs.squeeze(-1)) - batch.targets["value"]) ** 2).sum(), {})

    def comparable_logits(self, outputs: Tensor, batch: TaskBatch) -> Tensor:
        return outputs


@dataclass(frozen=True)
class Labels(Supervised):
    """Any number of labels for a sequence, each yes or no: targets "labels", (items, labels) of 0 and 1."""

    weights: tuple[float, ...] = ()
    """How much a yes counts, label by label; empty for as much as a no."""

    def sums(self, outputs: Tensor, batch: TaskBatch) -> Sums:
        scores, targets = wide(outputs), batch.targets["labels"]
        weight = scores.new_tensor(self.weights) if self.weights else None
        losses = binary_cross_entropy_with_logits(scores, targets.to(scores), pos_weight=weight, reduction="none")
        hits = ((outputs.detach() > 0) == (targets > 0.5)).float().mean(-1).sum()
        return Sums(losses.mean(-1).sum(), {"accuracy": Share(hits, self.count(batch))})

    def comparable_logits(self, outputs: Tensor, batch: TaskBatch) -> Tensor:
        # the sigmoid of a score is the softmax of it and 0: (items, labels) -> (items, labels, 2)
        return torch.stack([outputs, torch.zeros_like(outputs)], dim=-1)


@dataclass(frozen=True)
class Tags(Supervised):
    """One right class for every token that has a target: targets "tags", as the tokens lie."""

    weights: tuple[float, ...] = ()

    def sums(self, outputs: Tensor, batch: TaskBatch) -> Sums:
        # (batch, length, labels) or (tokens, labels) -> (tokens, labels)
        return class_sums(outputs.flatten(0, -2), batch.targets["tags"].flatten(), _at_least_one(self.weights))

    def count(self, batch: TaskBatch) -> Tensor:
        return class_count(batch.targets["tags"], self.weights)

    def comparable_logits(self, outputs: Tensor, batch: TaskBatch) -> Tensor:
        return outputs.flatten(0, -2)[batch.targets["tags"].flatten() != IGNORED]

    def apart(self, outputs: Tensor, teacher: Tensor, batch: TaskBatch, temperature: float = 1.0) -> Tensor:
        """Return the distance of the outputs from a teacher's, (comparable_count,), for distillation."""
        return soft_cross_entropy(
            self.comparable_logits(outputs, batch), self.comparable_logits(teacher, batch), temperature
        )

    def comparable_count(self, batch: TaskBatch) -> Tensor:
        return (batch.targets["tags"] != IGNORED).sum()


@dataclass(frozen=True)
class Choices(Supervised):
    """One right sequence among those of an item, by a softmax over their scores (Devlin et al. 2019, section 4.4).

    Targets: "label", (items,), the place of the right one; "is_choice", (items, most), True at as many places as the
    item has sequences, the first ones.
    """

    def sums(self, outputs: Tensor, batch: TaskBatch) -> Sums:
        return class_sums(choice_table(outputs, batch.targets["is_choice"]), batch.targets["label"])

    def count(self, batch: TaskBatch) -> Tensor:
        return (batch.targets["label"] != IGNORED).sum()

    def comparable_logits(self, outputs: Tensor, batch: TaskBatch) -> Tensor:
        return choice_table(outputs, batch.targets["is_choice"])


def choice_table(outputs: Tensor, is_choice: Tensor) -> Tensor:
    """The scores of sequences as a row for every item, minus infinity where it has no more, in at least float32.

    Shape: outputs (sequences, 1), is_choice (items, most) -> (items, most).
    """
    scores = wide(outputs.squeeze(-1))
    # sequences stand in the order of their items, which is the one a masked scatter fills in
    return scores.new_full(is_choice.shape, -torch.inf).masked_scatter(is_choice, scores)


@dataclass(frozen=True)
class Spans(Supervised):
    """The mean of two cross-entropies over the tokens of a window: targets "start" and "end", (items,).

    Both are taken over real tokens only, so that the loss of a window is the same however it lies in memory; BERT's
    code lets the pads of a row take part.
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
        """The scores of the tokens of each window as a start and as an end, -inf at pads.

        Shape: (items, 2, tokens of the longest)
        """
        rows, layout = batch.layout.pad(outputs)
        if layout.is_token is not None:
            rows = torch.where(layout.is_token[..., None], rows, -torch.inf)
        return rows.transpose(1, 2)

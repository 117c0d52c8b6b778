"""Train text embeddings: similar texts get vectors with a high cosine.

The head returns one vector per sequence. An item has one, two or three sequences: an anchor, a positive and a negative.
All losses depend on the cosines of the vectors.
"""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from bertsmith.data.examples import TaskBatch
from bertsmith.objectives.base import Share, Sums, wide
from bertsmith.objectives.supervised import Supervised


@dataclass(frozen=True)
class Vectors(Supervised):
    """Base of losses over text embeddings."""

    def distillation_loss(self, outputs: Tensor, teacher: Tensor, batch: TaskBatch, temperature: float = 1.0) -> Tensor:
        """Return the mean squared distance of an item's unit vectors from the teacher's, (items,)."""
        own, target = (item_vectors(vectors, len(batch.item)) for vectors in (outputs, teacher.detach()))
        return (own - target).square().sum(-1).mean(-1)  # (items, sequences, width) -> (items,)


@dataclass(frozen=True)
class Cosines(Vectors):
    """Base of losses over the cosine of each item's two texts."""

    metrics = ()

    def sums(self, outputs: Tensor, batch: TaskBatch) -> Sums:
        return Sums(self.loss(self.comparable_logits(outputs, batch).squeeze(-1), batch.targets["value"]), {})

    def comparable_logits(self, outputs: Tensor, batch: TaskBatch) -> Tensor:
        vectors = item_vectors(outputs, len(batch.item))
        return (vectors[:, 0] * vectors[:, 1]).sum(-1, keepdim=True)

    @abstractmethod
    def loss(self, cosines: Tensor, values: Tensor) -> Tensor:
        """Return the sum of the loss over some items.

        Shape: cosines and values (items,); values are between 0 and 1.
        """


@dataclass(frozen=True)
class Similarity(Cosines):
    """Squared error of the cosine (Reimers & Gurevych 2019, section 3)."""

    def loss(self, cosines: Tensor, values: Tensor) -> Tensor:
        return ((cosines - values) ** 2).sum()


@dataclass(frozen=True)
class TargetVectors(Vectors):
    """1 − cosine of each text's vector and a given one: distillation of an embedding model.

    It is half the squared distance of the unit vectors (Reimers & Gurevych 2020, eq. 1, for one language).
    Targets: "vector", (items, width). Pairs with a "value" instead, which dev may have, get the loss of `Similarity`.
    """

    metrics = ()

    def sums(self, outputs: Tensor, batch: TaskBatch) -> Sums:
        if "vector" not in batch.targets:
            return Similarity().sums(outputs, batch)
        target = normalize(batch.targets["vector"].float(), dim=-1)
        cosines = (item_vectors(outputs, len(batch.item))[:, 0] * target).sum(-1)
        return Sums((1 - cosines).sum(), {})


@dataclass(frozen=True)
class Ranking(Cosines):
    """Ranking loss: a more similar pair should have the higher cosine (CoSENT; Su 2022).

    log(1 + Σ exp(scale · (cosine of the less similar pair − cosine of the more similar pair))) over all ordered pairs
    of pairs in the micro-batch, times its items, so that the loss of a step is the mean over its items.
    """

    scale: float = 20.0

    def loss(self, cosines: Tensor, values: Tensor) -> Tensor:
        # (items, items): the column's cosine minus the row's, where the row is the more similar pair
        differences = self.scale * (cosines[None, :] - cosines[:, None])
        violations = differences.masked_fill(values[:, None] <= values[None, :], -torch.inf)
        return len(cosines) * torch.cat([cosines.new_zeros(1), violations.flatten()]).logsumexp(0)


@dataclass(frozen=True)
class Contrastive(Cosines):
    """Pulls similar pairs together and pushes dissimilar ones a margin apart (Hadsell et al. 2006, eq. 4).

    The distance is 1 − cosine; a pair is similar if its value is above ½.
    """

    margin: float = 0.5

    def loss(self, cosines: Tensor, values: Tensor) -> Tensor:
        distances = 1 - cosines
        hinge = (self.margin - distances).clamp(min=0)
        return torch.where(values > 0.5, distances, hinge).square().sum() / 2


@dataclass(frozen=True)
class InBatch(Vectors):
    """InfoNCE with in-batch negatives (van den Oord et al. 2018, eq. 4).

    A softmax over scale · cosine selects each item's positive among all positives of the micro-batch. Third texts, if
    any, are additional negatives for all items. An item with one text is its own positive: in training the text occurs
    twice with different dropout masks (SimCSE; Gao et al. 2021, eq. 1).
    Targets: "texts", (items, texts), ids that are equal for equal texts, so that no positive serves as a negative.
    "value", (items,), optional: items of at most ½ are not positive pairs and have no loss of their own.
    """

    scale: float = 20.0
    is_symmetric: bool = False
    """Whether positives also retrieve their anchors; the loss is the mean of both directions."""

    def sums(self, outputs: Tensor, batch: TaskBatch) -> Sums:
        vectors, texts = item_vectors(outputs, len(batch.item)), batch.targets["texts"]
        is_anchor = self._is_anchor(batch)
        # (items, items)
        scores = self._scores(vectors[:, 0], vectors[:, min(1, vectors.shape[1] - 1)], same_pairs(texts))
        forward_scores = scores
        if vectors.shape[1] > 2:
            is_positive = (texts[:, None, :2] == texts[None, :, 2:]).any(-1)
            forward_scores = torch.cat([scores, self._scores(vectors[:, 0], vectors[:, 2], is_positive)], dim=1)
        own = torch.arange(len(texts), device=texts.device)
        loss = cross_entropy(forward_scores, own, reduction="none")
        if self.is_symmetric:
            loss = (loss + cross_entropy(scores.T, own, reduction="none")) / 2
        hits = ((forward_scores.detach().argmax(-1) == own) & is_anchor).sum()
        return Sums(torch.where(is_anchor, loss, 0).sum(), {"accuracy": Share(hits, is_anchor.sum())})

    def count(self, batch: TaskBatch) -> Tensor:
        return self._is_anchor(batch).sum()

    def _scores(self, first: Tensor, second: Tensor, is_excluded: Tensor) -> Tensor:
        # in half precision a cosine is off by up to 1/256, which the scale turns into almost 0.1
        with torch.autocast(first.device.type, enabled=False):
            return (self.scale * first @ second.T).masked_fill(is_excluded, -torch.inf)

    def _is_anchor(self, batch: TaskBatch) -> Tensor:
        if "value" in batch.targets:
            return batch.targets["value"] > 0.5
        return torch.ones_like(batch.item, dtype=torch.bool)


def same_pairs(texts: Tensor) -> Tensor:
    """Return True where another item's pair shares a text with an item's own, so that it is no negative.

    Shape: texts (items, texts) -> (items, items), False on the diagonal.
    """
    first, second = texts[:, 0], texts[:, min(1, texts.shape[1] - 1)]
    crossed = first[:, None] == second[None, :]
    is_same = (first[:, None] == first) | (second[:, None] == second) | crossed | crossed.T
    return is_same & ~torch.eye(len(texts), dtype=torch.bool, device=texts.device)


def item_vectors(outputs: Tensor, items: int) -> Tensor:
    """Return the unit vectors of each item's sequences, in at least float32.

    Shape: (sequences, width) -> (items, sequences of an item, width).
    """
    return normalize(wide(outputs), dim=-1).unflatten(0, (items, -1))

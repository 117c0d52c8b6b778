"""Learn vectors of texts: what belongs together lies close together.

The head gives a vector for every sequence. An item has one, two or three of them: a text, its like, and what is unlike
it. All losses read the cosines of the vectors.
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
    """Vectors of texts, which are compared by their cosines."""

    def apart(self, outputs: Tensor, teacher: Tensor, batch: TaskBatch, temperature: float = 1.0) -> Tensor:
        """The mean squared distance of an item's vectors of length 1 from the teacher's, (items,)."""
        own, wanted = (item_vectors(vectors, len(batch.item)) for vectors in (outputs, teacher.detach()))
        return (own - wanted).square().sum(-1).mean(-1)  # (items, sequences, width) -> (items,)


@dataclass(frozen=True)
class Cosines(Vectors):
    """A loss over the cosine of each item's two texts."""

    metrics = ()

    def sums(self, outputs: Tensor, batch: TaskBatch) -> Sums:
        return Sums(self.loss(self.comparable_logits(outputs, batch).squeeze(-1), batch.targets["value"]), {})

    def comparable_logits(self, outputs: Tensor, batch: TaskBatch) -> Tensor:
        vectors = item_vectors(outputs, len(batch.item))
        return (vectors[:, 0] * vectors[:, 1]).sum(-1, keepdim=True)

    @abstractmethod
    def loss(self, cosines: Tensor, values: Tensor) -> Tensor:
        """The sum of the loss over some items.

        Shape: cosines and values (items,); values lie between 0 and 1.
        """


@dataclass(frozen=True)
class Similarity(Cosines):
    """The squared error of the cosine (Reimers & Gurevych 2019, section 3)."""

    def loss(self, cosines: Tensor, values: Tensor) -> Tensor:
        return ((cosines - values) ** 2).sum()


@dataclass(frozen=True)
class Ranking(Cosines):
    """Any pair that is more alike than another should have the greater cosine (CoSENT; Su 2022).

    log(1 + Σ exp(scale · (cosine of the less alike − cosine of the more alike))) over all such pairs of pairs in the
    micro-batch, times its items, so that the loss of a step is the mean over its items.
    """

    scale: float = 20.0

    def loss(self, cosines: Tensor, values: Tensor) -> Tensor:
        # (items, items): how much the column's cosine is above the row's, kept where the row is the more alike
        above = self.scale * (cosines[None, :] - cosines[:, None])
        kept = above.masked_fill(values[:, None] <= values[None, :], -torch.inf)
        return len(cosines) * torch.cat([cosines.new_zeros(1), kept.flatten()]).logsumexp(0)


@dataclass(frozen=True)
class Contrastive(Cosines):
    """Like pairs as close as can be, unlike ones at least a margin apart (Hadsell et al. 2006, eq. 4).

    The distance is 1 − cosine; a pair is alike where its value is above ½.
    """

    margin: float = 0.5

    def loss(self, cosines: Tensor, values: Tensor) -> Tensor:
        distances = 1 - cosines
        apart = (self.margin - distances).clamp(min=0)
        return torch.where(values > 0.5, distances, apart).square().sum() / 2


@dataclass(frozen=True)
class InBatch(Vectors):
    """Each text should find its like among those of all items of the micro-batch (van den Oord et al. 2018, eq. 4).

    A softmax over scale · cosine. The third texts of items, if any, are further wrong answers for all. Where an item
    has one text only, that is its own like: in training the same text stands there twice, and dropout tells the copies
    apart (SimCSE; Gao et al. 2021, eq. 1).
    Targets: "texts", (items, texts), numbers that are equal where texts are: what is right, too, is no wrong answer.
    "value", (items,), where there is one: items of at most ½ are no pairs of likes and ask for nothing.
    """

    scale: float = 20.0
    is_symmetric: bool = False
    """Whether the likes must find their texts as well; the loss is the mean of both."""

    def sums(self, outputs: Tensor, batch: TaskBatch) -> Sums:
        vectors, texts = item_vectors(outputs, len(batch.item)), batch.targets["texts"]
        asks = self._asks(batch)
        # (items, items)
        scores = self._scores(vectors[:, 0], vectors[:, min(1, vectors.shape[1] - 1)], same_pairs(texts))
        forth = scores
        if vectors.shape[1] > 2:
            is_right = (texts[:, None, :2] == texts[None, :, 2:]).any(-1)
            forth = torch.cat([scores, self._scores(vectors[:, 0], vectors[:, 2], is_right)], dim=1)
        own = torch.arange(len(texts), device=texts.device)
        loss = cross_entropy(forth, own, reduction="none")
        if self.is_symmetric:
            loss = (loss + cross_entropy(scores.T, own, reduction="none")) / 2
        hits = ((forth.detach().argmax(-1) == own) & asks).sum()
        return Sums(torch.where(asks, loss, 0).sum(), {"accuracy": Share(hits, asks.sum())})

    def count(self, batch: TaskBatch) -> Tensor:
        return self._asks(batch).sum()

    def _scores(self, first: Tensor, second: Tensor, is_left_out: Tensor) -> Tensor:
        # in half precision a cosine is off by up to 1/256, which the scale makes a tenth of a score
        with torch.autocast(first.device.type, enabled=False):
            return (self.scale * first @ second.T).masked_fill(is_left_out, -torch.inf)

    def _asks(self, batch: TaskBatch) -> Tensor:
        if "value" in batch.targets:
            return batch.targets["value"] > 0.5
        return torch.ones_like(batch.item, dtype=torch.bool)


def same_pairs(texts: Tensor) -> Tensor:
    """Which other items' texts are as right for an item as its own: the pairs share a text.

    Shape: texts (items, texts) -> (items, items), False on the diagonal.
    """
    first, second = texts[:, 0], texts[:, min(1, texts.shape[1] - 1)]
    crossed = first[:, None] == second[None, :]
    is_same = (first[:, None] == first) | (second[:, None] == second) | crossed | crossed.T
    return is_same & ~torch.eye(len(texts), dtype=torch.bool, device=texts.device)


def item_vectors(outputs: Tensor, items: int) -> Tensor:
    """The vectors of length 1 of each item's sequences, in at least float32.

    Shape: (sequences, width) -> (items, sequences of an item, width).
    """
    return normalize(wide(outputs), dim=-1).unflatten(0, (items, -1))

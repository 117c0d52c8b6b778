"""How the tokens look at each other: scores of attention, and relations of queries, keys and values."""

from typing import Literal

from pydantic import Field, model_validator
from torch import Tensor

from bertsmith.batches.examples import TaskBatch
from bertsmith.errors import InputError
from bertsmith.models.encoder import Encoded
from bertsmith.objectives.base import Sums
from bertsmith.objectives.class_sums import wide
from bertsmith.objectives.distillation.base import DistillationTerm, Pair, added, real_rows
from bertsmith.objectives.supervised import Supervised

Relation = Literal["query_query", "key_key", "value_value", "query_key"]
_PARTS: dict[Relation, tuple[int, int]] = {
    "query_query": (0, 0),
    "key_key": (1, 1),
    "value_value": (2, 2),
    "query_key": (0, 1),
}


class AttentionTerm(DistillationTerm):
    """Squared errors of scores before the softmax, a mean over heads, added up over layers (Jiao et al. 2020, eq. 7).

    The mean is over pairs of real tokens. The released code sets scores of at most -100, which are those of pads, to 0
    and divides by their number as well; here pads are no entries at all, and a low score of real tokens counts.
    """

    kind: Literal["attention"] = "attention"
    layers: tuple[int, ...] | None = None
    """Which layers of the student, from 1; None for all."""

    def sums(self, pair: Pair) -> Sums:
        is_real = real_rows(pair.batch)
        is_pair = (is_real[:, :, None] & is_real[:, None, :])[:, None]  # (batch, 1, longest, longest)
        depth = len(pair.student.encoded.passed)
        losses = []
        for number in range(1, depth + 1) if self.layers is None else self.layers:
            index = _index("layers", number, depth, "student")
            own, like = pair.student.encoded.scores(index), pair.shown.encoded.scores(pair.layer_like(index)).detach()
            if own.shape[1] != like.shape[1]:
                raise InputError(
                    f"layer {number} of the student has {own.shape[1]} heads and the teacher's {like.shape[1]}; the "
                    "term 'attention' needs as many, the term 'relations' does not"
                )
            counts = is_pair & own.isfinite() & like.isfinite()
            apart = wide(own).masked_fill(~counts, 0) - wide(like).masked_fill(~counts, 0)
            losses.append(apart.square().mean(1).sum())
        return Sums(added(losses), {})

    def count(self, task: Supervised, batch: TaskBatch) -> Tensor:
        return real_rows(batch).sum(-1).square().sum()


class RelationTerm(DistillationTerm):
    """KL divergences of how tokens relate by their queries, keys and values in one layer (Wang et al. 2021, MiniLMv2).

    A relation is softmax(A·Bᵀ/√width) over the real tokens of a sequence. The heads of both models are put side by side
    and cut anew, so that neither their numbers nor the widths need be equal. "query_key" with "value_value" are the
    relations of the first MiniLM (Wang et al. 2020).
    """

    kind: Literal["relations"] = "relations"
    relations: tuple[Relation, ...] = Field(default=("query_query", "key_key", "value_value"), min_length=1)
    relation_heads: int | None = Field(default=None, gt=0)
    """The heads that are cut anew; None for as many as the teacher's layer has."""
    layer: int | None = Field(default=None, gt=0)
    """The student's layer, from 1; None for the last."""
    teacher_layer: int | None = Field(default=None, gt=0)
    """The teacher's; None for the last. Of a large teacher an upper one below the last is better."""

    @model_validator(mode="after")
    def _check_relations(self) -> "RelationTerm":
        if len(set(self.relations)) < len(self.relations):
            raise ValueError(f"relations is {list(self.relations)}; allowed: each once")
        return self

    def sums(self, pair: Pair) -> Sums:
        mine, theirs = pair.student.encoded, pair.shown.encoded
        own = self._parts(mine, self.layer, "layer", "student")
        like = tuple(part.detach() for part in self._parts(theirs, self.teacher_layer, "teacher_layer", "teacher"))
        heads = self.relation_heads or like[0].shape[-2]
        is_real = real_rows(pair.batch)
        losses = []
        for name in self.relations:
            first, second = _PARTS[name]
            own_log = _relation(own[first], own[second], heads, pair.batch, is_real, "student")
            like_log = _relation(like[first], like[second], heads, pair.batch, is_real, "teacher")
            apart = like_log.exp() * (like_log - own_log)  # (batch, heads, longest, longest), 0 at pads
            losses.append(apart.sum(-1).mean(1).masked_fill(~is_real, 0).sum())
        return Sums(added(losses), {})

    def _parts(self, encoded: Encoded, number: int | None, name: str, whose: str) -> tuple[Tensor, Tensor, Tensor]:
        depth = len(encoded.passed)
        return encoded.projected(_index(name, depth if number is None else number, depth, whose))


def _relation(first: Tensor, second: Tensor, heads: int, batch: TaskBatch, is_real: Tensor, whose: str) -> Tensor:
    """Logarithms of the relations of tokens, finite and nearly -inf towards pads: (batch, heads, longest, longest).

    Shape: first and second (…, heads of the layer, head width), as the tokens lie.
    """
    rows = []
    for part in (first, second):
        flat = wide(part.flatten(-2))  # (…, heads · head width)
        if flat.shape[-1] % heads:
            raise InputError(
                f"relation_heads is {heads}; allowed: what divides the {whose}'s queries, keys and values of "
                f"{flat.shape[-1]} numbers"
            )
        # (batch, longest, width) -> (batch, heads, longest, width of one)
        rows.append(batch.layout.pad(flat)[0].unflatten(-1, (heads, -1)).transpose(1, 2))
    scores = rows[0] @ rows[1].mT / rows[0].shape[-1] ** 0.5
    return scores.masked_fill(~is_real[:, None, None, :], -1e4).log_softmax(-1)


def _index(name: str, number: int, depth: int, whose: str) -> int:
    """The place of a layer that is counted from 1."""
    if not 1 <= number <= depth:
        raise InputError(f"a term's {name} is {number}; allowed: 1 to {depth}, the layers of the {whose}")
    return number - 1

"""Terms of distillation: the teacher's outputs, labels, hidden states, attention and relations."""

from typing import ClassVar, Literal

from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from bertsmith.data.examples import TaskBatch
from bertsmith.errors import InputError
from bertsmith.models.encoder import EncoderOutput
from bertsmith.objectives.base import Sums, wide
from bertsmith.objectives.distillation.base import DistillationTerm, Pair, added, real_rows, real_sequences
from bertsmith.objectives.supervised import Supervised


class OutputTerm(DistillationTerm):
    """Cross-entropy with the teacher's outputs; numbers and vectors by squared error (Hinton et al. 2015)."""

    kind: Literal["outputs"] = "outputs"
    temperature: float = Field(default=1.0, gt=0)
    """What the scores of both are divided by; the loss is multiplied by its square."""
    reads_outputs: ClassVar[bool] = True

    def sums(self, pair: Pair) -> Sums:
        apart = pair.task.apart(pair.student.outputs, pair.teacher_output.outputs, pair.batch, self.temperature)
        return Sums(apart.sum(), {})

    def count(self, task: Supervised, batch: TaskBatch) -> Tensor:
        return task.comparable_count(batch)


class LabelTerm(DistillationTerm):
    """The labels of the data, as without a teacher."""

    kind: Literal["labels"] = "labels"
    needs_teacher: ClassVar[bool] = False
    reads_outputs: ClassVar[bool] = True

    def sums(self, pair: Pair) -> Sums:
        return Sums(pair.task.sums(pair.student.outputs, pair.batch).loss, {})

    def count(self, task: Supervised, batch: TaskBatch) -> Tensor:
        return task.count(batch)


class HiddenStateTerm(DistillationTerm):
    """Squared errors of the embedding's and of every layer's states, each a mean over the width, added up over layers.

    Real tokens count, pads do not: a sequence teaches the same however it lies in memory.
    """

    kind: Literal["hidden_states"] = "hidden_states"
    layers: tuple[int, ...] | None = None
    """Which states of the student, 0 being the embedding's and i those that leave layer i; None for all."""
    compares_states: ClassVar[bool] = True

    def sums(self, pair: Pair) -> Sums:
        losses = []
        for number in range(len(pair.student.hidden_states)) if self.layers is None else self.layers:
            own, like = pair.real_states(number)
            losses.append((own - like).square().mean(-1).sum())
        return Sums(added(losses), {})


class CosineTerm(DistillationTerm):
    """One minus the cosine of states of real tokens, added up over layers (Sanh et al. 2019)."""

    kind: Literal["cosine"] = "cosine"
    layers: tuple[int, ...] | None = None
    """Which states of the student, counted as in "hidden_states"; None for the last."""
    compares_states: ClassVar[bool] = True

    def sums(self, pair: Pair) -> Sums:
        last = len(pair.student.hidden_states) - 1
        losses = []
        for number in (last,) if self.layers is None else self.layers:
            own, like = pair.real_states(number)
            losses.append((1 - cosine_similarity(own, like, dim=-1)).sum())
        return Sums(added(losses), {})


class PatienceTerm(DistillationTerm):
    """Squared distances between first tokens' states of length 1, over layers (Sun et al. 2019, BERT-PKD, eq. 7)."""

    kind: Literal["patience"] = "patience"
    layers: tuple[int, ...] | None = None
    """Which states of the student, counted as in "hidden_states"; None for all layers but the last, which the outputs
    cover."""
    reduction: Literal["sum", "mean"] = "sum"
    """Over width and layers: the sum of the paper's formula, or the mean of the released code, with which the weights
    of the paper's grid were used."""
    compares_states: ClassVar[bool] = True

    def sums(self, pair: Pair) -> Sums:
        numbers = range(1, len(pair.student.hidden_states) - 1) if self.layers is None else self.layers
        if not numbers:
            raise InputError("a patience term finds no layer below the student's last one; allowed: 2 layers or more")
        losses = []
        for number in numbers:
            own, like = (normalize(states, dim=-1) for states in pair.first_states(number))
            apart = (own - like).square()
            losses.append(apart.sum() if self.reduction == "sum" else apart.mean(-1).sum() / len(numbers))
        return Sums(added(losses), {})

    def count(self, task: Supervised, batch: TaskBatch) -> Tensor:
        return real_sequences(batch).sum()


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
        depth = len(pair.student.blocks)
        losses = []
        for number in range(1, depth + 1) if self.layers is None else self.layers:
            index = _index("layers", number, depth, "student")
            own, like = (
                pair.student.attention_scores(index),
                pair.teacher_output.attention_scores(pair.layer_like(index)).detach(),
            )
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
        mine, theirs = pair.student, pair.teacher_output
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

    def _parts(self, output: EncoderOutput, number: int | None, name: str, whose: str) -> tuple[Tensor, Tensor, Tensor]:
        depth = len(output.blocks)
        return output.projections(_index(name, depth if number is None else number, depth, whose))


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

"""Distillation terms: the teacher's outputs, labels, hidden states, attention and relations."""

from typing import ClassVar, Literal

from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from bertsmith.data.examples import TaskBatch
from bertsmith.errors import InputError
from bertsmith.models.encoder import EncoderOutput
from bertsmith.objectives.base import Sums, wide
from bertsmith.objectives.distillation.base import DistillationTerm, Pair, real_rows, real_sequences, sum_losses
from bertsmith.objectives.supervised import Supervised


class OutputTerm(DistillationTerm):
    """Cross-entropy with the teacher's outputs, squared error of numbers and vectors (Hinton et al. 2015)."""

    kind: Literal["outputs"] = "outputs"
    temperature: float = Field(default=1.0, gt=0)
    """Divides the scores of both; the loss is multiplied by its square."""
    reads_outputs: ClassVar[bool] = True

    def sums(self, pair: Pair) -> Sums:
        student, teacher = pair.student.outputs, pair.teacher_output.outputs
        return Sums(pair.task.distillation_loss(student, teacher, pair.batch, self.temperature).sum(), {})

    def count(self, task: Supervised, batch: TaskBatch) -> Tensor:
        return task.comparable_count(batch)


class LabelTerm(DistillationTerm):
    """The task loss on the labels, as without a teacher."""

    kind: Literal["labels"] = "labels"
    needs_teacher: ClassVar[bool] = False
    reads_outputs: ClassVar[bool] = True

    def sums(self, pair: Pair) -> Sums:
        return Sums(pair.task.sums(pair.student.outputs, pair.batch).loss, {})

    def count(self, task: Supervised, batch: TaskBatch) -> Tensor:
        return task.count(batch)


class HiddenStateTerm(DistillationTerm):
    """Squared error of the embedding's and every layer's hidden states, averaged over width, summed over layers.

    Padding does not count, so the loss does not depend on the layout.
    """

    kind: Literal["hidden_states"] = "hidden_states"
    layers: tuple[int, ...] | None = None
    """Hidden states of the student, 0 for the embedding and i for the output of layer i; None for all."""
    compares_states: ClassVar[bool] = True

    def sums(self, pair: Pair) -> Sums:
        losses = []
        for number in range(len(pair.student.hidden_states)) if self.layers is None else self.layers:
            own, target = pair.real_states(number)
            losses.append((own - target).square().mean(-1).sum())
        return Sums(sum_losses(losses), {})


class CosineTerm(DistillationTerm):
    """One minus the cosine of the hidden states of real tokens, summed over layers (Sanh et al. 2019)."""

    kind: Literal["cosine"] = "cosine"
    layers: tuple[int, ...] | None = None
    """Hidden states of the student, numbered as in "hidden_states"; None for the last."""
    compares_states: ClassVar[bool] = True

    def sums(self, pair: Pair) -> Sums:
        last = len(pair.student.hidden_states) - 1
        losses = []
        for number in (last,) if self.layers is None else self.layers:
            own, target = pair.real_states(number)
            losses.append((1 - cosine_similarity(own, target, dim=-1)).sum())
        return Sums(sum_losses(losses), {})


class PatienceTerm(DistillationTerm):
    """Squared distance of the first tokens' normalised hidden states (Sun et al. 2019, BERT-PKD, eq. 7)."""

    kind: Literal["patience"] = "patience"
    layers: tuple[int, ...] | None = None
    """Hidden states of the student, numbered as in "hidden_states"; None for all layers except the last, which the
    outputs cover."""
    reduction: Literal["sum", "mean"] = "sum"
    """Reduction over width and layers: the sum of the paper's formula, or the mean of the released code, which the
    weights of the paper's grid refer to."""
    compares_states: ClassVar[bool] = True

    def sums(self, pair: Pair) -> Sums:
        numbers = range(1, len(pair.student.hidden_states) - 1) if self.layers is None else self.layers
        if not numbers:
            raise InputError("a patience term needs a layer below the student's last; allowed: 2 layers or more")
        losses = []
        for number in numbers:
            own, target = (normalize(states, dim=-1) for states in pair.first_states(number))
            errors = (own - target).square()
            losses.append(errors.sum() if self.reduction == "sum" else errors.mean(-1).sum() / len(numbers))
        return Sums(sum_losses(losses), {})

    def count(self, task: Supervised, batch: TaskBatch) -> Tensor:
        return real_sequences(batch).sum()


Relation = Literal["query_query", "key_key", "value_value", "query_key"]
_OPERANDS: dict[Relation, tuple[int, int]] = {
    "query_query": (0, 0),
    "key_key": (1, 1),
    "value_value": (2, 2),
    "query_key": (0, 1),
}


class AttentionTerm(DistillationTerm):
    """Squared error of attention scores, averaged over heads, summed over layers (Jiao et al. 2020, eq. 7).

    The mean is over pairs of real tokens. The released code sets scores of at most -100 (padding) to 0 and includes
    them in the mean; here padding is excluded, and low scores of real tokens count.
    """

    kind: Literal["attention"] = "attention"
    layers: tuple[int, ...] | None = None
    """Layers of the student, from 1; None for all."""

    def sums(self, pair: Pair) -> Sums:
        is_real = real_rows(pair.batch)
        is_pair = (is_real[:, :, None] & is_real[:, None, :])[:, None]  # (batch, 1, max_length, max_length)
        depth = len(pair.student.blocks)
        losses = []
        for number in range(1, depth + 1) if self.layers is None else self.layers:
            index = _index("layers", number, depth, "student")
            own, target = (
                pair.student.attention_scores(index),
                pair.teacher_output.attention_scores(pair.teacher_layer(index)).detach(),
            )
            if own.shape[1] != target.shape[1]:
                raise InputError(
                    f"layer {number} of the student has {own.shape[1]} heads and the teacher's {target.shape[1]}; the "
                    "term 'attention' needs equal numbers, the term 'relations' does not"
                )
            counts = is_pair & own.isfinite() & target.isfinite()
            errors = wide(own).masked_fill(~counts, 0) - wide(target).masked_fill(~counts, 0)
            losses.append(errors.square().mean(1).sum())
        return Sums(sum_losses(losses), {})

    def count(self, task: Supervised, batch: TaskBatch) -> Tensor:
        return real_rows(batch).sum(-1).square().sum()


class RelationTerm(DistillationTerm):
    """KL divergence of self-attention relations in one layer (Wang et al. 2021, MiniLMv2).

    A relation is softmax(A·Bᵀ/√width) over the real tokens of a sequence. The heads of both models are concatenated and
    split again, so that neither their numbers nor their widths need be equal. "query_key" and "value_value" are the
    relations of the first MiniLM (Wang et al. 2020).
    """

    kind: Literal["relations"] = "relations"
    relations: tuple[Relation, ...] = Field(default=("query_query", "key_key", "value_value"), min_length=1)
    relation_heads: int | None = Field(default=None, gt=0)
    """Number of heads after splitting again; None for the number of the teacher's layer."""
    layer: int | None = Field(default=None, gt=0)
    """Layer of the student, from 1; None for the last."""
    teacher_layer: int | None = Field(default=None, gt=0)
    """Layer of the teacher, from 1; None for the last. For a large teacher an upper layer below the last is better."""

    @model_validator(mode="after")
    def _check_relations(self) -> "RelationTerm":
        if len(set(self.relations)) < len(self.relations):
            raise ValueError(f"relations is {list(self.relations)}; allowed: each once")
        return self

    def sums(self, pair: Pair) -> Sums:
        own = self._projections(pair.student, self.layer, "layer", "student")
        teacher = self._projections(pair.teacher_output, self.teacher_layer, "teacher_layer", "teacher")
        target = tuple(tensor.detach() for tensor in teacher)
        heads = self.relation_heads or target[0].shape[-2]
        is_real = real_rows(pair.batch)
        losses = []
        for name in self.relations:
            first, second = _OPERANDS[name]
            own_log = _relation(own[first], own[second], heads, pair.batch, is_real, "student")
            target_log = _relation(target[first], target[second], heads, pair.batch, is_real, "teacher")
            divergence = target_log.exp() * (target_log - own_log)  # (batch, heads, max_length, max_length)
            losses.append(divergence.sum(-1).mean(1).masked_fill(~is_real, 0).sum())
        return Sums(sum_losses(losses), {})

    def _projections(
        self, output: EncoderOutput, number: int | None, name: str, whose: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        depth = len(output.blocks)
        return output.projections(_index(name, depth if number is None else number, depth, whose))


def _relation(first: Tensor, second: Tensor, heads: int, batch: TaskBatch, is_real: Tensor, whose: str) -> Tensor:
    """Return log-relations, with a large negative score at padding: (batch, heads, max_length, max_length).

    Shape: first and second (…, heads of the layer, head width), in the batch's layout.
    """
    rows = []
    for tensor in (first, second):
        flat = wide(tensor.flatten(-2))  # (…, heads · head width)
        if flat.shape[-1] % heads:
            raise InputError(
                f"relation_heads is {heads}; allowed: a divisor of {flat.shape[-1]}, the width of the {whose}'s "
                "queries, keys and values"
            )
        # (batch, max_length, width) -> (batch, heads, max_length, width per head)
        rows.append(batch.layout.pad(flat)[0].unflatten(-1, (heads, -1)).transpose(1, 2))
    scores = rows[0] @ rows[1].mT / rows[0].shape[-1] ** 0.5
    return scores.masked_fill(~is_real[:, None, None, :], -1e4).log_softmax(-1)


def _index(name: str, number: int, depth: int, whose: str) -> int:
    """Return the index of a layer that is numbered from 1."""
    if not 1 <= number <= depth:
        raise InputError(f"a term's {name} is {number}; allowed: 1 to {depth}, the layers of the {whose}")
    return number - 1

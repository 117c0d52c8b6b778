"""Pre-training with a teacher: both guess the same masked tokens (Sanh et al. 2019, DistilBERT)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from bertsmith.answers.sequences import IGNORED
from bertsmith.data.batch import TokenBatch
from bertsmith.data.examples import TaskBatch
from bertsmith.layers.subnet import Subnet
from bertsmith.models.encoder import EncoderInputs, EncoderOutput, Want
from bertsmith.models.model import Model
from bertsmith.objectives.base import Objective, Portion, Sums, Term, class_sums
from bertsmith.objectives.distillation.base import DistillationTerm, LayerMap, Pair
from bertsmith.objectives.distillation.objective import Distillation, Lesson, named
from bertsmith.objectives.masked_lm import MaskedLM
from bertsmith.objectives.supervised import Supervised

MASKED_TOKENS = "masked_tokens"


@dataclass(frozen=True)
class MaskedTask(Supervised):
    """Masked tokens as a task: outputs are scores at `places`, of which those without a target are no beliefs."""

    metrics: ClassVar[tuple[str, ...]] = ("accuracy",)

    def sums(self, outputs: Tensor, batch: TaskBatch) -> Sums:
        return class_sums(outputs, batch.targets["tokens"])

    def count(self, batch: TaskBatch) -> Tensor:
        return (batch.targets["tokens"] != IGNORED).sum()

    def comparable_logits(self, outputs: Tensor, batch: TaskBatch) -> Tensor:
        return outputs[batch.targets["tokens"] != IGNORED]

    def comparable_count(self, batch: TaskBatch) -> Tensor:
        return self.count(batch)


@dataclass(frozen=True, kw_only=True)
class MaskedDistillation(Distillation):
    """Losses between a student and its teacher over corrupted text, the masks being the same for both.

    The term "masked_tokens" is the usual one. Without a loss on labels it has no weight and is reported only; then, or
    where the teacher's scores are not asked for either, the head over the vocabulary learns nothing.
    """

    masked: MaskedLM
    label_weight: float = 0.0

    @classmethod
    def of(
        cls, masked: MaskedLM, terms: Sequence[DistillationTerm], teacher: Model, layer_map: LayerMap
    ) -> "MaskedDistillation":
        """The objective for some terms, those on labels being the weight of the usual one."""
        weight = sum(term.weight for term in terms if term.kind == "labels")
        others = named([term for term in terms if term.kind != "labels"])
        return cls(
            MaskedTask(), others, teacher=teacher, layer_map=layer_map, masked=masked, label_weight=float(weight)
        )

    @property
    def terms(self) -> Mapping[str, Term]:  # type: ignore[override]
        return {MASKED_TOKENS: Term(("accuracy",), self.label_weight), **super().terms}

    def to(self, device: torch.device | str) -> "MaskedDistillation":
        moved = super().to(device)
        assert isinstance(moved, MaskedDistillation)
        return replace(moved, masked=self.masked.to(device))

    def prepare(self, batch: TokenBatch, seed: int) -> Lesson:  # type: ignore[override]
        prepared = self.masked.prepare(batch, seed)
        corrupted = prepared.corrupted
        targets = {"positions": corrupted.positions, "tokens": corrupted.targets}
        given = TaskBatch(corrupted.tokens, batch.layout, batch.types, batch.sample, targets, batch.real_tokens)
        return super().prepare(given, seed)

    def counts(self, prepared: Lesson) -> dict[str, Tensor]:
        return {MASKED_TOKENS: self.task.count(prepared.batch), **super().counts(prepared)}

    def for_evaluation(self) -> MaskedLM:  # type: ignore[override]
        return self.masked.for_evaluation()

    def portions(self, model: Model) -> list[Portion]:
        return Objective.portions(self, model)

    def run(self, model: Model, batch: TaskBatch, subnet: Subnet) -> EncoderOutput:
        types = batch.types if model.config.encoder.embedding.types > 1 else None
        inputs, want = EncoderInputs(batch.tokens, batch.layout, types), Want(all_hidden_states=True)
        if model is self.teacher and not any(term.reads_outputs for term in self.terms_by_name.values()):
            return model.run(inputs, want)
        output = model.run(inputs, replace(want, masked_positions=batch.targets["positions"]))
        scores = model.head(MASKED_TOKENS)(output.masked_states, model.token_table)
        # tables may have more rows than there are tokens, and not the same number of them
        return replace(output, task=scores[:, : self.masked.vocabulary.size])

    def sums(self, pair: Pair) -> dict[str, Sums]:
        # with its weight of 0 it gives the weights that no other term asks for the gradient of nothing
        return {
            MASKED_TOKENS: self.task.sums(pair.student.outputs, pair.batch),
            **{name: term.sums(pair) for name, term in self.terms_by_name.items()},
        }

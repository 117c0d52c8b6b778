"""Pre-training with a teacher: both predict the same masked tokens (Sanh et al. 2019, DistilBERT)."""

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
from bertsmith.objectives.distillation.objective import Distillation, DistillationBatch, name_terms
from bertsmith.objectives.masked_lm import MaskedLM
from bertsmith.objectives.supervised import Supervised

MASKED_TOKENS = "masked_tokens"


@dataclass(frozen=True)
class MaskedTask(Supervised):
    """Masked language modelling as a task: outputs are scores at "positions", targets are "tokens"."""

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
    """Losses between a student and its teacher over the same corrupted text.

    The term "masked_tokens" is the ordinary MLM loss. Without a "labels" term its weight is 0 and it is only logged;
    without an "outputs" term as well, the head over the vocabulary is not trained.
    """

    masked: MaskedLM
    label_weight: float = 0.0

    @classmethod
    def of(
        cls, masked: MaskedLM, terms: Sequence[DistillationTerm], teacher: Model, layer_map: LayerMap
    ) -> "MaskedDistillation":
        """Return the objective for some terms; the weights of "labels" terms weight the MLM loss."""
        weight = sum(term.weight for term in terms if term.kind == "labels")
        others = name_terms([term for term in terms if term.kind != "labels"])
        return cls(
            MaskedTask(), others, teacher=teacher, layer_map=layer_map, masked=masked, label_weight=float(weight)
        )

    @property
    def terms(self) -> Mapping[str, Term]:  # type: ignore[override]
        return {MASKED_TOKENS: Term(("accuracy",), self.label_weight), **super().terms}

    def to(self, device: torch.device | str) -> "MaskedDistillation":
        objective = super().to(device)
        assert isinstance(objective, MaskedDistillation)
        return replace(objective, masked=self.masked.to(device))

    def prepare(self, batch: TokenBatch, seed: int) -> DistillationBatch:  # type: ignore[override]
        prepared = self.masked.prepare(batch, seed)
        corrupted = prepared.corrupted
        targets = {"positions": corrupted.positions, "tokens": corrupted.targets}
        task_batch = TaskBatch(corrupted.tokens, batch.layout, batch.types, batch.sample, targets, batch.real_tokens)
        return super().prepare(task_batch, seed)

    def counts(self, prepared: DistillationBatch) -> dict[str, Tensor]:
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
        # token tables may have more rows than the vocabulary, and student and teacher may differ in them
        return replace(output, task=scores[:, : self.masked.vocabulary.size])

    def sums(self, pair: Pair) -> dict[str, Sums]:
        # even with weight 0 it gives zero gradients to weights that no other term uses, as DDP requires
        return {
            MASKED_TOKENS: self.task.sums(pair.student.outputs, pair.batch),
            **{name: term.sums(pair) for name, term in self.terms_by_name.items()},
        }

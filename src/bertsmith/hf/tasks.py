"""Classes for tasks: sequence and token classification, question answering, multiple choice."""

from typing import ClassVar

from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers.modeling_outputs import (
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from bertsmith.checkpoint.hf.task_heads import CHOICE
from bertsmith.errors import InputError
from bertsmith.hf.base import BertsmithConfig, BertsmithPreTrainedModel, HfOutput
from bertsmith.models.config import ModelConfig
from bertsmith.models.heads import HeadConfig, SequenceHeadConfig
from bertsmith.models.heads.task import ClassifierConfig
from bertsmith.tasks.default_heads import classifier_head, spans_head, tagger_head


class _ForTask(BertsmithPreTrainedModel):
    """A class with a task head; a head that the files lack gets fresh weights."""

    def network_config(self, config: BertsmithConfig) -> ModelConfig:
        network = config.network
        own = next((head for head in network.heads if head.kind in self.head_kinds), None)
        if own is not None:
            return network.changed(heads=tuple(self.with_labels(h, config) if h is own else h for h in network.heads))
        head = self.fresh_head(network, config)
        needs_pooler = isinstance(head, SequenceHeadConfig) and head.pooling == "pooler"
        kept = tuple(other for other in network.heads if needs_pooler and other.kind == "pooler")
        return network.changed(heads=(*kept, head))

    def fresh_head(self, network: ModelConfig, config: BertsmithConfig) -> HeadConfig:
        """Config of the head for a model that has none."""
        raise NotImplementedError

    def with_labels(self, head: HeadConfig, config: BertsmithConfig) -> HeadConfig:
        """The model's head with the labels of config.json or of the caller."""
        return head

    def task_outputs(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        others: dict[str, object],
    ) -> tuple[Tensor, dict[str, tuple[Tensor, ...]]]:
        """Outputs of the task head, and requested extras."""
        layout = self.layout(input_ids, attention_mask, others)
        assert input_ids is not None
        logits = self.inner.outputs(input_ids, layout, self.types(token_type_ids))
        return logits, self.extras(input_ids, layout, token_type_ids, others)


class BertsmithForSequenceClassification(_ForTask):
    """Sequence classification, multi-label classification or regression."""

    head_kinds: ClassVar[tuple[str, ...]] = ("classifier",)

    def fresh_head(self, network: ModelConfig, config: BertsmithConfig) -> HeadConfig:
        return classifier_head(network, _labels(config))

    def with_labels(self, head: HeadConfig, config: BertsmithConfig) -> HeadConfig:
        return head.changed(labels=_labels(config))

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **others: object,
    ) -> HfOutput:
        logits, extras = self.task_outputs(input_ids, attention_mask, token_type_ids, others)
        loss = None if labels is None else self.loss_function(labels, logits, self.config)
        return self.make_output(SequenceClassifierOutput, others, loss=loss, logits=logits, **extras)


class BertsmithForTokenClassification(_ForTask):
    """Token classification."""

    head_kinds: ClassVar[tuple[str, ...]] = ("tagger",)

    def fresh_head(self, network: ModelConfig, config: BertsmithConfig) -> HeadConfig:
        return tagger_head(network, _labels(config))

    def with_labels(self, head: HeadConfig, config: BertsmithConfig) -> HeadConfig:
        return head.changed(labels=_labels(config))

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **others: object,
    ) -> HfOutput:
        logits, extras = self.task_outputs(input_ids, attention_mask, token_type_ids, others)
        loss = None if labels is None else self.loss_function(logits, labels, self.config)
        return self.make_output(TokenClassifierOutput, others, loss=loss, logits=logits, **extras)


class BertsmithForQuestionAnswering(_ForTask):
    """Start and end of the answer."""

    head_kinds: ClassVar[tuple[str, ...]] = ("spans",)

    def fresh_head(self, network: ModelConfig, config: BertsmithConfig) -> HeadConfig:
        return spans_head(network)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **others: object,
    ) -> HfOutput:
        logits, extras = self.task_outputs(input_ids, attention_mask, token_type_ids, others)
        start, end = (part.contiguous() for part in logits.unbind(-1))
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start, end, start_positions, end_positions)
        return self.make_output(
            QuestionAnsweringModelOutput, others, loss=loss, start_logits=start, end_logits=end, **extras
        )


class BertsmithForMultipleChoice(_ForTask):
    """Multiple choice among the sequences of an item."""

    head_kinds: ClassVar[tuple[str, ...]] = ("classifier",)

    def fresh_head(self, network: ModelConfig, config: BertsmithConfig) -> HeadConfig:
        return classifier_head(network, CHOICE)

    def with_labels(self, head: HeadConfig, config: BertsmithConfig) -> HeadConfig:
        if isinstance(head, ClassifierConfig) and len(head.labels) != 1:
            raise InputError(f"the model's head has {len(head.labels)} labels; a head for choices has one score")
        return head

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **others: object,
    ) -> HfOutput:
        """The scores of the choices: (batch, choices, length) -> (batch, choices)."""
        if input_ids is None or input_ids.dim() != 3:
            shape = "missing" if input_ids is None else f"of shape {tuple(input_ids.shape)}"
            raise InputError(f"input_ids is {shape}; allowed: (batch, choices, length)")
        rows = [None if given is None else given.flatten(0, 1) for given in (input_ids, attention_mask, token_type_ids)]
        scores, extras = self.task_outputs(rows[0], rows[1], rows[2], others)
        logits = scores.view(input_ids.shape[:2])
        loss = None if labels is None else cross_entropy(logits, labels)
        return self.make_output(MultipleChoiceModelOutput, others, loss=loss, logits=logits, **extras)


def _labels(config: BertsmithConfig) -> tuple[str, ...]:
    return tuple(name for _, name in sorted((config.id2label or {}).items()))

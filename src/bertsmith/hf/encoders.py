"""Classes for hidden states and pre-training heads: masked, replaced and next tokens, and seq2seq."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    CausalLMOutput,
    MaskedLMOutput,
    ModelOutput,
    Seq2SeqLMOutput,
)

from bertsmith.errors import InputError
from bertsmith.hf.base import BertsmithPreTrainedModel, HfOutput
from bertsmith.layers.context import Memory
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.seq2seq import GenerationConfig, Seq2Seq


@dataclass
class BertsmithForPreTrainingOutput(ModelOutput):
    """A score for every token, above 0 for "replaced".

    Shape: logits (batch, length).
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class BertsmithModel(BertsmithPreTrainedModel):
    """The last hidden states; `pooler_output` is the vector of the embedder or pooler, if the model has one."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **others: object,
    ) -> HfOutput:
        layout = self.layout(input_ids, attention_mask, others)
        assert input_ids is not None
        model, types = self.inner, self.types(token_type_ids)
        states = model.encoder(input_ids, layout, types)
        pooled = None
        if "embedder" in model.heads:
            pooled = model.outputs(input_ids, layout, types)
        elif "pooler" in model.heads:
            pooled = model.heads["pooler"](layout.first_tokens(states))
        extras = self.extras(input_ids, layout, token_type_ids, others)
        return self.make_output(
            BaseModelOutputWithPooling, others, last_hidden_state=states, pooler_output=pooled, **extras
        )


class BertsmithForMaskedLM(BertsmithPreTrainedModel):
    """Scores over the vocabulary at every token, from the mask decoder if the model has one."""

    head_kinds: ClassVar[tuple[str, ...]] = ("masked_tokens",)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **others: object,
    ) -> HfOutput:
        layout = self.layout(input_ids, attention_mask, others)
        assert input_ids is not None
        model, size = self.inner, self.inner.config.encoder.vocabulary
        is_token = torch.ones_like(input_ids, dtype=torch.bool) if layout.is_token is None else layout.is_token
        positions = is_token.flatten().nonzero().squeeze(-1)
        inputs = EncoderInputs(input_ids, layout, self.types(token_type_ids))
        output = model.run(inputs, Want(masked_positions=positions))
        scores = model.head("masked_tokens")(output.masked_states, model.token_table)[..., :size]
        logits = scores.new_zeros(*input_ids.shape, size)
        logits[is_token] = scores
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=size)
        extras = self.extras(input_ids, layout, token_type_ids, others)
        return self.make_output(MaskedLMOutput, others, loss=loss, logits=logits, **extras)


class BertsmithForCausalLM(BertsmithPreTrainedModel):
    """Scores over the vocabulary for the token after each; has no `generate`."""

    head_kinds: ClassVar[tuple[str, ...]] = ("next_token", "masked_tokens")

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **others: object,
    ) -> HfOutput:
        layout = self.layout(input_ids, attention_mask, others)
        assert input_ids is not None
        model, size = self.inner, self.inner.config.encoder.vocabulary
        head = model.head("next_token" if "next_token" in model.heads else "masked_tokens")
        states = model.encoder(input_ids, layout, self.types(token_type_ids))
        logits = head(states, model.token_table)[..., :size]
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=size)
        extras = self.extras(input_ids, layout, token_type_ids, others)
        return self.make_output(CausalLMOutput, others, loss=loss, logits=logits, **extras)


class BertsmithForPreTraining(BertsmithPreTrainedModel):
    """Replaced-token detection."""

    head_kinds: ClassVar[tuple[str, ...]] = ("replaced_tokens",)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **others: object,
    ) -> HfOutput:
        layout = self.layout(input_ids, attention_mask, others)
        assert input_ids is not None
        model = self.inner
        states = model.encoder(input_ids, layout, self.types(token_type_ids))
        logits = model.head("replaced_tokens")(states, layout)
        loss = None
        if labels is not None:
            real = ... if layout.is_token is None else layout.is_token
            loss = binary_cross_entropy_with_logits(logits[real], labels[real].to(logits.dtype))
        extras = self.extras(input_ids, layout, token_type_ids, others)
        return self.make_output(BertsmithForPreTrainingOutput, others, loss=loss, logits=logits, **extras)


class BertsmithForSeq2SeqLM(BertsmithPreTrainedModel):
    """Sequence-to-sequence model: scores of the target tokens."""

    head_kinds: ClassVar[tuple[str, ...]] = ("next_token",)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **others: object,
    ) -> HfOutput:
        layout = self.layout(input_ids, attention_mask, others)
        if decoder_input_ids is None:
            if labels is None:
                raise InputError("decoder_input_ids is missing; give them, or labels to make them of")
            decoder_input_ids = self._shifted(labels)
        target = self.layout(decoder_input_ids, decoder_attention_mask, {})
        states = self.inner.encoder(input_ids, layout)
        model = self._seq2seq
        scores = model.scores(model.decode(decoder_input_ids, target, Memory(states, layout)))
        logits = scores[..., : self._target_size]
        loss = None
        if labels is not None:
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return self.make_output(Seq2SeqLMOutput, others, loss=loss, logits=logits, encoder_last_hidden_state=states)

    @torch.inference_mode()
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        config: GenerationConfig | None = None,
    ) -> Tensor:
        """Generate by our own search; rows with start, end and padding: (batch, length)."""
        start, end, pad = (self._token(role) for role in ("decoder_start", "eos", "pad"))
        rows = self._seq2seq.generate(input_ids, attention_mask, config, start=start, end=end)
        max_length = max(map(len, rows)) + 2
        made = [[start, *row, end, *[pad] * (max_length - 2 - len(row))] for row in rows]
        return torch.tensor(made, device=input_ids.device)

    @property
    def _seq2seq(self) -> Seq2Seq:
        model = self.inner
        if not isinstance(model, Seq2Seq):
            raise InputError("this model has no decoder; open it with AutoModel")
        return model

    @property
    def _target_size(self) -> int:
        decoder = self._seq2seq.config.decoder
        assert decoder is not None
        return decoder.vocabulary

    def _shifted(self, labels: Tensor) -> Tensor:
        """Decoder inputs: the start token and the target, with padding instead of ignored labels."""
        first = torch.full_like(labels[:, :1], self._token("decoder_start"))
        return torch.cat([first, labels[:, :-1]], dim=1).masked_fill_(
            torch.cat([torch.zeros_like(first), labels[:, :-1]], dim=1) == -100, self._token("pad")
        )

    def _token(self, role: str) -> int:
        value = getattr(self.config, f"{role}_token_id", None)
        if value is None:
            raise InputError(f"{role}_token_id is missing in config.json; export the model with its tokenizer")
        return int(value)

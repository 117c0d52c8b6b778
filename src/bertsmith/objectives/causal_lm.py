"""Causal language modelling: predict the next token at every position from the tokens before it.

For BERT this is the left-to-right ablation of Devlin et al. 2019, section 5.1, for Performer the unidirectional
training. A mask decoder is causal as well: at position i it predicts token i + 1.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from bertsmith.answers.sequences import IGNORED
from bertsmith.data.batch import TokenBatch
from bertsmith.data.corruption import MaskingConfig
from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.models.config import ModelConfig
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.model import Model
from bertsmith.objectives.base import Objective, ObjectiveConfig, Sums, Term, token_sums
from bertsmith.objectives.masked_lm import (
    MaskedBatch,
    MaskedLM,
    MaskedLMConfig,
    encoder_counts,
    encoder_sums,
    encoder_terms,
)
from bertsmith.text.tokenizer import Tokenizer


class CausalLMConfig(ObjectiveConfig):
    """Predict the next token at every position; the trained model's config is causal."""

    kind: Literal["causal_lm"] = "causal_lm"

    @property
    def heads(self) -> tuple[str, ...]:
        return ("masked_tokens",)

    @property
    def targets_per_token(self) -> float:
        return 1.0

    @property
    def token_term(self) -> str:
        return "next_token"

    def network(self, config: ModelConfig) -> ModelConfig:
        return config.causal()

    def build(
        self, tokenizer: Tokenizer, ponder_weight: float | None = None, jacobian_weight: float | None = None
    ) -> "CausalLM":
        return CausalLM(ponder_weight, jacobian_weight)


@dataclass(frozen=True)
class CausalBatch:
    """A batch and the next token at every position.

    Shape: targets (tokens,), in the order of the flattened tokens.
    """

    tokens: Tensor
    layout: SequenceLayout
    types: Tensor | None
    targets: Tensor
    is_real: Tensor | None = None
    """True where tokens are not padding, for a term of the encoder; None without one."""


class CausalLM(Objective[TokenBatch, CausalBatch]):
    """Cross-entropy of every next token, including [SEP], plus the term of an encoder that has one (masked_lm.py)."""

    def __init__(self, ponder_weight: float | None = None, jacobian_weight: float | None = None) -> None:
        own_terms = encoder_terms(ponder_weight, jacobian_weight)
        self.has_encoder_term = bool(own_terms)
        self.terms = {"next_token": Term(("accuracy",)), **own_terms}

    def to(self, device: torch.device | str) -> "CausalLM":
        return self

    def prepare(self, batch: TokenBatch, seed: int) -> CausalBatch:
        is_real = batch.is_real if self.has_encoder_term else None
        return CausalBatch(batch.tokens, batch.layout, batch.types, next_tokens(batch), is_real)

    def counts(self, prepared: CausalBatch) -> dict[str, Tensor]:
        counts = {"next_token": (prepared.targets != IGNORED).sum()}
        return {**counts, **encoder_counts(self.terms, prepared.is_real)}

    def __call__(self, model: Model, prepared: CausalBatch) -> dict[str, Sums]:
        positions = torch.arange(prepared.targets.shape[0], device=prepared.targets.device)
        # causal even if the model's config is not, so that no position sees its target
        inputs = EncoderInputs(prepared.tokens, prepared.layout, prepared.types, is_causal=True)
        output = model.run(inputs, Want(masked_positions=positions))
        return {
            "next_token": token_sums(model.masked_loss(output.masked_states, prepared.targets)),
            **encoder_sums(output, self.terms, prepared.is_real),
        }

    def for_evaluation(self) -> "CausalLM":
        return self


def next_tokens(batch: TokenBatch) -> Tensor:
    """Return the next token of every token in its sequence, IGNORED at the end and before padding: (tokens,)."""
    tokens, layout = batch.tokens, batch.layout
    position, sequence = layout.positions(tokens).flatten(), layout.sequence_index(tokens).flatten()
    has_next = position + 1 < layout.lengths(tokens.device)[sequence]
    # (batch, length) or (tokens,) -> (tokens,); the element that wraps around has no next token
    following, is_real = tokens.flatten().long().roll(-1), batch.is_real.flatten().roll(-1)
    return torch.where(has_next & is_real, following, IGNORED)


class MaskedAndCausalConfig(ObjectiveConfig):
    """Predict masked tokens from both directions, and next tokens causally."""

    kind: Literal["masked_and_causal"] = "masked_and_causal"
    masking: MaskingConfig = MaskingConfig()
    causal_weight: float = Field(default=1.0, gt=0)
    """Weight of the next-token loss relative to the masked-token loss."""

    @property
    def heads(self) -> tuple[str, ...]:
        return ("masked_tokens",)

    @property
    def passes(self) -> int:
        return 2

    @property
    def targets_per_token(self) -> float:
        return (self.masking.rate + 1.0) / self.passes

    @property
    def token_term(self) -> str:
        return "masked_tokens"

    def network(self, config: ModelConfig) -> ModelConfig:
        self._check_halting(config.encoder.ponder_weight)
        for index, layer in enumerate(config.encoder.layers):
            if layer.mixer.is_causal:
                raise InputError(f"encoder.layers.{index}.mixer.is_causal is true; allowed with {self.kind}: false")
        config.causal()  # raises if the network does not support causal attention
        return config

    def build(
        self, tokenizer: Tokenizer, ponder_weight: float | None = None, jacobian_weight: float | None = None
    ) -> "MaskedAndCausal":
        self._check_halting(ponder_weight)
        if jacobian_weight is not None:
            raise InputError(f"encoder.equilibrium is given; allowed with {self.kind}: an encoder without it")
        masked = MaskedLMConfig(masking=self.masking).build(tokenizer)
        return MaskedAndCausal(masked, CausalLM(), self.causal_weight)

    def _check_halting(self, ponder_weight: float | None) -> None:
        if ponder_weight is not None:
            raise InputError(f"encoder.universal.halting is given; allowed with {self.kind}: an encoder without it")


@dataclass(frozen=True)
class BothBatches:
    """One batch prepared for both objectives."""

    masked: MaskedBatch
    causal: CausalBatch


class MaskedAndCausal(Objective[TokenBatch, BothBatches]):
    """Terms of both objectives; the causal ones are multiplied by `weight`."""

    def __init__(self, masked: MaskedLM, causal: CausalLM, weight: float) -> None:
        self.masked, self.causal, self.weight = masked, causal, weight
        weighted = {name: replace(term, weight=weight * term.weight) for name, term in causal.terms.items()}
        self.terms = {**masked.terms, **weighted}

    def to(self, device: torch.device | str) -> "MaskedAndCausal":
        return MaskedAndCausal(self.masked.to(device), self.causal.to(device), self.weight)

    def prepare(self, batch: TokenBatch, seed: int) -> BothBatches:
        return BothBatches(self.masked.prepare(batch, seed), self.causal.prepare(batch, seed))

    def counts(self, prepared: BothBatches) -> dict[str, Tensor]:
        return {**self.masked.counts(prepared.masked), **self.causal.counts(prepared.causal)}

    def __call__(self, model: Model, prepared: BothBatches) -> dict[str, Sums]:
        return {**self.masked(model, prepared.masked), **self.causal(model, prepared.causal)}

    def for_evaluation(self) -> "MaskedAndCausal":
        return MaskedAndCausal(self.masked.for_evaluation(), self.causal.for_evaluation(), self.weight)

"""Masked and causal language modelling with the same weights: DeBERTa-MT (He et al. 2021, appendix A.4).

Every micro-batch is learned from twice, once masked and seeing both ways, once as it stands and seeing what is before:

    loss = masked + causal_weight · causal

The paper leaves open how the two are mixed; docs/decisions.md says why it is done so here.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from bertsmith.data.batch import TokenBatch
from bertsmith.data.corruption import MaskingConfig
from bertsmith.errors import InputError
from bertsmith.models.config import ModelConfig
from bertsmith.models.model import Model
from bertsmith.objectives.base import Objective, ObjectiveConfig, Sums
from bertsmith.objectives.causal_lm import CausalBatch, CausalLM
from bertsmith.objectives.masked_lm import MaskedBatch, MaskedLM, MaskedLMConfig
from bertsmith.text.tokenizer import Tokenizer


class MaskedAndCausalConfig(ObjectiveConfig):
    """Guess the masked tokens, seeing both ways, and say every next token, seeing what stands before."""

    kind: Literal["masked_and_causal"] = "masked_and_causal"
    masking: MaskingConfig = MaskingConfig()
    causal_weight: float = Field(default=1.0, gt=0)
    """Of the next tokens' loss beside the masked tokens'."""

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
        config.causal()  # says so if this network cannot be
        return config

    def build(self, tokenizer: Tokenizer, ponder_weight: float | None = None) -> "MaskedAndCausal":
        self._check_halting(ponder_weight)
        masked = MaskedLMConfig(masking=self.masking).build(tokenizer)
        return MaskedAndCausal(masked, CausalLM(), self.causal_weight)

    def _check_halting(self, ponder_weight: float | None) -> None:
        if ponder_weight is not None:
            raise InputError(f"encoder.universal.halting is given; allowed with {self.kind}: an encoder without it")


@dataclass(frozen=True)
class BothBatches:
    """One batch as both objectives want it."""

    masked: MaskedBatch
    causal: CausalBatch


class MaskedAndCausal(Objective[TokenBatch, BothBatches]):
    """The terms of both objectives, those of the causal one weighted."""

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

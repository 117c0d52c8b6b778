"""Causal language modelling: say the next token at every place, knowing only what stands before it.

With a BERT this is the left-to-right ablation of Devlin et al. 2019, section 5.1, with a Performer its unidirectional
training. A mask decoder looks back as well: at place i it says token i + 1.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bertsmith.answers.sequences import IGNORED
from bertsmith.data.batch import TokenBatch
from bertsmith.data.layout import SequenceLayout
from bertsmith.models.config import ModelConfig
from bertsmith.models.model import Model
from bertsmith.objectives.base import Objective, ObjectiveConfig, Sums, Term
from bertsmith.objectives.losses import class_sums
from bertsmith.objectives.masked_lm import ponder_sums
from bertsmith.text.tokenizer import Tokenizer


class CausalLMConfig(ObjectiveConfig):
    """Say the next token at every place; the model that is trained is causal in its config."""

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

    def build(self, tokenizer: Tokenizer, ponder_weight: float | None = None) -> "CausalLM":
        return CausalLM(ponder_weight)


@dataclass(frozen=True)
class CausalBatch:
    """A batch as it stands and the next token of every place.

    Shape: targets (tokens,), in the order of the flattened tokens.
    """

    tokens: Tensor
    layout: SequenceLayout
    types: Tensor | None
    targets: Tensor
    is_real: Tensor | None = None
    """Where tokens are neither pads nor filling, for the ponder cost; None without one."""


class CausalLM(Objective[TokenBatch, CausalBatch]):
    """Cross-entropy of every next token, [SEP] included; the ponder cost of an encoder that halts."""

    def __init__(self, ponder_weight: float | None = None) -> None:
        self.ponder_weight = ponder_weight
        self.terms = {"next_token": Term(("accuracy",))}
        if ponder_weight is not None:
            self.terms["ponder"] = Term(("halted_early",), weight=ponder_weight)

    def to(self, device: torch.device | str) -> "CausalLM":
        return self

    def prepare(self, batch: TokenBatch, seed: int) -> CausalBatch:
        is_real = None if self.ponder_weight is None else batch.is_real
        return CausalBatch(batch.tokens, batch.layout, batch.types, next_tokens(batch), is_real)

    def counts(self, prepared: CausalBatch) -> dict[str, Tensor]:
        counts = {"next_token": (prepared.targets != IGNORED).sum()}
        return counts if prepared.is_real is None else {**counts, "ponder": prepared.is_real.sum()}

    def __call__(self, model: Model, prepared: CausalBatch) -> dict[str, Sums]:
        places = torch.arange(prepared.targets.shape[0], device=prepared.targets.device)
        # the call is causal, so that a model whose config is not learns no short cut through the future
        states, encoded = model.masked_states(prepared.tokens, prepared.layout, prepared.types, places, is_causal=True)
        scores = model.head("masked_tokens")(states, model.token_table)  # (tokens, width) -> (tokens, vocabulary)
        return {"next_token": class_sums(scores, prepared.targets), **ponder_sums(encoded, prepared.is_real)}

    def for_evaluation(self) -> "CausalLM":
        return self


def next_tokens(batch: TokenBatch) -> Tensor:
    """The token after every token of its own sequence, IGNORED where none follows or only filling: (tokens,)."""
    tokens, layout = batch.tokens, batch.layout
    position, sequence = layout.positions(tokens).flatten(), layout.sequence_index(tokens).flatten()
    has_next = position + 1 < layout.lengths(tokens.device)[sequence]
    # (batch, length) or (tokens,) -> (tokens,); what rolls round to the end is at a place without a next one
    following, is_real = tokens.flatten().long().roll(-1), batch.is_real.flatten().roll(-1)
    return torch.where(has_next & is_real, following, IGNORED)

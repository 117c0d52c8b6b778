"""Masked language modelling, with or without next-sentence prediction (Devlin et al. 2019)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bertsmith.answers.sequences import IGNORED
from bertsmith.data.batch import TokenBatch
from bertsmith.data.corruption import Corrupted, MaskingConfig, Vocabulary, corrupt
from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.models.encoder import EncoderInputs, EncoderOutput, Want
from bertsmith.models.model import Model
from bertsmith.objectives.base import Objective, ObjectiveConfig, Share, Sums, Term, class_sums, token_sums
from bertsmith.text.tokenizer import Tokenizer


class MaskedLMConfig(ObjectiveConfig):
    """Predict masked tokens and optionally whether the second segment follows the first."""

    kind: Literal["masked_lm"] = "masked_lm"
    masking: MaskingConfig = MaskingConfig()
    next_sentence: bool = False
    """Whether to predict the next sentence; needs sequences.cut = "sentence_pairs"."""

    @property
    def heads(self) -> tuple[str, ...]:
        return ("masked_tokens", "pooler", "next_sentence") if self.next_sentence else ("masked_tokens",)

    @property
    def targets_per_token(self) -> float:
        return self.masking.rate

    @property
    def token_term(self) -> str:
        return "masked_tokens"

    def build(
        self, tokenizer: Tokenizer, ponder_weight: float | None = None, jacobian_weight: float | None = None
    ) -> "MaskedLM":
        return MaskedLM(self, vocabulary_of(tokenizer), ponder_weight, jacobian_weight)


@dataclass(frozen=True)
class MaskedBatch:
    """A corrupted batch and its targets."""

    corrupted: Corrupted
    layout: SequenceLayout
    types: Tensor | None
    sentence_targets: Tensor | None
    """(batch,): 0 where the second segment follows the first, 1 where not, as in the released models."""
    is_real: Tensor | None = None
    """True where tokens are not padding, for a term of the encoder; None without one."""


class MaskedLM(Objective[TokenBatch, MaskedBatch]):
    """Cross-entropy at masked positions and of the next sentence, plus the term of an encoder that has one.

    An encoder with halting adds its ponder cost, an equilibrium its Jacobian regularisation.
    """

    def __init__(
        self,
        config: MaskedLMConfig,
        vocabulary: Vocabulary,
        ponder_weight: float | None = None,
        jacobian_weight: float | None = None,
    ) -> None:
        self.config, self.vocabulary = config, vocabulary
        self.ponder_weight, self.jacobian_weight = ponder_weight, jacobian_weight
        self.terms = {"masked_tokens": Term(("accuracy",))}
        if config.next_sentence:
            self.terms["next_sentence"] = Term(("accuracy",))
        self.terms |= encoder_terms(ponder_weight, jacobian_weight)

    def to(self, device: torch.device | str) -> "MaskedLM":
        return MaskedLM(self.config, self.vocabulary.to(device), self.ponder_weight, self.jacobian_weight)

    def prepare(self, batch: TokenBatch, seed: int) -> MaskedBatch:
        corrupted = corrupt(batch, seed, self.config.masking, self.vocabulary)
        sentence_targets = None
        if self.config.next_sentence:
            if batch.is_next is None:
                raise InputError('objective.next_sentence is true, which needs sequences.cut = "sentence_pairs"')
            sentence_targets = torch.where(batch.is_next >= 0, 1 - batch.is_next, IGNORED)
        has_term = self.ponder_weight is not None or self.jacobian_weight is not None
        is_real = batch.is_real if has_term else None
        return MaskedBatch(corrupted, batch.layout, batch.types, sentence_targets, is_real)

    def counts(self, prepared: MaskedBatch) -> dict[str, Tensor]:
        counts = {"masked_tokens": (prepared.corrupted.targets != IGNORED).sum()}
        if prepared.sentence_targets is not None:
            counts["next_sentence"] = (prepared.sentence_targets != IGNORED).sum()
        return {**counts, **encoder_counts(self.terms, prepared.is_real)}

    def __call__(self, model: Model, prepared: MaskedBatch) -> dict[str, Sums]:
        corrupted, has_pairs = prepared.corrupted, prepared.sentence_targets is not None
        # hidden states are computed at the masked positions only: (targets, width)
        inputs = EncoderInputs(corrupted.tokens, prepared.layout, prepared.types)
        output = model.run(inputs, Want(masked_positions=corrupted.positions, final=has_pairs))
        sums = {"masked_tokens": token_sums(model.masked_loss(output.masked_states, corrupted.targets))}
        if prepared.sentence_targets is not None:
            pooled = model.head("pooler")(prepared.layout.first_tokens(output.last))
            sums["next_sentence"] = class_sums(model.head("next_sentence")(pooled), prepared.sentence_targets)
        return {**sums, **encoder_sums(output, self.terms, prepared.is_real)}

    def for_evaluation(self) -> "MaskedLM":
        # 15 % of single tokens, 80/10/10: losses at different rates are not comparable
        plain = self.config.model_copy(update={"masking": MaskingConfig()})
        return MaskedLM(plain, self.vocabulary, self.ponder_weight, self.jacobian_weight)


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """Return the properties of a tokenizer that masking needs."""
    is_special = torch.zeros(tokenizer.size, dtype=torch.bool)
    is_special[list(tokenizer.special_ids)] = True
    return Vocabulary(tokenizer.size, tokenizer.mask, is_special, torch.from_numpy(tokenizer.starts_word))


def encoder_terms(ponder_weight: float | None, jacobian_weight: float | None) -> dict[str, Term]:
    """Return the terms of an encoder with halting or of an equilibrium; none for None."""
    terms = {}
    if ponder_weight is not None:
        terms["ponder"] = Term(("halted_early",), weight=ponder_weight)
    if jacobian_weight is not None:
        terms["jacobian"] = Term(("residual", "iterations"), weight=jacobian_weight)
    return terms


def encoder_counts(terms: Mapping[str, Term], is_real: Tensor | None) -> dict[str, Tensor]:
    """Return the number of targets of the encoder's terms: all real tokens."""
    return {} if is_real is None else {name: is_real.sum() for name in ("ponder", "jacobian") if name in terms}


def encoder_sums(output: EncoderOutput, terms: Mapping[str, Term], is_real: Tensor | None) -> dict[str, Sums]:
    """Return the sums of the encoder's terms.

    "ponder" is the cost of halting, with the share of positions that halted early. "jacobian" is the Jacobian
    regularisation of an equilibrium, 0 in steps that do not compute it, with the mean residual and number of iterations
    of the sequences.
    Shape: is_real like the tokens; None if the objective has no term of the encoder.
    """
    pondering, convergence = output.pondering, output.convergence
    if ("ponder" in terms) != (pondering is not None):
        raise InputError(
            "only one of objective (ponder_weight) and encoder (halting) is set up for halting; both must be"
        )
    if ("jacobian" in terms) != (convergence is not None):
        raise InputError(
            "only one of objective (jacobian_weight) and encoder (equilibrium) is set up for an equilibrium; both "
            "must be"
        )
    if is_real is None:
        return {}
    sums = {}
    if pondering is not None:
        cost = torch.where(is_real, pondering.cost, 0).sum()
        is_early = is_real & (pondering.steps < pondering.steps_run)
        sums["ponder"] = Sums(cost, {"halted_early": Share(is_early.sum(), is_real.sum())})
    if convergence is not None:
        residual, iterations = convergence.residual, convergence.iterations
        sequences = (iterations > 0).sum()
        loss = residual.new_zeros(()) if convergence.jacobian is None else convergence.jacobian
        metrics = {
            "residual": Share(residual.sum(), sequences),
            "iterations": Share(iterations.sum(), sequences),
        }
        sums["jacobian"] = Sums(loss, metrics)
    return sums

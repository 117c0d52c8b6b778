"""Translation with teacher forcing: the decoder predicts every next token of the true target (Vaswani et al. 2017)."""

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from bertsmith.answers.sequences import IGNORED
from bertsmith.data.pairs import PairBatch
from bertsmith.errors import InputError
from bertsmith.layers.context import Memory
from bertsmith.models.model import Model
from bertsmith.models.seq2seq import Seq2Seq
from bertsmith.objectives.base import Objective, Share, Sums, Term
from bertsmith.settings import Record


class TranslationConfig(Record):
    """Predict the next target token from the source and the target so far."""

    kind: Literal["translation"] = "translation"
    smoothing: float = Field(default=0.1, ge=0, lt=1)
    """Label smoothing: probability spread evenly over all tokens except the correct one (as in tensor2tensor)."""

    @property
    def heads(self) -> tuple[str, ...]:
        """Heads that this objective trains."""
        return ("next_token",)

    @property
    def targets_per_token(self) -> float:
        """Fraction of tokens whose scores are computed: about half are target tokens."""
        return 0.5

    def build(self) -> "TranslationObjective":
        return TranslationObjective(self)


@dataclass(frozen=True)
class TeacherForced:
    """A batch and its number of target tokens."""

    batch: PairBatch
    count: Tensor


class TranslationObjective(Objective[PairBatch, TeacherForced]):
    """Cross-entropy of every next token with label smoothing; the metric `nll` is without smoothing."""

    def __init__(self, config: TranslationConfig) -> None:
        self.config = config
        self.terms = {"next_token": Term(("accuracy", "nll"))}

    def to(self, device: torch.device | str) -> "TranslationObjective":
        return self

    def prepare(self, batch: PairBatch, seed: int) -> TeacherForced:
        return TeacherForced(batch, (batch.expected != IGNORED).sum())

    def counts(self, prepared: TeacherForced) -> dict[str, Tensor]:
        return {"next_token": prepared.count}

    def __call__(self, model: Model, prepared: TeacherForced) -> dict[str, Sums]:
        translator, batch = require_seq2seq(model), prepared.batch
        # (batch, length, width) or (tokens, width) -> (tokens, width)
        states = target_states(translator, batch).flatten(0, -2)
        loss = translator.next_token_loss(states, batch.expected.flatten(), self.config.smoothing)
        metrics = {"accuracy": Share(loss.hits, loss.targets), "nll": Share(loss.nll, loss.targets)}
        return {"next_token": Sums(loss.loss, metrics)}

    def for_evaluation(self) -> "TranslationObjective":
        # without smoothing the loss is the log-perplexity, comparable between runs
        return TranslationObjective(TranslationConfig(smoothing=0.0))


def target_scores(model: Model, batch: PairBatch) -> Tensor:
    """Return the scores of every next token; position t of a target sees the source and the target up to t.

    Shape: (batch, length, vocabulary) or (tokens, vocabulary), the last axis padded as in `Seq2Seq.scores`.
    """
    model = require_seq2seq(model)
    return model.scores(target_states(model, batch))


def target_states(model: Seq2Seq, batch: PairBatch) -> Tensor:
    """Return the decoder's hidden states, (batch, length, width) or (tokens, width)."""
    hidden_states = model.encoder(batch.source, batch.source_layout)
    return model.decode(batch.target, batch.target_layout, Memory(hidden_states, batch.source_layout))


def require_seq2seq(model: Model) -> Seq2Seq:
    """Return the model if it has a decoder; raise InputError otherwise."""
    if not isinstance(model, Seq2Seq):
        raise InputError(f"this {model.config.family} model has no decoder; translation needs one (transformer-base …)")
    return model

"""Training of a decoder with exits (Elbayad et al. 2020): aligned losses of all exits, and a chooser that learns q.

Aligned training: the teacher-forced pass computes the hidden states of every block, and every exit predicts the right
token, or the last head's distribution, from its own. The chooser learns from an oracle, without a gradient into the
decoder.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bertsmith.answers.sequences import IGNORED
from bertsmith.data.layout import SequenceLayout
from bertsmith.data.pairs import PairBatch
from bertsmith.layers.context import Memory
from bertsmith.models.encoder import EncoderInputs, EncoderOutput, Want
from bertsmith.models.heads import DecoderExitsConfig
from bertsmith.models.heads.decoder_exits import DecoderExits
from bertsmith.models.model import Model
from bertsmith.models.seq2seq import Seq2Seq
from bertsmith.objectives.base import Objective, Share, Sums, Term, wide
from bertsmith.objectives.translation import TeacherForced, require_seq2seq
from bertsmith.ops.token_loss import from_scores
from bertsmith.settings import Record

CHUNK_SCORES = {"cpu": 2**20, "cuda": 2**23}
"""Scores over the vocabulary that are computed at a time; chunks in the cache of a CPU take half the time."""
KEPT_SCORES = 2**26
"""Scores of all heads up to which they are kept for the backward pass; more are computed again, chunk by chunk."""

LearnFrom = Literal["labels", "answers"]
"""Targets of the exits: the right tokens, or the last head's probabilities (self-distillation)."""


class OracleConfig(Record):
    """Targets of a chooser: the exits of largest score - extra_cost · blocks."""

    score: Literal["likelihood", "correctness", "agreement"] = "likelihood"
    """The log-probability of the right token; 1 if it is the likeliest one; or 1 if the exit's likeliest token is the
    last head's. Summed over a sequence with choose = "sequence"."""
    extra_cost: float = Field(default=0.1, ge=0)
    """λ: the score that one more block must add."""
    neighbours: float = Field(default=0.0, ge=0)
    """σ: token t takes the scores of tokens t' with weights exp(-|t - t'|² / σ); 0 for its own score alone."""
    weight: float = Field(default=1.0, gt=0)
    """α: weight of the chooser's loss."""


@dataclass(frozen=True)
class ExitScores:
    """Losses and predictions of all heads for the right tokens, the last block's head last; only `loss` has a gradient.

    Shape: log_likelihoods, probabilities, are_right and predictions (heads, tokens), 0 at padding; loss (heads,), sums
    over tokens.
    """

    loss: Tensor
    log_likelihoods: Tensor
    probabilities: Tensor
    """Probability of the likeliest token."""
    are_right: Tensor
    predictions: Tensor
    """The likeliest token."""

    def values(self, score: Literal["likelihood", "correctness", "agreement"]) -> Tensor:
        """Return the score of every head for every token, which an oracle weighs against its cost."""
        if score == "likelihood":
            return self.log_likelihoods
        agrees = self.predictions == self.predictions[-1]
        return (self.are_right if score == "correctness" else agrees).to(self.log_likelihoods)


class DepthLearning(Objective[PairBatch, TeacherForced]):
    """The mean loss over all exits and the last head and, if the exits have a chooser, its cross-entropy to the oracle.

    A model without exits has one head: the loss is the translation loss.
    """

    def __init__(
        self,
        config: DecoderExitsConfig | None,
        *,
        smoothing: float,
        learn_from: LearnFrom = "labels",
        weighting: Literal["even", "by_depth"] = "even",
        depth: int,
        oracle: OracleConfig | None = None,
    ) -> None:
        self.config, self.smoothing, self.weighting, self.depth = config, smoothing, weighting, depth
        self.learn_from = learn_from
        self.oracle = oracle or OracleConfig()
        self.layers = () if config is None else config.layers
        self.has_chooser = config is not None and config.choose != "confidence"
        by_exit = tuple(f"accuracy_{layer}" for layer in self.layers)
        self.terms = {"next_token": Term(("accuracy", "nll", *by_exit))}
        if self.has_chooser:
            self.terms["chooser"] = Term(("accuracy", "oracle_blocks"), self.oracle.weight)

    def to(self, device: torch.device | str) -> "DepthLearning":
        return self

    def prepare(self, batch: PairBatch, seed: int) -> TeacherForced:
        return TeacherForced(batch, (batch.expected != IGNORED).sum())

    def counts(self, prepared: TeacherForced) -> dict[str, Tensor]:
        counts = {"next_token": prepared.count}
        return {**counts, "chooser": self._chosen_count(prepared)} if self.has_chooser else counts

    def __call__(self, model: Model, prepared: TeacherForced) -> dict[str, Sums]:
        translator, batch = require_seq2seq(model), prepared.batch
        source, output = teacher_forced(translator, batch)
        scores = exit_scores(translator, output, batch, self.layers, self.smoothing, self.learn_from)
        weights = scores.loss.new_tensor(self._weights)
        metrics = {
            "accuracy": Share(scores.are_right[-1].sum(), prepared.count),
            "nll": Share(-scores.log_likelihoods[-1].sum(), prepared.count),
        }
        for layer, are_right in zip(self.layers, scores.are_right[:-1], strict=True):
            metrics[f"accuracy_{layer}"] = Share(are_right.sum(), prepared.count)
        sums = {"next_token": Sums((weights * scores.loss).sum() / weights.sum(), metrics)}
        if self.has_chooser:
            sums["chooser"] = self._chooser_sums(translator, source, output, scores, prepared)
        return sums

    def for_evaluation(self) -> "DepthLearning":
        # all heads against the right tokens, without smoothing, whatever was trained with
        return DepthLearning(self.config, smoothing=0.0, weighting=self.weighting, depth=self.depth, oracle=self.oracle)

    @property
    def _weights(self) -> list[float]:
        layers = (*self.layers, self.depth)
        return [1.0 if self.weighting == "even" else float(layer) for layer in layers]

    @property
    def _is_by_sequence(self) -> bool:
        return self.config is not None and self.config.choose == "sequence"

    def _chosen_count(self, prepared: TeacherForced) -> Tensor:
        sequences = prepared.batch.target_layout.batch
        return torch.tensor(sequences, device=prepared.count.device) if self._is_by_sequence else prepared.count

    def _chooser_sums(
        self, model: Seq2Seq, source: Tensor, output: EncoderOutput, scores: ExitScores, prepared: TeacherForced
    ) -> Sums:
        """Return the cross-entropy of the chooser to the oracle's exits."""
        batch, layers = prepared.batch, (*self.layers, self.depth)
        exits = model.head("decoder_exits")
        assert isinstance(exits, DecoderExits)
        logs = exits.chooser.log_probabilities(
            batch.source_layout.means(source.detach()),
            _flat(output.normalised(1)).detach(),
            [_flat(output.normalised(layer)).detach() for layer in self.layers],
        )
        values = scores.values(self.oracle.score)
        layout, is_target = batch.target_layout, batch.expected.flatten() != IGNORED
        if self._is_by_sequence:
            values, is_target = sum_by_sequence(values, layout, batch.target), torch.ones_like(logs[:, 0]).bool()
        elif self.oracle.neighbours:
            values = smooth_over_neighbours(values, layout, batch.target, self.oracle.neighbours)
        oracle = oracle_exits(values, layers, self.oracle.extra_cost)
        losses = torch.where(is_target, -logs.gather(-1, oracle[:, None]).squeeze(-1), 0.0)
        hits = (logs.detach().argmax(-1) == oracle) & is_target
        blocks = torch.where(is_target, torch.tensor(layers, device=oracle.device)[oracle], 0)
        count = self._chosen_count(prepared)
        return Sums(losses.sum(), {"accuracy": Share(hits.sum(), count), "oracle_blocks": Share(blocks.sum(), count)})


def teacher_forced(model: Seq2Seq, batch: PairBatch) -> tuple[Tensor, EncoderOutput]:
    """Return the hidden states of the encoder and of all decoder blocks, with teacher forcing."""
    source = model.encoder(batch.source, batch.source_layout)
    memory = Memory(source, batch.source_layout)
    inputs = EncoderInputs(batch.target, batch.target_layout, memory=memory, table=model.borrowed_table)
    return source, model.decoder.run(inputs, Want(all_hidden_states=True))


def exit_scores(
    model: Seq2Seq,
    output: EncoderOutput,
    batch: PairBatch,
    layers: Sequence[int],
    smoothing: float,
    learn_from: LearnFrom = "labels",
) -> ExitScores:
    """Score the right tokens by every exit and by the last head, a few tokens at a time."""
    expected = batch.expected.flatten()
    vocabulary = model.decoder_vocabulary
    size = max(1, CHUNK_SCORES[expected.device.type] // vocabulary)

    def chunk(targets: Tensor, last_states: Tensor, *exit_states: Tensor) -> tuple[Tensor, ...]:
        last = model.scores(last_states)[:, :vocabulary]  # the last axis may be padded with -inf
        soft_targets = wide(last.detach()).softmax(-1) if learn_from == "answers" else None
        heads = [
            _head_results(model.exit_scores(layer, states)[:, :vocabulary], targets, smoothing, soft_targets)
            for layer, states in zip(layers, exit_states, strict=True)
        ]
        losses, tables, tokens = zip(*heads, _head_results(last, targets, smoothing), strict=True)
        return torch.stack(losses), torch.stack(tables, dim=1), torch.stack(tokens)

    def recomputed(*tensors: Tensor) -> tuple[Tensor, ...]:
        return checkpoint(chunk, *tensors, use_reentrant=False, preserve_rng_state=False)

    score = chunk if (len(layers) + 1) * len(expected) * vocabulary <= KEPT_SCORES else recomputed
    states = [_flat(output.last), *(_flat(output.normalised(layer)) for layer in layers)]
    parts = [score(*part) for part in zip(expected.split(size), *(each.split(size) for each in states), strict=True)]
    losses, tables, predictions = zip(*parts, strict=True)
    likelihoods, probabilities = torch.cat(tables, dim=-1).unbind()
    predicted = torch.cat(predictions, dim=-1)
    return ExitScores(torch.stack(losses).sum(0), likelihoods, probabilities, predicted == expected, predicted)


def _head_results(
    scores: Tensor, targets: Tensor, smoothing: float, soft_targets: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of one head, summed over the right tokens or their soft targets, and its predictions."""
    if soft_targets is None:
        loss = from_scores(scores, targets, smoothing).loss
    else:
        losses = -(soft_targets * wide(scores).log_softmax(-1)).sum(-1)
        loss = torch.where(targets != IGNORED, losses, 0.0).sum()
    return loss, *_predictions(scores, targets)


@torch.no_grad()
def _predictions(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probability of the right and the probability of the likeliest token, (2, rows), and the latter."""
    scores, is_target = wide(scores), targets != IGNORED
    total = scores.logsumexp(-1)
    likeliest, token = scores.max(-1)
    right = scores.gather(-1, targets.clamp(min=0)[:, None]).squeeze(-1)
    rows = torch.where(is_target, torch.stack([right - total, (likeliest - total).exp()]), 0.0)
    return rows, torch.where(is_target, token, 0)


def oracle_exits(values: Tensor, layers: Sequence[int], extra_cost: float) -> Tensor:
    """Return the exit of largest value - extra_cost · blocks, the first of equals: (heads, items) -> (items,)."""
    blocks = torch.tensor(layers, device=values.device, dtype=values.dtype)
    return (values - extra_cost * blocks[:, None]).argmax(0)


def sum_by_sequence(values: Tensor, layout: SequenceLayout, tokens: Tensor) -> Tensor:
    """Add up the values of each sequence: (heads, tokens) -> (heads, sequences)."""
    index = layout.sequence_index(tokens).flatten()
    return values.new_zeros(values.shape[0], layout.batch).index_add(1, index, values)


def smooth_over_neighbours(values: Tensor, layout: SequenceLayout, tokens: Tensor, sigma: float) -> Tensor:
    """Return Σ exp(-|t - t'|² / σ) · value(t') over the tokens t' of the same sequence: (heads, tokens) -> the same."""
    rows, _ = layout.pad(values.T.unflatten(0, tokens.shape))  # (batch, length, heads)
    positions = torch.arange(rows.shape[1], device=rows.device, dtype=rows.dtype)
    kernel = torch.exp(-((positions[:, None] - positions) ** 2) / sigma)
    smoothed = torch.einsum("st,bth->bsh", kernel, rows)
    return _flat(layout.unpad(smoothed, tokens)).T


def _flat(states: Tensor) -> Tensor:
    return states.flatten(0, -2)  # (batch, length, …) or (tokens, …) -> (tokens, …)

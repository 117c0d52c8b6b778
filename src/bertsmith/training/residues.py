"""Accuracy and perplexity of a protein model over amino acids: special tokens are no targets.

A causal model predicts every residue, the first of a sequence from [CLS] or [SEP]; other models predict 15 % masked
ones (80 % [MASK], 10 % random, 10 % unchanged), as in every evaluation here.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bertsmith.answers.sequences import IGNORED
from bertsmith.data.batch import TokenBatch
from bertsmith.data.corruption import MaskingConfig, Vocabulary, corrupt
from bertsmith.data.loader import BatchReader, SpecialTokens
from bertsmith.data.plan import Plan, SequenceConfig
from bertsmith.errors import InputError
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.model import Model
from bertsmith.objectives.base import wide
from bertsmith.objectives.causal_lm import next_tokens
from bertsmith.objectives.masked_lm import vocabulary_of
from bertsmith.training.word_perplexity import max_context

POSITION_BINS = 8
_MICRO_TOKENS = 8192


class ResidueTexts:
    """Sequences of tokens in memory, as a plan and a reader use them.

    Shape: rows (tokens,), int
    """

    def __init__(self, rows: Sequence[np.ndarray]) -> None:
        self.rows = rows

    @cached_property
    def lengths(self) -> np.ndarray:
        return np.array([len(row) for row in self.rows], dtype=np.int64)

    def sentence_starts(self, document: int) -> np.ndarray:
        return np.array([0, len(self.rows[document])])

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        return self.rows[document][start:stop]


@dataclass(frozen=True, kw_only=True)
class ResidueScores:
    """Accuracy and perplexity over some predicted residues."""

    residues: int
    accuracy: float
    perplexity: float


@dataclass(frozen=True, kw_only=True)
class PositionScores(ResidueScores):
    """Scores of the residues at positions first to last of their sequences."""

    first: int
    last: int


class _Targets(NamedTuple):
    """Tokens that the model reads, and what it predicts at which flat positions.

    Shape: positions, targets (targets,); place (targets,), the position of the predicted residue in its sequence, and
    follows_special, whether a special token stands before it.
    """

    tokens: Tensor
    positions: Tensor
    targets: Tensor
    place: Tensor
    follows_special: Tensor


@dataclass(frozen=True)
class ResiduePredictions:
    """Every predicted residue.

    Shape: all (residues,)
    """

    log_probability: np.ndarray
    is_hit: np.ndarray
    place: np.ndarray
    """Position in the sequence; [CLS] is 0."""
    follows_special: np.ndarray

    @property
    def scores(self) -> ResidueScores:
        return _scores(self.log_probability, self.is_hit)

    @property
    def scores_without_first(self) -> ResidueScores:
        """Scores without residues after [CLS] or [SEP]: most proteins begin with M."""
        rest = ~self.follows_special
        return _scores(self.log_probability[rest], self.is_hit[rest])

    def by_position(self, length: int) -> tuple[PositionScores, ...]:
        """Return the scores in eight equal ranges of positions; empty ranges are left out."""
        edges = np.linspace(1, length, POSITION_BINS + 1).round().astype(int)
        found = []
        for first, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            inside = (self.place >= first) & (self.place < stop)
            if inside.any():
                scores = _scores(self.log_probability[inside], self.is_hit[inside])
                found.append(PositionScores(first=first, last=stop - 1, **vars(scores)))
        return tuple(found)


def _scores(log_probability: np.ndarray, is_hit: np.ndarray) -> ResidueScores:
    count = len(is_hit)
    if not count:
        raise InputError("no residue is predicted; give longer sequences or more of them")
    nats = -math.fsum(log_probability.tolist())
    return ResidueScores(residues=count, accuracy=float(is_hit.mean()), perplexity=math.exp(nats / count))


@torch.inference_mode()
def predict_residues(
    model: Model,
    rows: Sequence[np.ndarray],
    *,
    length: int,
    joined: bool = False,
    watch: Callable[[int, int], None] | None = None,
) -> ResiduePredictions:
    """Predict residues of proteins, each cropped to the first `length` tokens, or joined into windows of that length.

    Shape: rows (residues,), int
    """
    if not 16 <= length <= max_context(model):
        raise InputError(f"length is {length}; allowed: 16 to {max_context(model)}, the model's maximum")
    tokenizer = model.require_tokenizer()
    texts = ResidueTexts(rows if joined else [row[: length - 2] for row in rows])
    config = SequenceConfig(
        length=length, cut="windows" if joined else "chunks", micro_tokens=max(length, _MICRO_TOKENS)
    )
    reader = BatchReader(texts, config, SpecialTokens(tokenizer.pad, tokenizer.start, tokenizer.separator), None)
    vocabulary = vocabulary_of(tokenizer).to(model.device)
    is_causal, total, done = model.config.is_causal, int(texts.lengths.sum()), 0
    found: list[tuple[np.ndarray, ...]] = []
    with model.evaluating():
        for plan in Plan(texts, config, seed=0).one_epoch():
            batch = reader[plan].batch
            assert isinstance(batch, TokenBatch)
            batch = batch.to(model.device)
            chosen = _causal_targets(batch, vocabulary) if is_causal else _masked_targets(batch, vocabulary)
            inputs = EncoderInputs(chosen.tokens, batch.layout, is_causal=is_causal)
            hidden = model.run(inputs, Want(masked_positions=chosen.positions)).masked_states
            scores = wide(model.head("masked_tokens")(hidden, model.token_table))  # (targets, vocabulary)
            values = scores.log_softmax(-1).gather(-1, chosen.targets[:, None]).squeeze(-1).double()
            is_hit = scores.argmax(-1) == chosen.targets
            parts = (values, is_hit, chosen.place, chosen.follows_special)
            found.append(tuple(part.cpu().numpy() for part in parts))
            done += int((plan.sequences.stop - plan.sequences.start).sum())
            if watch is not None:
                watch(done, total)
    return ResiduePredictions(*(np.concatenate(parts) for parts in zip(*found, strict=True)))


def _causal_targets(batch: TokenBatch, vocabulary: Vocabulary) -> _Targets:
    following, tokens = next_tokens(batch), batch.tokens.flatten().long()
    is_residue = (following != IGNORED) & ~vocabulary.is_special[following.clamp(min=0)]
    positions = is_residue.nonzero().squeeze(-1)
    place = batch.layout.positions(batch.tokens).flatten()[positions] + 1
    follows_special = vocabulary.is_special[tokens[positions]]
    return _Targets(batch.tokens, positions, following[positions], place, follows_special)


def _masked_targets(batch: TokenBatch, vocabulary: Vocabulary) -> _Targets:
    corrupted = corrupt(batch, 0, MaskingConfig(), vocabulary)  # special tokens are never chosen
    is_used = corrupted.targets != IGNORED
    positions, targets = corrupted.positions[is_used], corrupted.targets[is_used]
    place = batch.layout.positions(batch.tokens).flatten()[positions]
    follows_special = vocabulary.is_special[batch.tokens.flatten().long()[positions - 1]]
    return _Targets(corrupted.tokens, positions, targets, place, follows_special)

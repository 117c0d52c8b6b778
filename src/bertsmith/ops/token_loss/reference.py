"""Inputs, result and reference of the cross-entropy over the vocabulary, and sampling from its softmax."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from bertsmith.answers.sequences import IGNORED
from bertsmith.ops.cumulative_sum import cumulative_sum

_CHUNK = 256  # vocabulary entries per chunk in two-step sampling


@dataclass(frozen=True)
class Sampling:
    """One token per row from softmax(scores / temperature), restricted to the first entries of the table."""

    draw: Tensor
    """(rows,): uniform random numbers from [0, 1); a row's sample depends on its own draw and scores only."""
    temperature: float
    vocabulary: int
    """Number of entries that may be sampled; a table may have more rows than the tokenizer has tokens."""


@dataclass(frozen=True)
class TokenLossInputs:
    """Inputs of the op.

    Shape: hidden (rows, width), table (vocabulary, width), bias (vocabulary,), targets (rows,), of which IGNORED ones
    do not count.
    """

    hidden: Tensor
    table: Tensor
    bias: Tensor | None
    targets: Tensor
    smoothing: float = 0.0
    sampling: Sampling | None = None


class TokenLoss(NamedTuple):
    """Sums over all targets that are not IGNORED; only `loss` has a gradient."""

    loss: Tensor
    nll: Tensor
    """The loss without label smoothing."""
    hits: Tensor
    """Number of targets with the highest score of their row; of equal scores the first counts as the highest."""
    targets: Tensor
    """Number of targets."""
    samples: Tensor | None = None
    """(rows,), if sampling was requested; any token where the target is IGNORED."""


class TargetWeights(NamedTuple):
    """The target distribution of label smoothing: `off` for every entry, and `on` more for the right one."""

    on: float
    off: float

    @classmethod
    def of(cls, smoothing: float, vocabulary: int) -> "TargetWeights":
        """Return the weights with which the right entry gets 1 - smoothing and the others share the rest evenly.

        (PyTorch's label smoothing includes the right entry in that share.)
        """
        off = smoothing / (vocabulary - 1) if smoothing else 0.0
        return cls(1 - smoothing - off, off)


def unsupported(inputs: TokenLossInputs) -> str | None:
    return None


def token_loss(inputs: TokenLossInputs) -> TokenLoss:
    scores = linear(inputs.hidden, inputs.table, inputs.bias)
    return from_scores(scores, inputs.targets, inputs.smoothing, inputs.sampling)


def from_scores(scores: Tensor, targets: Tensor, smoothing: float = 0.0, sampling: Sampling | None = None) -> TokenLoss:
    """Return the loss of given scores, (rows, vocabulary)."""
    sums = row_results(scores, wide_log_softmax(scores), targets, smoothing).sum(-1)
    _, nll, hits, count = sums.detach()
    samples = None
    if sampling is not None:
        samples = sample(scores.detach()[:, : sampling.vocabulary], sampling.draw, sampling.temperature)
    return TokenLoss(sums[0], nll, hits, count, samples)


def row_results(scores: Tensor, logs: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """Return loss, loss without smoothing, hit and count of every row, (4, rows), all 0 where the target is IGNORED.

    Shape: scores and their log-softmax (rows, vocabulary).
    """
    on, off = TargetWeights.of(smoothing, scores.shape[-1])
    right = logs.gather(-1, targets.clamp(min=0)[:, None]).squeeze(-1)
    loss = -(on * right + off * logs.sum(-1)) if smoothing else -right
    hits = scores.detach().argmax(-1) == targets
    results = torch.stack([loss, -right, hits.to(right), torch.ones_like(right)])
    return torch.where(targets != IGNORED, results, 0.0)


def wide_log_softmax(scores: Tensor) -> Tensor:
    """Return the log-softmax in at least float32: sums of exponentials lose too much precision in half precision."""
    return scores.log_softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))


def sample(scores: Tensor, draw: Tensor, temperature: float) -> Tensor:
    """Sample one token per row from softmax(scores / temperature), with a uniform `draw` from [0, 1) per row.

    Shape: scores (rows, vocabulary), draw (rows,) -> (rows,).
    """
    exact = torch.promote_types(scores.dtype, torch.float32)
    probabilities = (scores.to(exact) / temperature).softmax(-1)
    # sample a chunk of the vocabulary, then a token in it: a cumulative sum over the vocabulary is slow
    chunks = pad(probabilities, (0, -scores.shape[-1] % _CHUNK)).unflatten(-1, (-1, _CHUNK))  # (rows, chunks, tokens)
    sums = chunks.sum(-1)
    chunk, rest = _sample_index(sums, draw.to(sums))
    inside = chunks.gather(1, chunk[:, None, None].expand(-1, 1, _CHUNK)).squeeze(1)  # -> (rows, tokens)
    token, _ = _sample_index(inside, rest)
    return chunk * _CHUNK + token


def _sample_index(weights: Tensor, draw: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index that each draw selects, and the draw's relative position in its interval, again in [0, 1).

    Shape: weights (rows, n), which need not sum to 1; draw (rows,) -> (rows,) both.
    """
    cumulative = cumulative_sum(weights, -1)
    limit = draw * cumulative[:, -1]
    # a count instead of a search, which compilers fuse; rounding must not select an index of weight 0 at the end
    last = (cumulative < cumulative[:, -1:]).sum(-1)
    index = torch.minimum((cumulative <= limit[:, None]).sum(-1), last)
    weight = weights.gather(-1, index[:, None]).squeeze(-1)
    below = cumulative.gather(-1, index[:, None]).squeeze(-1) - weight
    rest = (limit - below) / weight.clamp(min=torch.finfo(weights.dtype).tiny)
    return index, rest.clamp(min=0, max=1 - torch.finfo(weights.dtype).eps)

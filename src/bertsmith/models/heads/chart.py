"""Head of a chart parser (Kitaev and Klein 2018): scores of all spans from two vectors per token."""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from bertsmith.answers.chart import NORM_EPSILON, SpanWeights
from bertsmith.data.layout import SequenceLayout
from bertsmith.layers.elementwise import TokenDropout
from bertsmith.layers.linear import ElasticLinear
from bertsmith.models.heads.base import LayerFeatures
from bertsmith.models.heads.task import TaskHead, TaskHeadConfig


class ChartConfig(TaskHeadConfig):
    """Scores of the labels of every span of words."""

    kind: Literal["chart"] = "chart"
    labels: tuple[str, ...] = Field(min_length=1)
    """Labels of constituents; the labels of a unary chain are joined by "::"."""
    hidden: int = Field(default=256, gt=0)
    """Width of the hidden layer of the span scores."""

    def build(self, width: int, embedding_width: int, vocabulary: int) -> "ChartHead":
        return ChartHead(self.reader(width), len(self.labels), self.hidden, self.dropout)


class SpanScorer(nn.Module):
    """Scores of spans from differences of fenceposts: W₂ ReLU(LayerNorm(difference + b₁)) + b₂.

    It is computed in the objective and, as `SpanWeights`, without PyTorch: a head returns rows of tokens only.
    """

    def __init__(self, labels: int, hidden: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(hidden))
        self.norm = nn.LayerNorm(hidden, eps=NORM_EPSILON)
        self.score = nn.Linear(hidden, labels)

    def forward(self, differences: Tensor) -> Tensor:
        """Shape: (spans, hidden) -> (spans, labels)."""
        scores: Tensor = self.score(torch.relu(self.norm(differences + self.bias)))
        return scores

    def weights(self) -> SpanWeights:
        """Return the weights as float32 arrays."""
        tensors = (self.bias, self.norm.weight, self.norm.bias, self.score.weight, self.score.bias)
        return SpanWeights(*(tensor.detach().float().cpu().numpy() for tensor in tensors))


class ChartHead(TaskHead):
    """Two vectors per token, the parts of W₁ f that it adds to the fenceposts after and before it.

    The fencepost between words i and i + 1 is f = [first half of state i; second half of state i + 1]. W₁ is linear, so
    W₁ (f_j − f_i) is a difference of sums over tokens.
    """

    is_for_tokens = True

    def __init__(self, features: LayerFeatures, labels: int, hidden: int, dropout: float) -> None:
        super().__init__(features)
        self.first_width = features.width // 2
        self.dropout = TokenDropout(dropout)
        self.after = ElasticLinear(self.first_width, hidden, bias=False)
        self.before = ElasticLinear(features.width - self.first_width, hidden, bias=False)
        self.scorer = SpanScorer(labels, hidden)

    def forward(
        self, hidden_states: Sequence[Tensor], layout: SequenceLayout, pooler: nn.Module | None = None
    ) -> Tensor:
        """Shape: (batch, length, width) or (tokens, width) each -> (…, 2 hidden)."""
        states = self.dropout(self.features(hidden_states, layout), layout)
        return torch.cat(
            [self.after(states[..., : self.first_width]), self.before(states[..., self.first_width :])], dim=-1
        )

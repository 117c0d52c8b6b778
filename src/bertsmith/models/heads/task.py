"""Task heads: sequence classifier, tagger, span extractor and embedder."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import normalize

from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.layers.elementwise import ACTIVATIONS, Activation, TokenDropout
from bertsmith.layers.linear import ElasticLinear
from bertsmith.models.heads.base import FeaturesConfig, HeadConfig, LayerFeatures, RecurrentConfig


class TaskHeadConfig(HeadConfig):
    """Settings of every task head."""

    dropout: float = Field(default=0.1, ge=0, lt=1)
    """Dropout before the last linear layer."""
    features: FeaturesConfig = FeaturesConfig()
    """Hidden states that the head reads."""
    recurrent: RecurrentConfig | None = None
    """A BiLSTM between those hidden states and the rest of the head."""

    def reader(self, width: int) -> LayerFeatures:
        """Return the module that combines the hidden states into one vector per token."""
        return LayerFeatures(width, self.features, self.recurrent)


class SequenceHeadConfig(TaskHeadConfig):
    """Settings of heads with one output per sequence."""

    pooling: Literal["pooler", "first", "mean"] = "first"
    """Vector of a sequence: the pooler's output, the first token's hidden state, or the mean of all tokens."""


class ClassifierConfig(SequenceHeadConfig):
    """One score per label for a sequence; a single label is for regression or scoring one of several choices."""

    kind: Literal["classifier"] = "classifier"
    labels: tuple[str, ...] = Field(min_length=1)
    """Names of the outputs."""
    hidden: Activation | None = None
    """Activation of a hidden layer between that vector and the scores; None for no hidden layer."""

    def build(self, width: int, embedding_width: int, vocabulary: int) -> "Classifier":
        return Classifier(self.reader(width), len(self.labels), self.pooling, self.hidden, self.dropout)


class TaggerConfig(TaskHeadConfig):
    """One score per label for every token."""

    kind: Literal["tagger"] = "tagger"
    labels: tuple[str, ...] = Field(min_length=1)

    def build(self, width: int, embedding_width: int, vocabulary: int) -> "Tagger":
        return Tagger(self.reader(width), len(self.labels), self.dropout)


class SpansConfig(TaskHeadConfig):
    """Two scores for every token: whether the answer starts and whether it ends there."""

    kind: Literal["spans"] = "spans"
    dropout: float = Field(default=0.0, ge=0, lt=1)

    def build(self, width: int, embedding_width: int, vocabulary: int) -> "Tagger":
        return Tagger(self.reader(width), 2, self.dropout)


class EmbedderConfig(SequenceHeadConfig):
    """One vector per sequence for similarity; without a projection the head has no weights."""

    kind: Literal["embedder"] = "embedder"
    dropout: float = Field(default=0.0, ge=0, lt=1)
    pooling: Literal["pooler", "first", "mean"] = "mean"
    projection: int | None = Field(default=None, gt=0)
    """Width of a learned projection of that vector, for a frozen encoder; None for no projection."""
    is_normalised: bool = True
    """Whether vectors have length 1."""

    def build(self, width: int, embedding_width: int, vocabulary: int) -> "Embedder":
        return Embedder(self.reader(width), self.pooling, self.projection, is_normalised=self.is_normalised)


TASK_HEADS: dict[str, type[HeadConfig]] = {
    "classifier": ClassifierConfig,
    "tagger": TaggerConfig,
    "spans": SpansConfig,
    "embedder": EmbedderConfig,
}


class TaskHead(nn.Module, ABC):
    """Reads the hidden states of the encoder's last `layers` layers."""

    is_for_tokens = False
    """Whether it has outputs for every token, not for whole sequences."""

    def __init__(self, features: LayerFeatures) -> None:
        super().__init__()
        self.features = features

    @property
    def layers(self) -> int:
        return self.features.layers

    @abstractmethod
    def forward(
        self, hidden_states: Sequence[Tensor], layout: SequenceLayout, pooler: nn.Module | None = None
    ) -> Tensor:
        """Return the outputs; `pooler` is the model's pooler, if it has one.

        Shape: hidden_states (batch, length, width) or (tokens, width) each -> (batch, outputs) from sequence heads,
        (batch, length, outputs) or (tokens, outputs) from token heads.
        """


class Classifier(TaskHead):
    """Pooled vector, optional hidden layer, dropout, scores."""

    def __init__(
        self, features: LayerFeatures, labels: int, pooling: str, hidden: Activation | None, dropout: float
    ) -> None:
        super().__init__(features)
        width = features.width
        self.pooling, self.activation = pooling, hidden
        self.hidden = None if hidden is None else ElasticLinear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.score = ElasticLinear(width, labels)

    def forward(
        self, hidden_states: Sequence[Tensor], layout: SequenceLayout, pooler: nn.Module | None = None
    ) -> Tensor:
        vector = pooled(self.features(hidden_states, layout), layout, self.pooling, pooler)
        if self.hidden is not None and self.activation is not None:
            vector = ACTIVATIONS[self.activation](self.hidden(self.dropout(vector)))
        return self.score(self.dropout(vector))


class Tagger(TaskHead):
    """Dropout and scores at every token."""

    is_for_tokens = True

    def __init__(self, features: LayerFeatures, labels: int, dropout: float) -> None:
        super().__init__(features)
        self.dropout = TokenDropout(dropout)
        self.score = ElasticLinear(features.width, labels)

    def forward(
        self, hidden_states: Sequence[Tensor], layout: SequenceLayout, pooler: nn.Module | None = None
    ) -> Tensor:
        return self.score(self.dropout(self.features(hidden_states, layout), layout))


class Embedder(TaskHead):
    """Pooled vector, optional projection and normalisation."""

    def __init__(self, features: LayerFeatures, pooling: str, projection: int | None, *, is_normalised: bool) -> None:
        super().__init__(features)
        self.pooling, self.is_normalised = pooling, is_normalised
        self.width = projection or features.width
        self.projection = None if projection is None else ElasticLinear(features.width, projection)

    def forward(
        self, hidden_states: Sequence[Tensor], layout: SequenceLayout, pooler: nn.Module | None = None
    ) -> Tensor:
        vectors = pooled(self.features(hidden_states, layout), layout, self.pooling, pooler)
        if self.projection is not None:
            vectors = self.projection(vectors)
        return normalize(vectors, dim=-1) if self.is_normalised else vectors


def pooled(hidden_states: Tensor, layout: SequenceLayout, pooling: str, pooler: nn.Module | None) -> Tensor:
    """Return one vector per sequence: (batch, width)."""
    if pooling == "mean":
        return layout.means(hidden_states)
    first = layout.first_tokens(hidden_states)
    if pooling == "first":
        return first
    if pooler is None:
        raise InputError("pooling is 'pooler', but the model has no pooler head; allowed: first, mean")
    vectors: Tensor = pooler(first)
    return vectors

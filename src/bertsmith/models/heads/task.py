"""The heads of tasks: one answer for a sequence, one for every token, the ends of a span, a vector."""

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
    """The settings that the heads of all tasks have."""

    dropout: float = Field(default=0.1, ge=0, lt=1)
    """Before the last linear layer."""
    features: FeaturesConfig = FeaturesConfig()
    """Which states it reads."""
    recurrent: RecurrentConfig | None = None
    """A BiLSTM between those states and the rest of the head."""

    def reader(self, width: int) -> LayerFeatures:
        """The part that makes one state per token of those the head reads."""
        return LayerFeatures(width, self.features, self.recurrent)


class SequenceHeadConfig(TaskHeadConfig):
    """The settings of heads that say something of a whole sequence."""

    pooling: Literal["pooler", "first", "mean"] = "first"
    """The vector of a sequence: that of the model's pooler, the first token's state, or the mean of all."""


class ClassifierConfig(SequenceHeadConfig):
    """One score per label for a sequence; a single label makes it a regression, or scores one of several choices."""

    kind: Literal["classifier"] = "classifier"
    labels: tuple[str, ...] = Field(min_length=1)
    """The names of the outputs."""
    hidden: Activation | None = None
    """The activation of a layer between that vector and the scores; None for no such layer."""

    def build(self, width: int, embedding_width: int, vocabulary: int) -> "Classifier":
        return Classifier(self.reader(width), len(self.labels), self.pooling, self.hidden, self.dropout)


class TaggerConfig(TaskHeadConfig):
    """One score per label for every token."""

    kind: Literal["tagger"] = "tagger"
    labels: tuple[str, ...] = Field(min_length=1)

    def build(self, width: int, embedding_width: int, vocabulary: int) -> "Tagger":
        return Tagger(self.reader(width), len(self.labels), self.dropout)


class SpansConfig(TaskHeadConfig):
    """Two scores for every token: does the answer begin here, does it end here."""

    kind: Literal["spans"] = "spans"
    dropout: float = Field(default=0.0, ge=0, lt=1)

    def build(self, width: int, embedding_width: int, vocabulary: int) -> "Tagger":
        return Tagger(self.reader(width), 2, self.dropout)


class EmbedderConfig(SequenceHeadConfig):
    """One vector for a sequence, to be compared with others; without a projection it has no weights of its own."""

    kind: Literal["embedder"] = "embedder"
    dropout: float = Field(default=0.0, ge=0, lt=1)
    pooling: Literal["pooler", "first", "mean"] = "mean"
    projection: int | None = Field(default=None, gt=0)
    """A learned map of that vector to so many numbers, for an encoder that must stay as it is; None for none."""
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
    """Reads the states of an encoder's layers; `layers` says of how many, the last ones."""

    is_for_tokens = False
    """Whether it says something of every token, not of whole sequences."""

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
        """What the head says; `pooler` is the model's own, if it has one.

        Shape: hidden_states (batch, length, width) or (tokens, width) each -> (batch, outputs) by sequence heads,
        (batch, length, outputs) or (tokens, outputs) from those for tokens.
        """


class Classifier(TaskHead):
    """A sequence's vector, a layer of its own if the config says so, dropout, scores."""

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
    """A sequence's vector."""

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
    """One vector per sequence: (batch, width)."""
    if pooling == "mean":
        return layout.means(hidden_states)
    first = layout.first_tokens(hidden_states)
    if pooling == "first":
        return first
    if pooler is None:
        raise InputError("pooling is 'pooler' and the model has no such head; allowed: first, mean")
    vectors: Tensor = pooler(first)
    return vectors

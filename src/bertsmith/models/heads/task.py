"""Task heads: sequence classifier, tagger, span extractor and embedder."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator
from torch import Tensor, nn
from torch.nn.functional import normalize

from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.layers.elementwise import ACTIVATIONS, Activation, NormConfig, TokenDropout
from bertsmith.layers.linear import ElasticLinear
from bertsmith.models.heads.base import FeaturesConfig, HeadConfig, LayerFeatures, RecurrentConfig
from bertsmith.settings import Record

Pooling = Literal["pooler", "first", "last", "mean", "max", "mean_sqrt", "weighted_mean"]
Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]
"""Comparison of two vectors; the two distances are negative, so that larger means more similar."""


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


class HiddenLayerConfig(Record):
    """A layer of the same width before the scores: linear, activation, optional norm.

    An activation alone is the short form of a layer with biases and without a norm: `hidden = "gelu"`.
    """

    short_field = "activation"

    activation: Activation = "gelu"
    has_bias: bool = True
    """Whether the linear layer has a bias."""
    norm: NormConfig | None = None
    """Norm after the activation, as in ModernBERT; None for no norm."""
    drops_input: bool = True
    """Whether the head's dropout also applies to the input of this layer; it always applies to the scores' input."""

    @model_validator(mode="before")
    @classmethod
    def _expand_activation(cls, data: Any) -> Any:
        return {"activation": data} if isinstance(data, str) else data

    @model_serializer(mode="wrap")
    def _shorten(self, handler: SerializerFunctionWrapHandler) -> Any:
        return self.activation if self == HiddenLayerConfig(activation=self.activation) else handler(self)

    @model_validator(mode="after")
    def _check_norm(self) -> "HiddenLayerConfig":
        if self.norm is not None and self.norm.placement != "post":
            raise ValueError(f"norm.placement is {self.norm.placement!r}; allowed: 'post', after the activation")
        return self


class SequenceHeadConfig(TaskHeadConfig):
    """Settings of heads with one output per sequence."""

    pooling: Pooling = "first"
    """Vector of a sequence: the pooler's output, the hidden state of the first or last token, or the mean or maximum of
    all tokens. "mean_sqrt" is their sum over √length, "weighted_mean" has weights 1, 2, 3, … In a causal encoder the
    first token sees itself alone, so its heads use the last token or the mean."""


class ClassifierConfig(SequenceHeadConfig):
    """One score per label for a sequence; a single label is for regression or scoring one of several choices."""

    kind: Literal["classifier"] = "classifier"
    labels: tuple[str, ...] = Field(min_length=1)
    """Names of the outputs."""
    hidden: HiddenLayerConfig | None = None
    """A hidden layer between that vector and the scores; None for no hidden layer."""

    def build(self, width: int, embedding_width: int, vocabulary: int) -> "Classifier":
        return Classifier(self.reader(width), len(self.labels), self.pooling, self.hidden, self.dropout)


class TaggerConfig(TaskHeadConfig):
    """One score per label for every token."""

    kind: Literal["tagger"] = "tagger"
    labels: tuple[str, ...] = Field(min_length=1)
    hidden: HiddenLayerConfig | None = None
    """A hidden layer before the scores; None for no hidden layer."""

    def build(self, width: int, embedding_width: int, vocabulary: int) -> "Tagger":
        return Tagger(self.reader(width), len(self.labels), self.hidden, self.dropout)


class SpansConfig(TaskHeadConfig):
    """Two scores for every token: whether the answer starts and whether it ends there."""

    kind: Literal["spans"] = "spans"
    dropout: float = Field(default=0.0, ge=0, lt=1)
    hidden: HiddenLayerConfig | None = None
    """A hidden layer before the scores; None for no hidden layer."""

    def build(self, width: int, embedding_width: int, vocabulary: int) -> "Tagger":
        return Tagger(self.reader(width), 2, self.hidden, self.dropout)


class DenseConfig(Record):
    """A linear layer after the pooling, as in sentence-transformers."""

    width: int = Field(gt=0)
    activation: Activation | None = None
    has_bias: bool = True


class TextsConfig(Record):
    """How texts become the sequences of an embedder."""

    max_length: int | None = Field(default=None, gt=0)
    """Texts are truncated to this many tokens; None for the encoder's maximum."""
    prompts: dict[str, str] = Field(default_factory=dict)
    """Texts to put before every text, by name, such as query = "query: "."""
    default_prompt: str | None = None
    """Name of the prompt that is used unless another one is given."""

    @model_validator(mode="after")
    def _check_prompt(self) -> "TextsConfig":
        if self.default_prompt is not None and self.default_prompt not in self.prompts:
            names = ", ".join(self.prompts) or "none"
            raise ValueError(f"default_prompt is {self.default_prompt!r}; the names of the prompts are: {names}")
        return self


class EmbedderConfig(SequenceHeadConfig):
    """One vector per sequence for similarity; without projection and dense layers the head has no weights."""

    kind: Literal["embedder"] = "embedder"
    dropout: float = Field(default=0.0, ge=0, lt=1)
    pooling: Pooling = "mean"
    projection: int | None = Field(default=None, gt=0)
    """Width of a learned projection of that vector, for a frozen encoder; None for no projection."""
    dense: tuple[DenseConfig, ...] = ()
    """Further linear layers with activations, as in models of sentence-transformers."""
    is_normalised: bool = True
    """Whether vectors have length 1."""
    similarity: Similarity = "cosine"
    """Comparison of vectors that the model was trained for."""
    texts: TextsConfig = TextsConfig()

    @property
    def layers(self) -> dict[str, DenseConfig]:
        """Linear layers after the pooling, in order, by the name of their module in the head."""
        first = {} if self.projection is None else {"projection": DenseConfig(width=self.projection)}
        return first | {f"dense.{index}": layer for index, layer in enumerate(self.dense)}

    def build(self, width: int, embedding_width: int, vocabulary: int) -> "Embedder":
        return Embedder(self.reader(width), self)


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


class ScoringHead(TaskHead):
    """Optional hidden layer, dropout, scores."""

    def __init__(self, features: LayerFeatures, outputs: int, hidden: HiddenLayerConfig | None) -> None:
        super().__init__(features)
        width, norm = features.width, None if hidden is None else hidden.norm
        self.layer = hidden
        self.hidden = None if hidden is None else ElasticLinear(width, width, bias=hidden.has_bias)
        self.norm = None if norm is None else norm.build(width)
        self.score = ElasticLinear(width, outputs)

    def scores(self, vectors: Tensor, drop: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the scores of every vector; `drop` is the head's dropout."""
        if self.hidden is not None and self.layer is not None:
            vectors = self.hidden(drop(vectors) if self.layer.drops_input else vectors)
            vectors = ACTIVATIONS[self.layer.activation](vectors)
        if self.norm is not None:
            vectors = self.norm(vectors)
        return self.score(drop(vectors))


class Classifier(ScoringHead):
    """Scores of the pooled vector of every sequence."""

    def __init__(
        self, features: LayerFeatures, labels: int, pooling: Pooling, hidden: HiddenLayerConfig | None, dropout: float
    ) -> None:
        super().__init__(features, labels, hidden)
        self.pooling = pooling
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, hidden_states: Sequence[Tensor], layout: SequenceLayout, pooler: nn.Module | None = None
    ) -> Tensor:
        vectors = pooled(self.features(hidden_states, layout), layout, self.pooling, pooler)
        return self.scores(vectors, self.dropout)


class Tagger(ScoringHead):
    """Scores of every token."""

    is_for_tokens = True

    def __init__(self, features: LayerFeatures, labels: int, hidden: HiddenLayerConfig | None, dropout: float) -> None:
        super().__init__(features, labels, hidden)
        self.dropout = TokenDropout(dropout)

    def forward(
        self, hidden_states: Sequence[Tensor], layout: SequenceLayout, pooler: nn.Module | None = None
    ) -> Tensor:
        return self.scores(self.features(hidden_states, layout), lambda vectors: self.dropout(vectors, layout))


class Embedder(TaskHead):
    """Pooled vector, optional linear layers and normalisation."""

    def __init__(self, features: LayerFeatures, config: EmbedderConfig) -> None:
        super().__init__(features)
        self.pooling, self.is_normalised = config.pooling, config.is_normalised
        self.activations = [layer.activation for layer in config.dense]
        projection = config.projection
        self.projection = None if projection is None else ElasticLinear(features.width, projection)
        widths = [projection or features.width, *(layer.width for layer in config.dense)]
        self.dense = nn.ModuleList(
            ElasticLinear(before, layer.width, bias=layer.has_bias)
            for before, layer in zip(widths[:-1], config.dense, strict=True)
        )
        self.width = widths[-1]

    def forward(
        self, hidden_states: Sequence[Tensor], layout: SequenceLayout, pooler: nn.Module | None = None
    ) -> Tensor:
        vectors = pooled(self.features(hidden_states, layout), layout, self.pooling, pooler)
        if self.projection is not None:
            vectors = self.projection(vectors)
        for layer, activation in zip(self.dense, self.activations, strict=True):
            vectors = layer(vectors) if activation is None else ACTIVATIONS[activation](layer(vectors))
        return normalize(vectors, dim=-1) if self.is_normalised else vectors


def pooled(hidden_states: Tensor, layout: SequenceLayout, pooling: Pooling, pooler: nn.Module | None) -> Tensor:
    """Return one vector per sequence: (batch, width)."""
    match pooling:
        case "mean":
            return layout.means(hidden_states)
        case "max":
            return layout.maxima(hidden_states)
        case "mean_sqrt":
            lengths = layout.lengths(hidden_states.device)[:, None]
            return layout.means(hidden_states) * lengths.sqrt().to(hidden_states.dtype)
        case "weighted_mean":
            weights = (layout.positions(hidden_states) + 1)[..., None].to(hidden_states.dtype)
            return layout.means(hidden_states * weights) / layout.means(weights)
        case "last":
            return layout.last_tokens(hidden_states)
        case "first":
            return layout.first_tokens(hidden_states)
    if pooler is None:
        raise InputError("pooling is 'pooler', but the model has no pooler head; allowed: first, last, mean")
    vectors: Tensor = pooler(layout.first_tokens(hidden_states))
    return vectors

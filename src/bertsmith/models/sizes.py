"""Sizes of the architectures in presets.py, and the configs that follow from a size alone."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from bertsmith.layers.elementwise import Activation, NormConfig, NormKind
from bertsmith.layers.embedding import EmbeddingConfig
from bertsmith.layers.feedforward import FeedForwardConfig
from bertsmith.layers.mixers import MixerConfig
from bertsmith.models.config import EncoderConfig, LayerConfig
from bertsmith.ops.favor import FeatureMapName
from bertsmith.settings import Record

Count = Annotated[int, Field(gt=0)]


class Size(Record):
    """The numbers of a published model; any of them can be overridden."""

    width: Count
    layers: Count
    heads: Count
    vocabulary: Count = 30522
    max_length: Count = 512
    dropout: float = Field(default=0.1, ge=0, lt=1)
    layer_drop: float = Field(default=0.0, ge=0, lt=1)
    """Probability of skipping each layer in training."""
    init_std: float = Field(default=0.02, gt=0)
    placement: Literal["post", "pre"] = "post"
    """Placement of the norms: after the residual sums, as published, or before mixer and feed-forward, with a final
    norm. Deep pre-norm networks learn from context sooner; transformers has no class for them."""

    def norm_of(self, epsilon: float = 1e-12) -> NormConfig:
        """Return the settings of a layer's norms."""
        return NormConfig(placement=self.placement, epsilon=epsilon)

    def embedding(self, **changes: Any) -> EmbeddingConfig:
        """Return BERT's embedding in this size, with changes."""
        return EmbeddingConfig(max_length=self.max_length, dropout=self.dropout, **changes)

    def layer(self, mixer: MixerConfig, **changes: Any) -> LayerConfig:
        """Return a BERT layer with this mixer and 4 · width neurons, with changes."""
        feedforward = FeedForwardConfig(neurons=4 * self.width)
        layer = LayerConfig(mixer=mixer, feedforward=feedforward, dropout=self.dropout, norm=self.norm_of())
        return layer.changed(**changes)

    def encoder(self, embedding: EmbeddingConfig, *layers: LayerConfig, **parts: Any) -> EncoderConfig:
        """Return an encoder of this size."""
        if self.placement == "pre":
            parts.setdefault("final_norm", layers[-1].norm)
        return EncoderConfig(
            vocabulary=self.vocabulary,
            width=self.width,
            embedding=embedding,
            layers=layers,
            layer_drop=self.layer_drop,
            init_std=self.init_std,
            **parts,
        )


class FactorisedSize(Size):
    """A size with a factorised embedding."""

    embedding_width: Count


class DebertaSize(Size):
    """A size with relative positions, one table row per distance."""

    vocabulary: Count = 50265
    span: Count = 512


class BucketSize(Size):
    """A size with bucketed relative positions and an optional convolution branch (kernel_size 0: none)."""

    vocabulary: Count = 128100
    span: Count = 256
    max_distance: Count = 512
    kernel_size: int = Field(default=0, ge=0)


class DisentangledSize(FactorisedSize):
    """A pre-norm size of ours with bucketed relative positions."""

    placement: Literal["post", "pre"] = "pre"
    init_std: float = Field(default=0.04, gt=0)
    """0.02 was chosen for a width of 768."""
    span: Count = 64
    max_distance: Count = 512


class ConvBertSize(FactorisedSize):
    """A ConvBERT; `heads` are counted as in its paper, before the bottleneck divides them by `ratio`."""

    ratio: Count = 2
    kernel_size: Count = 9
    groups: Count = 1
    """Groups of the feed-forwards."""
    kernel_from: Literal["span", "token", "fixed", "depthwise", "none"] = "span"
    """Values other than "span" are the paper's ablations; "none" is the bottleneck alone."""

    @model_validator(mode="after")
    def _check_heads(self) -> "ConvBertSize":
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        return self


class DynamicConvSize(Size):
    """An encoder of convolutions only."""

    kernel_from: Literal["token", "fixed", "depthwise"]


class TransformerSize(Size):
    """A size of the Transformer; every row of the paper's table of variations is an override."""

    neurons: Count
    head_width: int | None = None
    value_width: int | None = None
    positions: Literal["sinusoid", "sinusoid_halves", "learned"] = "sinusoid"
    max_length: Count = 1024


class AlbertSize(FactorisedSize):
    """A size of ALBERT v2: its vocabulary, no dropout."""

    embedding_width: Count = 128
    vocabulary: Count = 30000
    dropout: float = 0.0


class UniversalSize(Size):
    """A size whose `layers` are steps of one layer."""

    is_halting: bool = True


class PerformerSize(Size):
    """A size with random-feature attention."""

    features: int = Field(default=256, ge=0)
    feature_map: FeatureMapName = "softmax"
    redraw_every: int = Field(default=1000, ge=0)


class ModernSize(Size):
    """A size without dropout, with gated feed-forwards and local attention in most layers."""

    placement: Literal["pre"] = "pre"
    neurons: Count
    activation: Activation = "gelu"
    """"silu" makes the gated feed-forwards SwiGLU."""
    norm: NormKind = "layer"
    window: Count = 64
    """Tokens to each side that a local layer attends to."""
    global_every: Count = 3
    """Every n-th layer, starting with the first, has global attention."""
    max_length: Count = 1024
    dropout: float = Field(default=0.0, ge=0, lt=1)

"""Sizes of the architectures in presets.py, and the configs that follow from a size alone."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from bertsmith.errors import InputError
from bertsmith.layers.elementwise import Activation, NormConfig, NormKind
from bertsmith.layers.embedding import EmbeddingConfig
from bertsmith.layers.feedforward import FeedForwardConfig
from bertsmith.layers.mixers import MixerConfig
from bertsmith.layers.mixers.disentangled import DisentangledConfig, PositionRow
from bertsmith.layers.mixers.full import FullConfig
from bertsmith.layers.mixers.long_short import LongShortConfig
from bertsmith.layers.positions import RelativeConfig
from bertsmith.models.config import EncoderConfig, LayerConfig, Sharing
from bertsmith.models.equilibrium import EquilibriumConfig
from bertsmith.models.heads import HeadConfig, MaskDecoderConfig, MaskedTokensConfig
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
    embedding_width: Count | None = None
    """Width of the token vectors, which a matrix maps to the width of the layers; None for the same width."""
    rotary: float | None = Field(default=None, gt=1)
    """Base of rotary positions, which replace the absolute ones; 10000 as published. Needs full attention."""
    sharing: Sharing = "none"
    """Weights that all layers share (ALBERT): everything, the mixers, the feed-forwards, or none."""
    reversible: bool = False
    """Reversible layers, whose training needs the activations of one layer only; with placement = "pre"."""
    equilibrium: EquilibriumConfig | None = None
    """Repeat the layers, usually one, until their output no longer changes; with placement = "post"."""

    def norm_of(self, epsilon: float = 1e-12) -> NormConfig:
        """Return the settings of a layer's norms."""
        return NormConfig(placement=self.placement, epsilon=epsilon)

    def embedding(self, **changes: Any) -> EmbeddingConfig:
        """Return BERT's embedding in this size, with changes."""
        if self.rotary is not None:
            changes["positions"] = "none"
        return EmbeddingConfig(width=self.embedding_width, max_length=self.max_length, dropout=self.dropout, **changes)

    def layer(self, mixer: MixerConfig, **changes: Any) -> LayerConfig:
        """Return a BERT layer with this mixer and 4 · width neurons, with changes."""
        if self.rotary is not None:
            if not isinstance(mixer, FullConfig):
                raise InputError(
                    f"rotary is {self.rotary:g}, but the mixers are of kind {mixer.kind!r}; rotary positions need full "
                    "attention, as in bert-…, electra-…, albert-…, modern-… and transformer-…"
                )
            mixer = mixer.changed(rotary=self.rotary)
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
            reversible=self.reversible,
            equilibrium=self.equilibrium,
            layer_drop=self.layer_drop,
            init_std=self.init_std,
            sharing=self.sharing,
            **parts,
        )


class FactorisedSize(Size):
    """A size with a factorised embedding."""

    embedding_width: Count


class RelativeSize(Size):
    """A size with disentangled attention, whose terms can be switched off one by one."""

    span: Count
    """Half the rows of the relative table."""
    content_to_position: bool = True
    """Add the score of the query's content with the key's relative position."""
    position_to_content: bool = True
    """Add the score of the query's relative position with the key's content."""
    position_to_content_row: PositionRow = "code"
    """Row of the position-to-content score: as in the released code, or as printed in the paper."""

    def mixer(self, **changes: Any) -> DisentangledConfig:
        """Return DeBERTa v2's attention with the terms of this size, with changes."""
        config = DisentangledConfig(
            heads=self.heads,
            content_to_position=self.content_to_position,
            position_to_content=self.position_to_content,
            dropout=self.dropout,
            position_dropout=self.dropout,
        )
        return config.changed(position_to_content_row=self.position_to_content_row, **changes)

    def relative(self, **settings: Any) -> RelativeConfig | None:
        """Return the settings of the relative table; None if no term reads it."""
        if not (self.content_to_position or self.position_to_content):
            return None
        return RelativeConfig(span=self.span, **settings)


class MaskDecoderSize(RelativeSize):
    """A size with DeBERTa's heads."""

    has_mask_decoder: bool = True
    """Fill masks with the enhanced mask decoder, which adds absolute positions before the last layer."""

    def masked_heads(self) -> tuple[HeadConfig, ...]:
        """Return the heads that fill masks."""
        tokens = MaskedTokensConfig(epsilon=1e-7)
        return (MaskDecoderConfig(max_length=self.max_length), tokens) if self.has_mask_decoder else (tokens,)


class DebertaSize(MaskDecoderSize):
    """A size with relative positions, one table row per distance."""

    vocabulary: Count = 50265
    span: Count = 512


class BucketSize(MaskDecoderSize):
    """A size with bucketed relative positions and an optional convolution branch (kernel_size 0: none)."""

    vocabulary: Count = 128100
    span: Count = 256
    max_distance: Count = 512
    kernel_size: int = Field(default=0, ge=0)


class DisentangledSize(RelativeSize):
    """A pre-norm size of ours with bucketed relative positions."""

    embedding_width: Count
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
    decoder_layers: Count | None = None
    """Blocks of the decoder; None for as many as the encoder has layers."""
    head_width: int | None = None
    value_width: int | None = None
    positions: Literal["sinusoid", "sinusoid_halves", "learned"] = "sinusoid"
    max_length: Count = 1024


class LiteSize(Size):
    """A size of long-short range attention; the feed-forward is as wide as the layer unless `neurons` is set."""

    neurons: Count | None = None
    """Neurons of the feed-forward; None for the width, the paper's "flattened" layer."""
    kernel_from: Literal["token", "fixed", "depthwise"] = "token"
    is_gated: bool = True
    """Gate the input of the convolutions; the IWSLT models of the paper do not."""

    def lite_layers(self, activation: Activation, norm: NormConfig) -> list[LayerConfig]:
        """Return layers whose convolutions reach further from layer to layer: 3, 7, 15, then 31 tokens."""
        feedforward = FeedForwardConfig(neurons=self.neurons or self.width, activation=activation)
        mixer = LongShortConfig(
            heads=self.heads, kernel_from=self.kernel_from, is_gated=self.is_gated, dropout=self.dropout
        )
        return [
            self.layer(mixer.changed(kernel_size=min(2 ** (index + 2) - 1, 31)), feedforward=feedforward, norm=norm)
            for index in range(self.layers)
        ]


class LiteTransformerSize(LiteSize):
    """A Lite Transformer; 4 heads in all attention, where its WMT models have 8 in cross-attention."""

    layers: Count = 6
    heads: Count = 4
    max_length: Count = 1024


class AlbertSize(FactorisedSize):
    """A size of ALBERT v2: its vocabulary, no dropout."""

    sharing: Sharing = "all"
    embedding_width: Count = 128
    vocabulary: Count = 30000
    dropout: float = 0.0


class UniversalSize(Size):
    """A size whose `layers` are steps of one layer."""

    is_halting: bool = True
    sharing: Sharing = "all"

    @model_validator(mode="after")
    def _check_rotary(self) -> "UniversalSize":
        if self.rotary is not None:
            raise ValueError(
                f"rotary is {self.rotary:g}, but the signal of a Universal Transformer adds absolute positions before "
                "every step; leave rotary out"
            )
        return self


class PerformerSize(Size):
    """A size with random-feature attention."""

    features: int = Field(default=256, ge=0)
    feature_map: FeatureMapName = "softmax"
    redraw_every: int = Field(default=1000, ge=0)


class ProteinSize(PerformerSize):
    """A Performer over the 25 letters of proteins and five special tokens."""

    neurons: Count
    vocabulary: Count = 30
    max_length: Count = 8192
    feature_map: FeatureMapName = "relu"
    placement: Literal["post", "pre"] = "pre"


class ModernSize(Size):
    """A size without dropout, with gated feed-forwards and local attention in most layers."""

    placement: Literal["pre"] = "pre"
    neurons: Count
    rotary: float = Field(default=160_000.0, gt=1)
    """Base of the rotary positions in layers that look everywhere."""
    local_rotary: float = Field(default=10_000.0, gt=1)
    """Base of the rotary positions in local layers."""
    activation: Activation = "gelu"
    """"silu" makes the gated feed-forwards SwiGLU."""
    norm: NormKind = "layer"
    window: Count = 64
    """Tokens to each side that a local layer attends to."""
    global_every: Count = 3
    """Every n-th layer, starting with the first, has global attention."""
    max_length: Count = 1024
    dropout: float = Field(default=0.0, ge=0, lt=1)

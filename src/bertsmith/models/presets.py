"""The published sizes, each architecture whole in a few lines."""

from collections.abc import Callable
from typing import Any, Literal

from pydantic import ValidationError

from bertsmith.errors import InputError, nearest
from bertsmith.layers.branch import BranchConfig
from bertsmith.layers.embedding import EmbeddingConfig
from bertsmith.layers.feedforward import FeedForwardConfig
from bertsmith.layers.halting import HaltingConfig
from bertsmith.layers.mixers.disentangled import DisentangledConfig
from bertsmith.layers.mixers.dynamic_conv import DynamicConvConfig
from bertsmith.layers.mixers.favor import FavorConfig
from bertsmith.layers.mixers.full import FullConfig
from bertsmith.layers.mixers.span_conv import SpanConvConfig
from bertsmith.layers.norm import NormConfig
from bertsmith.layers.relative import RelativeConfig
from bertsmith.models.config import EncoderConfig, LayerConfig, ModelConfig
from bertsmith.models.heads import (
    MaskDecoderConfig,
    MaskedTokensConfig,
    NextSentenceConfig,
    NextTokenConfig,
    PoolerConfig,
    ReplacedTokensConfig,
)
from bertsmith.models.universal import UniversalConfig
from bertsmith.ops.favor import FeatureMapName
from bertsmith.settings import Record, explain


class Size(Record):
    """The numbers of a published model; any of them can be overridden."""

    width: int
    layers: int
    heads: int
    vocabulary: int = 30522
    longest: int = 512
    dropout: float = 0.1
    deviation: float = 0.02

    def encoder(self, embedding: EmbeddingConfig, *layers: LayerConfig, **parts: Any) -> EncoderConfig:
        """An encoder of this size."""
        return EncoderConfig(
            vocabulary=self.vocabulary,
            width=self.width,
            embedding=embedding,
            layers=layers,
            deviation=self.deviation,
            **parts,
        )


class FactorisedSize(Size):
    """A size whose embedding is narrower than its layers."""

    embedding_width: int


class DebertaSize(Size):
    """A size with relative positions, one row for each distance."""

    vocabulary: int = 50265
    span: int = 512


class BucketSize(Size):
    """A size with relative positions in buckets, and a convolution of some taps beside the first layer (0: none)."""

    vocabulary: int = 128100
    span: int = 256
    farthest: int = 512
    taps: int = 0


class ConvBertSize(FactorisedSize):
    """A ConvBERT; `heads` are counted as in its paper, before the bottleneck divides them by `ratio`."""

    ratio: int = 2
    taps: int = 9
    groups: int = 1
    """Of the feed-forwards."""
    kernel_from: Literal["span", "token", "fixed", "depthwise", "none"] = "span"
    """Others than "span" are the paper's ablations; "none" is the bottleneck alone."""


class DynamicConvSize(Size):
    """An encoder of convolutions only."""

    kernel_from: Literal["token", "fixed", "depthwise"]


class TransformerSize(Size):
    """A size of the Transformer; every row of the paper's table of variations is an override."""

    neurons: int
    head_width: int | None = None
    value_width: int | None = None
    positions: Literal["sinusoid", "sinusoid_halves", "learned"] = "sinusoid"
    longest: int = 1024


class AlbertSize(FactorisedSize):
    """The numbers all of ALBERT's second version share: its vocabulary, no dropout."""

    embedding_width: int = 128
    vocabulary: int = 30000
    dropout: float = 0.0


class UniversalSize(Size):
    """A size whose layers are the steps of one layer."""

    is_halting: bool = True


class PerformerSize(Size):
    """A size whose attention works with random features."""

    features: int = 256
    feature_map: FeatureMapName = "softmax"
    redraw_every: int = 1000


def bert(size: Size) -> ModelConfig:
    """Devlin et al. 2019: post-norm, learned positions, two segments, masked tokens and next sentence."""
    mixer = FullConfig(heads=size.heads, dropout=size.dropout)
    layer = LayerConfig(mixer=mixer, feedforward=FeedForwardConfig(neurons=4 * size.width), dropout=size.dropout)
    embedding = EmbeddingConfig(longest=size.longest, dropout=size.dropout)
    heads = (MaskedTokensConfig(), PoolerConfig(), NextSentenceConfig())
    return ModelConfig(family="bert", encoder=size.encoder(embedding, *[layer] * size.layers), heads=heads)


def electra(size: FactorisedSize) -> ModelConfig:
    """Clark et al. 2020, the discriminator: BERT's encoder on a factorised embedding, a score for every token."""
    mixer = FullConfig(heads=size.heads, dropout=size.dropout)
    layer = LayerConfig(mixer=mixer, feedforward=FeedForwardConfig(neurons=4 * size.width), dropout=size.dropout)
    embedding = EmbeddingConfig(width=size.embedding_width, longest=size.longest, dropout=size.dropout)
    encoder = size.encoder(embedding, *[layer] * size.layers)
    return ModelConfig(family="electra", encoder=encoder, heads=(ReplacedTokensConfig(),))


def deberta(size: DebertaSize) -> ModelConfig:
    """He et al. 2021: content and relative position scored apart; absolute positions only where masks are filled."""
    shares: dict[str, Any] = {"dropout": size.dropout, "position_dropout": size.dropout}
    mixer = DisentangledConfig(heads=size.heads, shares_projections=False, has_key_bias=False, **shares)
    feedforward, norm = FeedForwardConfig(neurons=4 * size.width), NormConfig(epsilon=1e-7)
    layer = LayerConfig(mixer=mixer, feedforward=feedforward, norm=norm, dropout=size.dropout)
    embedding = EmbeddingConfig(
        positions="none", types=0, longest=size.longest, epsilon=norm.epsilon, dropout=size.dropout
    )
    encoder = size.encoder(embedding, *[layer] * size.layers, relative=RelativeConfig(span=size.span))
    heads = (MaskDecoderConfig(longest=size.longest), MaskedTokensConfig(epsilon=norm.epsilon))
    return ModelConfig(family="deberta", encoder=encoder, heads=heads)


def deberta_ap(size: DebertaSize) -> ModelConfig:
    """He et al. 2021, appendix A.4: DeBERTa with absolute positions at the input instead of the mask decoder."""
    config = deberta(size)
    embedding = config.encoder.embedding.model_copy(update={"positions": "learned"})
    encoder = config.encoder.model_copy(update={"embedding": embedding})
    return ModelConfig(family="deberta", encoder=encoder, heads=config.heads[1:])


def deberta_v2(size: BucketSize) -> ModelConfig:
    """DeBERTa with one projection for content and positions, and bucketed distances; v3's generators as well."""
    mixer = DisentangledConfig(heads=size.heads, dropout=size.dropout, position_dropout=size.dropout)
    feedforward, norm = FeedForwardConfig(neurons=4 * size.width), NormConfig(epsilon=1e-7)
    layer = LayerConfig(mixer=mixer, feedforward=feedforward, norm=norm, dropout=size.dropout)
    branch = BranchConfig(taps=size.taps, dropout=size.dropout) if size.taps else None
    first = layer.model_copy(update={"branch": branch})
    embedding = EmbeddingConfig(
        positions="none", types=0, longest=size.longest, epsilon=norm.epsilon, dropout=size.dropout
    )
    relative = RelativeConfig(span=size.span, farthest=size.farthest, has_norm=True)
    encoder = size.encoder(embedding, first, *[layer] * (size.layers - 1), relative=relative)
    heads = (MaskDecoderConfig(longest=size.longest), MaskedTokensConfig(epsilon=norm.epsilon))
    return ModelConfig(family="deberta-v2", encoder=encoder, heads=heads)


def deberta_v3(size: BucketSize) -> ModelConfig:
    """He et al. 2023, the discriminator: v2's encoder, a score for every token that looks at the first one as well."""
    return deberta_v2(size).model_copy(update={"heads": (ReplacedTokensConfig(adds_first=True),)})


def convbert(size: ConvBertSize) -> ModelConfig:
    """Jiang et al. 2020: ELECTRA with mixed attention, a bottleneck in it, and feed-forwards in groups."""
    heads = size.heads // size.ratio or size.heads  # with fewer heads than the ratio, the released code drops it
    mixer = SpanConvConfig(
        heads=heads,
        head_width=size.width // size.heads,
        taps=size.taps,
        kernel_from=size.kernel_from,
        dropout=size.dropout,
    )
    feedforward = FeedForwardConfig(neurons=4 * size.width, groups=size.groups)
    layer = LayerConfig(mixer=mixer, feedforward=feedforward, dropout=size.dropout)
    embedding = EmbeddingConfig(width=size.embedding_width, longest=size.longest, dropout=size.dropout)
    encoder = size.encoder(embedding, *[layer] * size.layers)
    return ModelConfig(family="convbert", encoder=encoder, heads=(ReplacedTokensConfig(),))


def convbert_generator(size: ConvBertSize) -> ModelConfig:
    """The small ConvBERT whose guesses the large one is trained to find: the same encoder, scores over tokens."""
    return convbert(size).model_copy(update={"heads": (MaskedTokensConfig(),)})


def dynamic_conv(size: DynamicConvSize) -> ModelConfig:
    """Wu et al. 2019 as an encoder (sizes are ours): gated convolutions that reach further from layer to layer."""
    feedforward, layers = FeedForwardConfig(neurons=4 * size.width), []
    for index in range(size.layers):
        taps = min(2 ** (index + 2) - 1, 31)  # 3, 7, 15, then 31, as published
        mixer = DynamicConvConfig(heads=size.heads, taps=taps, kernel_from=size.kernel_from, dropout=size.dropout)
        layers.append(LayerConfig(mixer=mixer, feedforward=feedforward, dropout=size.dropout))
    embedding = EmbeddingConfig(positions="sinusoid", longest=size.longest, dropout=size.dropout)
    return ModelConfig(family="dynamic_conv", encoder=size.encoder(embedding, *layers), heads=(MaskedTokensConfig(),))


def transformer(size: TransformerSize) -> ModelConfig:
    """Vaswani et al. 2017: post-norm, ReLU, scaled token vectors from one table for source, target and scores."""
    attention = FullConfig(
        heads=size.heads, head_width=size.head_width, value_width=size.value_width or size.head_width, dropout=0.0
    )
    feedforward = FeedForwardConfig(neurons=size.neurons, activation="relu")
    layer = LayerConfig(mixer=attention, feedforward=feedforward, norm=NormConfig(epsilon=1e-5), dropout=size.dropout)
    causal = {"mixer": attention.model_copy(update={"is_causal": True}), "cross": attention}
    parts = {"positions": size.positions, "is_scaled": True, "has_norm": False, "types": 0}
    reading = EmbeddingConfig.parse({**parts, "longest": size.longest, "dropout": size.dropout})
    encoder = size.encoder(reading, *[layer] * size.layers)
    writing = reading.model_copy(update={"owns_table": False})
    decoder = size.encoder(writing, *[layer.model_copy(update=causal)] * size.layers)
    return ModelConfig(family="transformer", encoder=encoder, decoder=decoder, heads=(NextTokenConfig(),))


def albert(size: FactorisedSize) -> ModelConfig:
    """Lan et al. 2020: one layer applied again and again, on a factorised embedding."""
    mixer = FullConfig(heads=size.heads, dropout=size.dropout)
    feedforward = FeedForwardConfig(neurons=4 * size.width, activation="gelu_tanh")
    layer = LayerConfig(mixer=mixer, feedforward=feedforward, dropout=size.dropout)
    embedding = EmbeddingConfig(width=size.embedding_width, longest=size.longest, dropout=size.dropout)
    encoder = size.encoder(embedding, *[layer] * size.layers, sharing="all")
    heads = (MaskedTokensConfig(activation="gelu_tanh"), PoolerConfig())
    return ModelConfig(family="albert", encoder=encoder, heads=heads)


def universal(size: UniversalSize) -> ModelConfig:
    """Dehghani et al. 2019 as a text encoder: one layer of BERT's, its steps told apart by a signal, with halting."""
    mixer = FullConfig(heads=size.heads, dropout=size.dropout)
    layer = LayerConfig(mixer=mixer, feedforward=FeedForwardConfig(neurons=4 * size.width), dropout=size.dropout)
    embedding = EmbeddingConfig(positions="none", longest=size.longest, dropout=size.dropout)
    steps = UniversalConfig(halting=HaltingConfig() if size.is_halting else None)
    encoder = size.encoder(embedding, *[layer] * size.layers, sharing="all", universal=steps)
    return ModelConfig(family="universal", encoder=encoder, heads=(MaskedTokensConfig(), PoolerConfig()))


def performer(size: PerformerSize) -> ModelConfig:
    """Choromanski et al. 2021: BERT whose attention is FAVOR+, linear in the length."""
    features: dict[str, Any] = {name: getattr(size, name) for name in ("features", "feature_map", "redraw_every")}
    mixer = FavorConfig(heads=size.heads, dropout=size.dropout, **features)
    layer = LayerConfig(mixer=mixer, feedforward=FeedForwardConfig(neurons=4 * size.width), dropout=size.dropout)
    embedding = EmbeddingConfig(longest=size.longest, dropout=size.dropout)
    heads = (MaskedTokensConfig(), PoolerConfig(), NextSentenceConfig())
    return ModelConfig(family="performer", encoder=size.encoder(embedding, *[layer] * size.layers), heads=heads)


PRESETS: dict[str, tuple[Callable[[Any], ModelConfig], Size]] = {
    "bert-tiny": (bert, Size(width=128, layers=2, heads=2)),
    "bert-mini": (bert, Size(width=256, layers=4, heads=4)),
    "bert-small": (bert, Size(width=512, layers=4, heads=8)),
    "bert-medium": (bert, Size(width=512, layers=8, heads=8)),
    "bert-base": (bert, Size(width=768, layers=12, heads=12)),
    "bert-large": (bert, Size(width=1024, layers=24, heads=16)),
    "electra-small": (electra, FactorisedSize(width=256, layers=12, heads=4, embedding_width=128)),
    "electra-base": (electra, FactorisedSize(width=768, layers=12, heads=12, embedding_width=768)),
    "electra-large": (electra, FactorisedSize(width=1024, layers=24, heads=16, embedding_width=1024)),
    "deberta-base": (deberta, DebertaSize(width=768, layers=12, heads=12)),
    "deberta-large": (deberta, DebertaSize(width=1024, layers=24, heads=16)),
    "deberta-xlarge": (deberta, DebertaSize(width=1024, layers=48, heads=16)),
    "deberta-ap-base": (deberta_ap, DebertaSize(width=768, layers=12, heads=12)),
    "deberta-v2-xlarge": (deberta_v2, BucketSize(width=1536, layers=24, heads=24, taps=3)),
    "deberta-v2-xxlarge": (deberta_v2, BucketSize(width=1536, layers=48, heads=24, taps=3)),
    "deberta-v3-xsmall": (deberta_v3, BucketSize(width=384, layers=12, heads=6)),
    "deberta-v3-small": (deberta_v3, BucketSize(width=768, layers=6, heads=12)),
    "deberta-v3-base": (deberta_v3, BucketSize(width=768, layers=12, heads=12)),
    "deberta-v3-large": (deberta_v3, BucketSize(width=1024, layers=24, heads=16)),
    "mdeberta-v3-base": (deberta_v3, BucketSize(width=768, layers=12, heads=12, vocabulary=251000)),
    "deberta-v3-xsmall-generator": (deberta_v2, BucketSize(width=384, layers=6, heads=6)),
    "deberta-v3-small-generator": (deberta_v2, BucketSize(width=768, layers=3, heads=12)),
    "deberta-v3-base-generator": (deberta_v2, BucketSize(width=768, layers=6, heads=12)),
    "deberta-v3-large-generator": (deberta_v2, BucketSize(width=1024, layers=12, heads=16)),
    "mdeberta-v3-base-generator": (deberta_v2, BucketSize(width=768, layers=6, heads=12, vocabulary=251000)),
    "convbert-small": (convbert, ConvBertSize(width=256, layers=12, heads=4, embedding_width=128)),
    "convbert-medium-small": (convbert, ConvBertSize(width=384, layers=12, heads=8, embedding_width=128, groups=2)),
    "convbert-base": (convbert, ConvBertSize(width=768, layers=12, heads=12, embedding_width=768)),
    "convbert-small-generator": (
        convbert_generator,
        ConvBertSize(width=64, layers=12, heads=1, embedding_width=128),
    ),
    "convbert-medium-small-generator": (
        convbert_generator,
        ConvBertSize(width=96, layers=12, heads=2, embedding_width=128, groups=2),
    ),
    "convbert-base-generator": (
        convbert_generator,
        ConvBertSize(width=256, layers=12, heads=4, embedding_width=768),
    ),
    "lightconv-base": (dynamic_conv, DynamicConvSize(width=768, layers=12, heads=12, kernel_from="fixed")),
    "dynamicconv-base": (dynamic_conv, DynamicConvSize(width=768, layers=12, heads=12, kernel_from="token")),
    "transformer-tiny": (transformer, TransformerSize(width=128, layers=2, heads=4, neurons=512, deviation=0.06)),
    "transformer-small": (transformer, TransformerSize(width=256, layers=3, heads=4, neurons=1024, deviation=0.06)),
    "transformer-base": (
        transformer,
        TransformerSize(width=512, layers=6, heads=8, neurons=2048, vocabulary=37000, deviation=0.044),
    ),
    "transformer-big": (
        transformer,
        TransformerSize(width=1024, layers=6, heads=16, neurons=4096, vocabulary=37000, deviation=0.031, dropout=0.3),
    ),
    "albert-base": (albert, AlbertSize(width=768, layers=12, heads=12)),
    "albert-large": (albert, AlbertSize(width=1024, layers=24, heads=16)),
    "albert-xlarge": (albert, AlbertSize(width=2048, layers=24, heads=16)),
    "albert-xxlarge": (albert, AlbertSize(width=4096, layers=12, heads=64)),
    "universal-base": (universal, UniversalSize(width=768, layers=12, heads=12)),  # a size of ours
    "performer-small": (performer, PerformerSize(width=512, layers=4, heads=8)),
    "performer-base": (performer, PerformerSize(width=768, layers=12, heads=12)),
    "performer-relu-small": (performer, PerformerSize(width=512, layers=4, heads=8, feature_map="relu")),
    "performer-relu-base": (performer, PerformerSize(width=768, layers=12, heads=12, feature_map="relu")),
}


def preset(name: str, **overrides: Any) -> ModelConfig:
    """The config of a published size; overrides are numbers of its size, such as layers=6 or vocabulary=8000."""
    if name not in PRESETS:
        raise InputError(f"preset is {name!r}; {nearest(name, PRESETS)} (all: {', '.join(PRESETS)})")
    family, size = PRESETS[name]
    changed = type(size).parse({**size.plain(), **overrides}, source=f"preset {name!r}")
    try:
        return family(changed)
    except ValidationError as error:
        raise InputError(f"preset {name!r}: {explain(ModelConfig, error)}") from None


def overridable(name: str) -> tuple[str, ...]:
    """The settings of a preset that can be overridden."""
    return tuple(type(PRESETS[name][1]).model_fields)

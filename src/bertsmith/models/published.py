"""The published sizes by name: an architecture of presets.py and its numbers."""

from collections.abc import Callable
from typing import Any

from bertsmith.errors import InputError, nearest
from bertsmith.models.config import ModelConfig
from bertsmith.models.presets import (
    albert,
    bert,
    convbert,
    convbert_generator,
    deberta,
    deberta_ap,
    deberta_v2,
    deberta_v3,
    disentangled,
    dynamic_conv,
    electra,
    electra_generator,
    lite_bert,
    lite_transformer,
    modern,
    mpnet,
    performer,
    performer_protein,
    transformer,
    universal,
)
from bertsmith.models.sizes import (
    AlbertSize,
    BucketSize,
    ConvBertSize,
    DebertaSize,
    DisentangledSize,
    DynamicConvSize,
    FactorisedSize,
    LiteSize,
    LiteTransformerSize,
    ModernSize,
    PerformerSize,
    ProteinSize,
    Size,
    TransformerSize,
    UniversalSize,
)


def _iwslt(width: int) -> LiteTransformerSize:
    """Return a Lite Transformer of the IWSLT experiments: lightweight convolutions without a gate."""
    return LiteTransformerSize(
        width=width, kernel_from="fixed", is_gated=False, dropout=0.2, init_std=round(width**-0.5, 3)
    )


PRESETS: dict[str, tuple[Callable[[Any], ModelConfig], Size]] = {
    "bert-tiny": (bert, Size(width=128, layers=2, heads=2)),
    "bert-mini": (bert, Size(width=256, layers=4, heads=4)),
    "bert-small": (bert, Size(width=512, layers=4, heads=8)),
    "bert-medium": (bert, Size(width=512, layers=8, heads=8)),
    "bert-base": (bert, Size(width=768, layers=12, heads=12)),
    "bert-large": (bert, Size(width=1024, layers=24, heads=16)),
    "mpnet-base": (mpnet, Size(width=768, layers=12, heads=12, vocabulary=30527)),
    "electra-small": (electra, FactorisedSize(width=256, layers=12, heads=4, embedding_width=128)),
    "electra-base": (electra, FactorisedSize(width=768, layers=12, heads=12, embedding_width=768)),
    "electra-large": (electra, FactorisedSize(width=1024, layers=24, heads=16, embedding_width=1024)),
    "electra-small-generator": (electra_generator, FactorisedSize(width=64, layers=12, heads=1, embedding_width=128)),
    "electra-base-generator": (electra_generator, FactorisedSize(width=256, layers=12, heads=4, embedding_width=768)),
    "electra-large-generator": (electra_generator, FactorisedSize(width=256, layers=24, heads=4, embedding_width=1024)),
    "deberta-base": (deberta, DebertaSize(width=768, layers=12, heads=12)),
    "deberta-large": (deberta, DebertaSize(width=1024, layers=24, heads=16)),
    "deberta-xlarge": (deberta, DebertaSize(width=1024, layers=48, heads=16)),
    "deberta-ap-base": (deberta_ap, DebertaSize(width=768, layers=12, heads=12, has_mask_decoder=False)),
    "deberta-v2-xlarge": (deberta_v2, BucketSize(width=1536, layers=24, heads=24, kernel_size=3)),
    "deberta-v2-xxlarge": (deberta_v2, BucketSize(width=1536, layers=48, heads=24, kernel_size=3)),
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
    # a size of ours: the bundled model
    "disentangled-small": (disentangled, DisentangledSize(width=256, layers=12, heads=4, embedding_width=128)),
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
    # sizes of ours
    "lite-bert-small": (lite_bert, LiteSize(width=256, layers=12, heads=4)),
    "lite-bert-base": (lite_bert, LiteSize(width=768, layers=12, heads=12)),
    # the counterpart of transformer-small, a size of ours
    "lite-transformer-small": (lite_transformer, LiteTransformerSize(width=256, layers=3, init_std=0.06)),
    "lite-transformer-iwslt-160": (lite_transformer, _iwslt(160)),
    "lite-transformer-iwslt-240": (lite_transformer, _iwslt(240)),
    "lite-transformer-iwslt-320": (lite_transformer, _iwslt(320)),
    "lite-transformer-wmt-200": (lite_transformer, LiteTransformerSize(width=200, init_std=0.071)),
    "lite-transformer-wmt-408": (lite_transformer, LiteTransformerSize(width=408, init_std=0.05)),
    "lite-transformer-wmt-496": (lite_transformer, LiteTransformerSize(width=496, init_std=0.045)),
    "transformer-tiny": (transformer, TransformerSize(width=128, layers=2, heads=4, neurons=512, init_std=0.06)),
    "transformer-small": (transformer, TransformerSize(width=256, layers=3, heads=4, neurons=1024, init_std=0.06)),
    "transformer-base": (
        transformer,
        TransformerSize(width=512, layers=6, heads=8, neurons=2048, vocabulary=37000, init_std=0.044),
    ),
    "transformer-big": (
        transformer,
        TransformerSize(width=1024, layers=6, heads=16, neurons=4096, vocabulary=37000, init_std=0.031, dropout=0.3),
    ),
    "albert-base": (albert, AlbertSize(width=768, layers=12, heads=12)),
    "albert-large": (albert, AlbertSize(width=1024, layers=24, heads=16)),
    "albert-xlarge": (albert, AlbertSize(width=2048, layers=24, heads=16)),
    "albert-xxlarge": (albert, AlbertSize(width=4096, layers=12, heads=64)),
    "modern-small": (modern, ModernSize(width=384, layers=12, heads=6, neurons=576)),  # a size of ours
    # ModernBERT's shapes; its own vocabulary has 50,368 entries
    "modern-base": (modern, ModernSize(width=768, layers=22, heads=12, neurons=1152)),
    "modern-large": (modern, ModernSize(width=1024, layers=28, heads=16, neurons=2624)),
    "universal-base": (universal, UniversalSize(width=768, layers=12, heads=12)),  # a size of ours
    "performer-small": (performer, PerformerSize(width=512, layers=4, heads=8)),
    "performer-base": (performer, PerformerSize(width=768, layers=12, heads=12)),
    "performer-relu-small": (performer, PerformerSize(width=512, layers=4, heads=8, feature_map="relu")),
    "performer-relu-base": (performer, PerformerSize(width=768, layers=12, heads=12, feature_map="relu")),
    "performer-protein-small": (performer_protein, ProteinSize(width=512, layers=6, heads=8, neurons=2048)),
    "performer-protein-deep": (performer_protein, ProteinSize(width=512, layers=36, heads=8, neurons=1024)),
}


def preset(name: str, **overrides: Any) -> ModelConfig:
    """Return the config of a published size.

    Overrides are settings of the size: numbers such as layers=6 or vocabulary=8000, and switches such as
    content_to_position=False or sharing="all".
    """
    if name not in PRESETS:
        raise InputError(f"preset is {name!r}; {nearest(name, PRESETS)} (all: {', '.join(PRESETS)})")
    family, size = PRESETS[name]
    changed = type(size).parse({**size.plain(), **overrides}, source=f"preset {name!r}")
    try:
        return family(changed)
    except InputError as error:
        raise InputError(f"preset {name!r}: {error}") from None


def overridable(name: str) -> tuple[str, ...]:
    """Return the settings of a preset that have a value, such as its numbers; those that are None are switched off."""
    size = PRESETS[name][1]
    return tuple(field for field in type(size).model_fields if getattr(size, field) is not None)

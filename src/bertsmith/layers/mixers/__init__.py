"""The table of mixers: a new mixer is one file here and one row below."""

from typing import Annotated

from bertsmith.layers.mixers.base import Mixer, MixerConfig
from bertsmith.layers.mixers.disentangled import DisentangledConfig
from bertsmith.layers.mixers.dynamic_conv import DynamicConvConfig
from bertsmith.layers.mixers.favor import FavorConfig
from bertsmith.layers.mixers.full import FullConfig
from bertsmith.layers.mixers.long_short import LongShortConfig
from bertsmith.layers.mixers.multi_linear import MultiLinearConfig
from bertsmith.layers.mixers.span_conv import SpanConvConfig
from bertsmith.settings import ByKind

MIXERS: dict[str, type[MixerConfig]] = {
    "full": FullConfig,
    "disentangled": DisentangledConfig,
    "dynamic_conv": DynamicConvConfig,
    "span_conv": SpanConvConfig,
    "favor": FavorConfig,
    "long_short": LongShortConfig,
    "multi_linear": MultiLinearConfig,
}

AnyMixer = Annotated[MixerConfig, ByKind(MIXERS)]

__all__ = ["MIXERS", "AnyMixer", "Mixer", "MixerConfig"]

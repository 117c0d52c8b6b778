"""The table of mixers: a new kind is one file here and one row below."""

from typing import Annotated

from bertsmith.layers.mixers.base import Mixer, MixerConfig
from bertsmith.layers.mixers.favor import FavorConfig
from bertsmith.layers.mixers.full import FullConfig
from bertsmith.settings import ByKind

MIXERS: dict[str, type[MixerConfig]] = {"full": FullConfig, "favor": FavorConfig}

AnyMixer = Annotated[MixerConfig, ByKind(MIXERS)]

__all__ = ["MIXERS", "AnyMixer", "Mixer", "MixerConfig"]

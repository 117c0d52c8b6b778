"""A trained model with another kind of attention around the same weights."""

from typing import Any, Literal

from bertsmith.errors import InputError, nearest
from bertsmith.layers.mixers import MixerConfig
from bertsmith.layers.mixers.favor import FavorConfig
from bertsmith.layers.mixers.full import FullConfig
from bertsmith.models.build import rebuild
from bertsmith.models.config import EncoderConfig, ModelConfig
from bertsmith.models.model import Model

_KINDS: dict[str, type[MixerConfig]] = {"favor": FavorConfig, "full": FullConfig}
_KEPT = {"heads", "head_width", "value_width", "dropout", "is_causal"}
_FAMILIES = {"favor": {"bert": "performer"}, "full": {"performer": "bert"}}


def convert(model: Model, to: Literal["favor", "full"], *, seed: int = 0, **settings: Any) -> Model:
    """A new model with the same weights, bit for bit, whose full attention is FAVOR+, or the other way round.

    `settings` are those of the favor mixer, such as features=512 or feature_map="hyperbolic"; the seed draws its random
    matrices. Mixers of other kinds stay. A Performer made of a trained model wants further training.
    The family changes between "bert" and "performer", which differ in their attention only; any other, such as
    "electra" or "transformer", names the rest of the network as well and stays.
    """
    if to not in _KINDS:
        raise InputError(f"to is {to!r}; {nearest(str(to), _KINDS)}")
    free = _KINDS[to].model_fields.keys() - _KEPT - {"kind"}
    for name in settings:
        if name not in free:
            raise InputError(f"{name} is not a setting of the conversion to {to!r}; {nearest(name, free)}")
    try:
        config = _converted_model(model.config, to, settings)
    except InputError as error:
        raise InputError(f"convert to {to!r}: {error}") from None
    if config == model.config:
        raise InputError(f"convert to {to!r}: this model has no attention of the other kind")
    return rebuild(model, config, seed=seed)


def _converted_model(config: ModelConfig, to: str, settings: dict[str, Any]) -> ModelConfig:
    encoder = _converted_stack(config.encoder, to, settings)
    decoder = None if config.decoder is None else _converted_stack(config.decoder, to, settings)
    if (encoder, decoder) == (config.encoder, config.decoder):
        return config
    return config.changed(encoder=encoder, decoder=decoder, family=_FAMILIES[to].get(config.family, config.family))


def _converted_stack(config: EncoderConfig, to: str, settings: dict[str, Any]) -> EncoderConfig:
    layers = []
    for layer in config.layers:
        cross = None if layer.cross is None else _converted(layer.cross, to, settings)
        layers.append(layer.changed(mixer=_converted(layer.mixer, to, settings), cross=cross))
    return config.changed(layers=tuple(layers))


def _converted(mixer: MixerConfig, to: str, settings: dict[str, Any]) -> MixerConfig:
    """The config of the other kind with all that both kinds have; one that is of neither kind, or of this, stays."""
    if not isinstance(mixer, FavorConfig | FullConfig) or mixer.kind == to:
        return mixer
    if isinstance(mixer, FullConfig):
        for name, field in FullConfig.model_fields.items():
            value = getattr(mixer, name)
            if name not in _KEPT and value != field.default:
                raise InputError(f"{name} is {value}, which {to} has not; allowed: {field.default}")
    kept = {name: value for name, value in mixer.plain().items() if name in _KEPT}
    return _KINDS[to](kind=to, heads=mixer.heads).changed(**kept, **settings)

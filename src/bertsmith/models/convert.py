"""A trained model with another kind of attention around the same weights."""

from typing import Any, Literal

import torch

from bertsmith.errors import InputError, nearest
from bertsmith.layers.mixers import MixerConfig
from bertsmith.layers.mixers.favor import FavorAttention, FavorConfig
from bertsmith.layers.mixers.full import FullConfig
from bertsmith.models.build import assemble
from bertsmith.models.config import EncoderConfig, ModelConfig
from bertsmith.models.model import Model

_KINDS: dict[str, type[MixerConfig]] = {"favor": FavorConfig, "full": FullConfig}
_KEPT = {"heads", "head_width", "value_width", "dropout", "is_causal"}
_FAMILIES = {"favor": {"bert": "performer"}, "full": {"performer": "bert"}}


def convert(model: Model, to: Literal["favor", "full"], *, seed: int = 0, **settings: Any) -> Model:
    """A new model with the same weights, bit for bit, whose full attention is FAVOR+, or the other way round.

    `settings` are those of the favor mixer, such as features=512 or feature_map="hyperbolic"; the seed draws its random
    matrices. Mixers of other kinds stay. A Performer made of a trained model wants further training.
    """
    if to not in _KINDS:
        raise InputError(f"to is {to!r}; {nearest(str(to), _KINDS)}")
    free = _KINDS[to].model_fields.keys() - _KEPT - {"kind"}
    for name in settings:
        if name not in free:
            raise InputError(f"{name} is not a setting of the conversion to {to!r}; {nearest(name, free)}")
    config = _converted_model(model.config, to, settings)
    if config == model.config:
        raise InputError(f"convert to {to!r}: this model has no attention of the other kind")
    other = assemble(config).to(next(model.parameters()))
    lost = other.load_state_dict(model.state_dict(), strict=False)
    strays = [name for name in (*lost.missing_keys, *lost.unexpected_keys) if not name.endswith(".projection")]
    assert not strays, strays
    generator = torch.Generator().manual_seed(seed)
    for name, module in other.named_modules():
        if isinstance(module, FavorAttention) and f"{name}.projection" in lost.missing_keys:
            module.initialise(config.encoder.deviation, generator)
    other.tokenizer = model.tokenizer
    return other.train(model.training)


def _converted_model(config: ModelConfig, to: str, settings: dict[str, Any]) -> ModelConfig:
    stacks = {"encoder": _converted_stack(config.encoder, to, settings)}
    if config.decoder is not None:
        stacks["decoder"] = _converted_stack(config.decoder, to, settings)
    if all(getattr(config, name) == stack for name, stack in stacks.items()):
        return config
    family = _FAMILIES[to].get(config.family, config.family)
    return config.model_copy(update={**stacks, "family": family})


def _converted_stack(config: EncoderConfig, to: str, settings: dict[str, Any]) -> EncoderConfig:
    layers = []
    for layer in config.layers:
        mixers = {"mixer": _converted(layer.mixer, to, settings)}
        if layer.cross is not None:
            mixers["cross"] = _converted(layer.cross, to, settings)
        layers.append(layer.model_copy(update=mixers))
    try:
        layers[0].mixer.check(config.width)
    except ValueError as error:
        raise InputError(f"convert to {to!r}: {error}") from None
    return config.model_copy(update={"layers": tuple(layers)})


def _converted(mixer: MixerConfig, to: str, settings: dict[str, Any]) -> MixerConfig:
    """The config of the other kind with all that both kinds have; one that is of neither kind, or of this, stays."""
    if not isinstance(mixer, FavorConfig | FullConfig) or mixer.kind == to:
        return mixer
    kept = {name: value for name, value in mixer.plain().items() if name in _KEPT}
    return _KINDS[to].parse({**kept, **settings}, source=f"convert to {to!r}")

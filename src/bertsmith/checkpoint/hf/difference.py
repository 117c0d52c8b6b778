"""What a config loses on its way to another library and back."""

from collections.abc import Mapping
from typing import Any

from bertsmith.layers.subnet import LayerCut
from bertsmith.models.config import EncoderConfig, LayerConfig, ModelConfig


def first_difference(ours: ModelConfig, back: ModelConfig) -> str | None:
    """The first setting in which two configs describe different networks, as part of a sentence, or None."""
    return _differing("", _resolved(ours), _resolved(back))


def _differing(path: str, ours: Any, back: Any) -> str | None:
    if ours == back:
        return None
    if isinstance(ours, Mapping) and isinstance(back, Mapping):
        found = (
            _differing(f"{path}.{name}" if path else str(name), ours.get(name), back.get(name))
            for name in {**ours, **back}
        )
        return next(filter(None, found))
    shown, instead = ("given" if isinstance(value, Mapping) else repr(value) for value in (ours, back))
    return f"{path} is {shown} and would be read back as {instead}"


def _resolved(config: ModelConfig) -> dict[str, Any]:
    """The config as plain data, defaults that follow from others filled in, what has no effect left out."""
    data = config.plain()
    data["encoder"] = _resolved_stack(config.encoder)
    if config.decoder is not None:
        data["decoder"] = _resolved_stack(config.decoder)
    data["heads"] = {head["kind"]: head for head in data["heads"]}  # in any order
    if not data["heads"].get("replaced_tokens", {}).get("adds_first", True):
        del data["heads"]["replaced_tokens"]["epsilon"]
    return data


def _resolved_stack(stack: EncoderConfig) -> dict[str, Any]:
    data = stack.plain()
    data["layers"] = {index: _resolved_layer(layer, stack.width) for index, layer in enumerate(stack.layers)}
    data["embedding"]["width"] = stack.embedding_width
    del data["scales_outputs"], data["layer_drop"]  # of fresh weights and of training only
    if not stack.embedding.has_norm:
        del data["embedding"]["epsilon"], data["embedding"]["norm"]
        if stack.embedding_width == stack.width:
            del data["embedding"]["has_bias"]
    if len(stack.layers) == 1:
        del data["sharing"]
    if stack.relative is not None and not stack.relative.has_norm:
        del data["relative"]["epsilon"]
    if stack.relative is not None and stack.relative.farthest is None:
        del data["relative"]["clamp"]
    return data


def _resolved_layer(layer: LayerConfig, width: int) -> dict[str, Any]:
    data = layer.plain()
    for name, mixer in (("mixer", layer.mixer), ("cross", layer.cross)):
        if mixer is None:
            continue
        whole = LayerCut(mixer.heads, layer.feedforward.neurons)
        settings = data[name] = mixer.cut(whole, width).plain()  # which has a head_width
        if "value_width" in settings:
            settings["value_width"] = settings["value_width"] or settings["head_width"]
        if not mixer.reads_positions:
            for unused in ("position_dropout", "shares_projections"):
                settings.pop(unused, None)
    return data

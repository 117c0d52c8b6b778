"""Which class of Hugging Face's computes what a model does, its task's head included, and what is written for it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from bertsmith.checkpoint.files import tensors_of
from bertsmith.checkpoint.hf.adapter import TaskForm, Twin, cannot
from bertsmith.checkpoint.hf.reading import read_config
from bertsmith.checkpoint.hf.registry import twin_of
from bertsmith.checkpoint.hf.task_heads import is_choice, label_settings
from bertsmith.checkpoint.names import Row
from bertsmith.errors import InputError
from bertsmith.layers.subnet import LayerCut
from bertsmith.models.config import EncoderConfig, LayerConfig, ModelConfig
from bertsmith.models.heads import HeadConfig, TaskHeadConfig
from bertsmith.models.model import Model
from bertsmith.settings import explain


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


class Native(NamedTuple):
    """A model as one of their classes."""

    twin: Twin
    parts: frozenset[str]
    """The optional parts it has."""
    form: TaskForm | None
    """The form of the head of its task."""
    settings: dict[str, Any]
    """Their config.json, but for tokens."""

    def rows(self, config: ModelConfig) -> list[Row]:
        """Where every tensor goes."""
        return [*self.twin.rows(config, self.parts), *(() if self.form is None else self.form.rows)]


def check_exportable(model: Model, task_kind: str | None = None) -> Native:
    """What a model is written as; a sentence says why if none of their classes computes the same.

    `task_kind` is the kind of the task it was fine-tuned for, where that is known.
    """
    twin, heads = twin_of(model), [head for head in model.config.heads if isinstance(head, TaskHeadConfig)]
    if not heads:
        return _checked(model, twin, None)
    refusals: list[InputError] = []
    for form in _forms(twin, model.config, heads[0], task_kind):
        try:
            return _checked(model, twin, form)
        except InputError as error:
            refusals.append(error)
    raise refusals[0]


def _forms(twin: Twin, config: ModelConfig, head: HeadConfig, task_kind: str | None) -> list[TaskForm]:
    """The forms that a head may have there, those first that stand on a pooler as it does."""
    for_choices = is_choice(head, task_kind)
    forms = [form for form in twin.forms if form.kind == head.kind and form.is_choice == for_choices]
    if not forms:
        what = "choices" if for_choices else f"a head of kind {head.kind!r}"
        raise cannot(twin.model_type, f"transformers has no such class with {what} as ours has it")
    is_pooled = getattr(head, "pooling", None) == "pooler"
    return sorted(forms, key=lambda form: form.reads_pooler != is_pooled)


def _checked(model: Model, twin: Twin, form: TaskForm | None) -> Native:
    config, ours = model.config, tensors_of(model)
    parts = twin.parts(ours)
    if form is not None:
        refusal = form.takes(_head(config, form))
        if refusal is not None:
            raise cannot(twin.model_type, refusal)
        allowed = {form.kind, *(("pooler",) if form.reads_pooler else ())}
        beside = [head.kind for head in config.heads if head.kind not in allowed]
        if beside:
            raise cannot(twin.model_type, f"{form.architecture} has no head of kind {beside[0]!r} beside the task's")
    settings = _settings(twin, config, form)
    try:
        reason = first_difference(config, read_config(twin, settings, parts, form))
    except ValidationError as error:
        reason = explain(ModelConfig, error)
    if reason:
        raise cannot(twin.model_type, reason)
    native = Native(twin, parts, form, settings)
    placed = {line.ours for line in native.rows(config)}
    odd = min(ours.keys() ^ placed, default=None)
    if odd is not None:
        what = "has no place for" if odd in ours else "cannot be without"
        raise InputError(f"a Hugging Face {twin.model_type} {what} {odd!r}")
    return native


def _settings(twin: Twin, config: ModelConfig, form: TaskForm | None) -> dict[str, Any]:
    settings = twin.write_config(config)
    if form is None:
        return settings
    head = _head(config, form)
    return {**settings, **form.write(head), **label_settings(head), "architectures": [form.architecture]}


def _head(config: ModelConfig, form: TaskForm) -> HeadConfig:
    return next(head for head in config.heads if head.kind == form.kind)

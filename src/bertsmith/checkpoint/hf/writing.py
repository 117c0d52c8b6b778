"""Write a model as a Hugging Face folder: as one of their classes if one computes the same, else as ours.

`native_export` finds their class by writing the config, reading it back and comparing; `plan_hf` decides between it and
a folder for `bertsmith.hf`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from bertsmith.checkpoint.files import tensors_of, write_tensors
from bertsmith.checkpoint.hf.adapter import (
    POOLER,
    FamilyAdapter,
    HeadAdapter,
    HfConfig,
    HfSettings,
    not_exportable,
)
from bertsmith.checkpoint.hf.names import Row, to_theirs
from bertsmith.checkpoint.hf.reading import ADAPTERS, adapter_for, read_config, rename_start
from bertsmith.checkpoint.hf.sentences import pooling_refusal, write_sentences
from bertsmith.checkpoint.hf.task_heads import PROBLEMS, is_choice, label_settings
from bertsmith.checkpoint.hf.wrapped import architecture_of, check_wrappable, opening, wrapped_settings, write_wrapped
from bertsmith.errors import InputError, nearest
from bertsmith.files import write_json
from bertsmith.layers.mixers import MixerConfig
from bertsmith.layers.mixers.disentangled import DisentangledConfig
from bertsmith.layers.mixers.full import FullConfig
from bertsmith.layers.subnet import LayerCut
from bertsmith.models.config import EncoderConfig, LayerConfig, ModelConfig
from bertsmith.models.heads import HeadConfig, PoolerConfig, TaskHeadConfig
from bertsmith.models.heads.task import Classifier, ClassifierConfig, HiddenLayerConfig
from bertsmith.models.model import Model
from bertsmith.models.seq2seq import Seq2Seq

_Plain: TypeAlias = dict[str, Any]
_DETECTOR = "replaced_tokens"
_COUNTS_FROM_PADDING = ("roberta", "xlm-roberta", "mpnet")
"""Families whose positions are counted from the id of the padding token."""


def first_difference(ours: ModelConfig, back: ModelConfig) -> str | None:
    """Describe the first setting in which two configs describe different networks, or return None."""
    return _difference("", _normalised(ours), _normalised(back))


def _difference(path: str, ours: object, back: object) -> str | None:
    if ours == back:
        return None
    if isinstance(ours, Mapping) and isinstance(back, Mapping):
        found = (
            _difference(f"{path}.{name}" if path else str(name), ours.get(name), back.get(name))
            for name in {**ours, **back}
        )
        return next(filter(None, found))
    shown, instead = ("given" if isinstance(value, Mapping) else repr(value) for value in (ours, back))
    return f"{path} is {shown} and would be read back as {instead}"


def _normalised(config: ModelConfig) -> _Plain:
    """The config as plain data, with derived defaults filled in and settings without effect removed."""
    data = config.plain()
    data["encoder"] = _normalised_stack(config.encoder)
    if config.decoder is not None:
        data["decoder"] = _normalised_stack(config.decoder)
    data["heads"] = {head["kind"]: head for head in data["heads"]}  # the order has no effect
    if not data["heads"].get("replaced_tokens", {}).get("adds_first", True):
        del data["heads"]["replaced_tokens"]["epsilon"]
    for head in data["heads"].values():
        if isinstance(head.get("hidden"), dict) and not head.get("dropout"):
            del head["hidden"]["drops_input"]
    return data


def _normalised_stack(stack: EncoderConfig) -> _Plain:
    data = stack.plain()
    data["layers"] = {index: _normalised_layer(layer, stack.width) for index, layer in enumerate(stack.layers)}
    data["embedding"]["width"] = stack.embedding_width
    del data["scales_outputs"], data["layer_drop"]  # only for initialisation and training
    if not stack.embedding.has_norm:
        del data["embedding"]["epsilon"], data["embedding"]["norm"]
        if stack.embedding_width == stack.width:
            del data["embedding"]["has_bias"]
    if len(stack.layers) == 1:
        del data["sharing"]
    if stack.relative is not None and not stack.relative.has_norm:
        del data["relative"]["epsilon"]
    if stack.relative is not None and stack.relative.max_distance is None:
        del data["relative"]["clamp"]
    return data


def _normalised_layer(layer: LayerConfig, width: int) -> _Plain:
    data = layer.plain()
    for name, mixer in (("mixer", layer.mixer), ("cross", layer.cross)):
        if mixer is None:
            continue
        whole = LayerCut(mixer.heads, layer.feedforward.neurons)
        settings = data[name] = mixer.cut(whole, width).plain()  # with an explicit head_width
        if "value_width" in settings:
            settings["value_width"] = settings["value_width"] or settings["head_width"]
        if not mixer.reads_positions:
            for unused in ("position_dropout", "shares_projections"):
                settings.pop(unused, None)
    return data


class NativeExport(NamedTuple):
    """A model as one of Hugging Face's classes."""

    adapter: FamilyAdapter
    parts: frozenset[str]
    """The optional parts it has."""
    head: HeadAdapter | None
    """The adapter of its task head."""
    settings: HfSettings
    """Their config.json without token ids."""

    @property
    def architecture(self) -> str:
        return str(self.settings["architectures"][0])

    def rows(self, config: ModelConfig) -> list[Row]:
        """Return the name table of all tensors."""
        return [*self.adapter.rows(config, self.parts), *(() if self.head is None else self.head.rows)]


def native_export(model: Model, task_kind: str | None = None) -> NativeExport:
    """Find the class of Hugging Face that computes the same; raise with the reason if no class does.

    `task_kind` is the kind of the task the model was fine-tuned for, if known.
    """
    adapter, embedder = adapter_for(model), model.config.embedder
    config, tensors = model.config, tensors_of(model)
    if embedder is not None:  # files of sentence-transformers describe it
        refusal = pooling_refusal(embedder)
        if refusal is not None:
            raise not_exportable(adapter.model_type, refusal)
        config = config.changed(heads=tuple(head for head in config.heads if head != embedder))
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("heads.embedder.")}
    pad = adapter.write_config(config).get("pad_token_id")
    if pad is not None and model.tokenizer is not None and model.tokenizer.pad != pad:
        reason = f"its padding token has the id {model.tokenizer.pad}, and positions there are counted from {pad}"
        raise not_exportable(adapter.model_type, reason)
    heads = [head for head in config.heads if isinstance(head, TaskHeadConfig)]
    if not heads:
        return _check_round_trip(config, tensors, adapter, None)
    refusals: list[InputError] = []
    for head in _candidate_heads(adapter, heads[0], task_kind):
        try:
            return _check_round_trip(config, tensors, adapter, head)
        except InputError as error:
            refusals.append(error)
    raise refusals[0]


def _candidate_heads(adapter: FamilyAdapter, own: HeadConfig, task_kind: str | None) -> list[HeadAdapter]:
    """Return the adapters that may fit a head, those with its use of the pooler first."""
    if own.kind == "classifier" and getattr(own, "pooling", None) == "last":
        raise not_exportable(adapter.model_type, "pooling is 'last', and no class of transformers classifies that way")
    for_choices = is_choice(own, task_kind)
    heads = [head for head in adapter.task_heads if head.kind == own.kind and head.is_choice == for_choices]
    if not heads:
        task = "choices" if for_choices else f"a head of kind {own.kind!r}"
        raise not_exportable(adapter.model_type, f"transformers has no such class with {task}")
    is_pooled = getattr(own, "pooling", None) == "pooler"
    return sorted(heads, key=lambda head: head.reads_pooler != is_pooled)


def _check_round_trip(
    config: ModelConfig, ours: Mapping[str, Tensor], adapter: FamilyAdapter, head: HeadAdapter | None
) -> NativeExport:
    """Raise unless the written config is read back as the same network and every tensor has a name."""
    settings, parts = adapter.write_config(config), adapter.parts(ours)
    if head is not None:
        own = next(own for own in config.heads if own.kind == head.kind)
        allowed = {head.kind, *(("pooler",) if head.reads_pooler else ())}
        beside = [other.kind for other in config.heads if other.kind not in allowed]
        if beside:
            reason = f"{head.architecture} has no head of kind {beside[0]!r} beside the task's"
            raise not_exportable(adapter.model_type, reason)
        settings = {**settings, **head.write(own), **label_settings(own), "architectures": [head.architecture]}
    try:
        difference = first_difference(config, read_config(adapter, HfConfig(settings), parts, head))
    except InputError as error:  # a head that the network cannot have there
        difference = str(error)
    if difference:
        raise not_exportable(adapter.model_type, difference)
    native = NativeExport(adapter, parts, head, settings)
    known = {line.ours for line in native.rows(config)}
    odd = min(ours.keys() ^ known, default=None)
    if odd is not None:
        problem = "has no tensor for" if odd in ours else "needs a tensor for"
        raise InputError(f"a Hugging Face {adapter.model_type} {problem} {odd!r}")
    for line in native.rows(config):
        if not line.theirs and not torch.equal(ours[line.ours].cpu(), line.conversion.to_ours([])):
            raise not_exportable(adapter.model_type, f"{line.ours} differs from its value there")
    return native


def token_ids(model: Model) -> dict[str, int]:
    """Token ids that config.json names."""
    if model.tokenizer is None:
        return {}
    ids = {"pad_token_id": model.tokenizer.pad}
    if model.config.decoder is None:
        return ids
    start, end = model.tokenizer.start, model.tokenizer.separator
    return {**ids, "decoder_start_token_id": start, "eos_token_id": end, "forced_eos_token_id": end}


def tokenizer_config(model: Model) -> HfSettings:
    """Content of tokenizer_config.json."""
    tokenizer = model.require_tokenizer()
    roles = {
        "pad_token": tokenizer.pad,
        "unk_token": tokenizer.unknown,
        "cls_token": tokenizer.start,
        "sep_token": tokenizer.separator,
        "mask_token": tokenizer.mask,
    }
    names = {role: tokenizer.tokens([index])[0] for role, index in roles.items()}
    max_length = model.config.text_length
    inputs = ["input_ids", *(["token_type_ids"] if model.config.encoder.embedding.types else []), "attention_mask"]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_length, "padding_side": "right"}
    return {**settings, "model_input_names": inputs, **names}


NativeChoice = Literal["auto", "always", "never"]
"""Whether to write one of their classes: if one computes the same, in any case, or never."""
NATIVE_CHOICES = ("auto", "always", "never")

TaskContent: TypeAlias = Mapping[str, Any]
"""Content of the task.json of a fine-tuned model."""


@dataclass(frozen=True)
class HfExport:
    """Planned export of a model."""

    model: Model
    native: NativeExport | None
    """Their class; None for a folder that `bertsmith.hf` opens."""
    settings: HfSettings
    """The whole config.json."""
    remark: str
    """Format of the folder and the reason, as one sentence."""
    task: TaskContent | None

    @property
    def form(self) -> Literal["native", "bertsmith"]:
        return "bertsmith" if self.native is None else "native"

    @property
    def architecture(self) -> str:
        """The class that the folder names."""
        return str(self.settings["architectures"][0])

    def write(self, folder: Path) -> None:
        """Write config.json, the weights, the tokenizer and the task into an existing folder."""
        if self.native is None:
            write_wrapped(self.model, folder, self.settings)
        else:
            write_json(folder / "config.json", self.settings)
            _write_native(self.model, self.native, folder)
        if self.model.tokenizer is not None:
            self.model.tokenizer.save(folder)
            write_json(folder / "tokenizer_config.json", tokenizer_config(self.model))
        write_sentences(self.model.config, folder, tensors_of(self.model), is_native=self.native is not None)
        if self.task is not None:
            write_json(folder / "task.json", dict(self.task))


def plan_hf(model: Model, *, native: NativeChoice = "auto", task: TaskContent | None = None) -> HfExport:
    """Decide what to write for a model, or raise if it cannot be exported; writes nothing."""
    if native not in NATIVE_CHOICES:
        raise InputError(f"native is {native!r}; {nearest(str(native), NATIVE_CHOICES)}")
    kind = None if task is None else task.get("task", {}).get("kind")
    extras: HfSettings = {**token_ids(model), **({"problem_type": PROBLEMS[kind]} if kind in PROBLEMS else {})}
    reason = "native was given as 'never'"
    if native != "never":
        try:
            whole, found = _native_view(model, kind)
        except InputError as error:
            if native == "always":
                raise
            reason = str(error)
        else:
            missing = found.adapter.missing(whole.config) if native == "auto" else None
            if missing is None:
                remark = _native_remark(whole, found) + _view_remark(model, whole) + _scale_remark(task)
                return HfExport(whole, found, found.settings | extras, remark, task)
            reason = f"{missing}; native = 'always' writes a {found.architecture} all the same"
    check_wrappable(model)
    architecture = architecture_of(model.config, kind)
    settings = wrapped_settings(model.config, architecture) | extras
    settings |= {"opened_by": f"the Auto classes of transformers, {opening(model.config)}", "why_not_native": reason}
    remark = f"written as {architecture}, which transformers opens {opening(model.config)}, because {reason}"
    return HfExport(model, None, settings, remark + _scale_remark(task), task)


def _native_view(model: Model, kind: str | None) -> tuple[Model, NativeExport]:
    """Return the model, or another description of the same network, and its class; raise the first refusal if none."""
    refusals: list[InputError] = []
    for view in _views(model):
        try:
            return view, native_export(view, kind)
        except InputError as error:
            refusals.append(error)
    raise refusals[0]


def _views(model: Model) -> Iterator[Model]:
    """Descriptions of the same network that a class may have, the model itself first; they share its weights.

    The head of replaced-token detection is left out if no class has it: it is for further pre-training alone, which
    needs the generator as well.
    """
    yield model
    if isinstance(model, Seq2Seq):
        return
    config = model.config
    if _DETECTOR in model.heads:
        heads = {name: head for name, head in model.heads.items() if name != _DETECTOR}
        model = _view(
            model, config.changed(heads=tuple(head for head in config.heads if head.kind != _DETECTOR)), heads
        )
        yield model
    if pooled := _with_pooler(model):
        yield pooled
    if not any(isinstance(head, TaskHeadConfig) for head in config.heads):
        return  # a pre-trained network keeps its family
    for adapter in ADAPTERS.values():
        if adapter.family != config.family and (other := _as_family(model, adapter.family)):
            yield other


def _view(model: Model, config: ModelConfig, heads: Mapping[str, nn.Module]) -> Model:
    view = Model(config, model.encoder, dict(heads))
    view.tokenizer = model.tokenizer
    return view.train(model.training)


def _with_pooler(model: Model) -> Model | None:
    """Return the model with the tanh layer of its classifier as a pooler, as in BERT; None without such a layer."""
    config = model.config
    own = next((head for head in config.heads if isinstance(head, ClassifierConfig)), None)
    if own is None or own.pooling != "first" or "pooler" in model.heads:
        return None
    if own.hidden is None or own.hidden.changed(drops_input=True) != HiddenLayerConfig(activation="tanh"):
        return None
    head = model.heads["classifier"]
    assert isinstance(head, Classifier)
    assert head.hidden is not None
    pooled = own.changed(pooling="pooler", hidden=None)
    score, pooler = pooled.build(config.encoder.width, 0, 0), PoolerConfig().build(config.encoder.width, 0, 0)
    score.score, pooler.project = head.score, head.hidden
    others = tuple(other for other in config.heads if other != own)
    heads = {**model.heads, "classifier": score, "pooler": pooler}
    return _view(model, config.changed(heads=(*others, PoolerConfig(), pooled)), heads)


def _as_family(model: Model, family: str) -> Model | None:
    """Return the model as one of another family; None if positions there depend on an unknown padding token.

    Disentangled attention without position terms is full attention.
    """
    if model.tokenizer is None and family in _COUNTS_FROM_PADDING:
        return None
    encoder = model.config.encoder
    if family.startswith("deberta"):
        layers = tuple(layer.changed(mixer=_without_terms(layer.mixer)) for layer in encoder.layers)
        encoder = encoder.changed(layers=layers)
    return _view(model, model.config.changed(family=family, encoder=encoder), dict(model.heads))


def _without_terms(mixer: MixerConfig) -> MixerConfig:
    """Return full attention as disentangled attention without position terms; other mixers unchanged."""
    common = {name: getattr(mixer, name) for name in MixerConfig.model_fields if name != "kind"}
    if not isinstance(mixer, FullConfig) or mixer != FullConfig(**common):
        return mixer
    plain = DisentangledConfig(heads=mixer.heads, content_to_position=False, position_to_content=False)
    return plain.changed(position_dropout=mixer.dropout, **common)


def save_hf(model: Model, folder: Path, *, native: NativeChoice = "auto", task: TaskContent | None = None) -> str:
    """Write a folder for `transformers` into an existing folder; return which form it has and why."""
    plan = plan_hf(model, native=native, task=task)
    plan.write(folder)
    return plan.remark


def _native_remark(model: Model, native: NativeExport) -> str:
    remark = f"written as {native.architecture}, which transformers opens without Bertsmith"
    if model.config.embedder is not None:
        remark += " for its hidden states; sentence-transformers computes the embeddings from them"
    difference = native.adapter.remark(model.config)
    return remark if difference is None else f"{remark}; {difference}"


def _view_remark(model: Model, view: Model) -> str:
    """Explain how the description of the network differs from the model's own."""
    remark = ""
    if set(model.heads) - set(view.heads):
        remark += f"; its head {_DETECTOR}, which that class lacks, is left out"
    if view.config.family != model.config.family:
        remark += (
            f"; no {model.config.family} class has this head, and a {view.config.family} of this shape is the same"
        )
    own = next((head for head in model.config.heads if isinstance(head, ClassifierConfig)), None)
    if "pooler" in set(view.heads) - set(model.heads) and own is not None and own.dropout:
        remark += "; in training, its dropout is applied once, after the pooler"
    return remark


def _scale_remark(task: TaskContent | None) -> str:
    """Explain how to convert the outputs of a regression that was trained on another scale."""
    settings = {} if task is None else task.get("task", {})
    if not settings.get("scale") or settings.get("lowest") is None or settings.get("highest") is None:
        return ""
    lowest, highest = float(settings["lowest"]), float(settings["highest"])
    return f"; its numbers are {lowest:g} + {highest - lowest:g} · the output, since it was trained on 0 to 1"


def _write_native(model: Model, native: NativeExport, folder: Path) -> None:
    tensors = {name: tensor.detach() for name, tensor in tensors_of(model).items()}
    aliases = native.adapter.output_aliases(model.config)
    theirs, width = to_theirs(native.rows(model.config), tensors), model.config.encoder.width
    if not model.config.heads or model.config.heads == (model.config.embedder,):
        # their encoder class may contain a pooler, and reports a missing one as newly initialised
        prefix = native.adapter.prefix
        for line in native.adapter.optional_rows.get(POOLER, ()):
            shape = (width, width) if line.ours.endswith("weight") else (width,)
            theirs |= {name: torch.zeros(shape) for name in line.theirs if name.startswith(prefix)}
    if native.head is not None:
        dtype = next(iter(theirs.values())).dtype
        theirs |= {name: make(width).to(dtype) for name, make in native.head.constants.items()}
    renamed = {rename_start(name, aliases): tensor for name, tensor in theirs.items()}
    write_tensors(folder / "model.safetensors", renamed)

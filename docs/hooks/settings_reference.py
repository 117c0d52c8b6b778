"""Reference of every setting, generated from the settings records: path, type, default, allowed values, help."""

import json
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from bertsmith.layers.mixers import MIXERS
from bertsmith.models.config import ModelConfig
from bertsmith.models.heads import HEADS
from bertsmith.models.published import PRESETS
from bertsmith.models.sizes import Size
from bertsmith.objectives.distillation import TERMS
from bertsmith.serving.settings import SchedulerLimits, ServeSettings
from bertsmith.settings import ByKind, Record
from bertsmith.shrinking.elastic import ElasticSettings
from bertsmith.shrinking.exits import ExitSettings
from bertsmith.shrinking.fit.settings import FitSettings
from bertsmith.shrinking.prune import PruneSettings
from bertsmith.shrinking.vocabulary import VocabularySettings
from bertsmith.shrinking.weights import WeightSettings
from bertsmith.tasks import TASKS
from bertsmith.training.finetuning import FinetuneSettings, TranslationSettings
from bertsmith.training.pretraining import OBJECTIVES, PretrainSettings

FOLDER = "reference/settings"
_UNSET = object()
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "multiple_of": "a multiple of", "min_length": "at least"}


@dataclass(frozen=True)
class Setting:
    """One setting as the reference shows it."""

    path: str
    type: str
    default: str
    """TOML value; empty for a required setting."""
    help: str


@dataclass(frozen=True)
class Section:
    """The settings of a record under one heading; settings of nested records have dotted paths."""

    title: str
    record: type[Record]
    prefix: str = ""
    """Path of the record in the recipe, with its final dot."""
    anchor: str = ""
    """Prefix of the anchors, for paths that occur in several sections of a page."""
    base: type[Record] | None = None
    """A record whose fields another section describes."""

    def settings(self) -> Iterator[Setting]:
        """Yield the settings of the section, without the names that its title states."""
        known = () if self.base is None else [self.prefix + name for name in self.base.model_fields]
        for setting in _settings(self.record, self.prefix, _UNSET):
            if setting.path not in (*known, f"{self.prefix}kind", "method"):
                yield setting


@dataclass(frozen=True)
class SettingsPage:
    title: str
    intro: str
    sections: tuple[Section, ...]


def _kinds(table: Mapping[str, type[Record]], title: str, prefix: str) -> tuple[Section, ...]:
    return tuple(Section(f"{title} `{kind}`", record, prefix, f"{kind}.") for kind, record in table.items())


def _sizes() -> tuple[Section, ...]:
    """Return a section for each record of sizes: first the fields shared by all presets, then the additional ones."""
    presets: dict[type[Record], list[str]] = {}
    for name, (_, size) in PRESETS.items():
        presets.setdefault(type(size), []).append(name.split("-")[0])
    added = [
        Section(f"Sizes of {', '.join(dict.fromkeys(names))} presets", record, "model.overrides.", f"{names[0]}.", Size)
        for record, names in presets.items()
        if record is not Size
    ]
    return (Section("Sizes of all presets", Size, "model.overrides."), *added)


PAGES = {
    "pretrain": SettingsPage(
        "Settings of pretrain",
        "The recipe of `bertsmith pretrain` and `bertsmith compare`. `--set PATH=VALUE` changes one value; `--explain` "
        "prints all of them.",
        (
            Section("Pre-training", PretrainSettings),
            *_kinds(OBJECTIVES, "Objective", "objective."),
        ),
    ),
    "finetune": SettingsPage(
        "Settings of finetune",
        "The recipe of `bertsmith finetune`. The defaults below give way to the published ones of the family, size "
        "and task; `--explain` prints the values of your run.",
        (
            Section("Fine-tuning", FinetuneSettings),
            Section("Translation", TranslationSettings, anchor="translation."),
        ),
    ),
    "tasks": SettingsPage(
        "Settings of tasks",
        "The table `task` of `finetune` and `shrink`: `task.kind` and the settings of each kind. "
        "Columns and kind are recognised from the data where they are not given.",
        _kinds(TASKS, "Task", "task."),
    ),
    "shrink": SettingsPage(
        "Settings of shrink",
        "The recipe of `bertsmith shrink`, by method.",
        (
            Section("Method `elastic`", ElasticSettings),
            Section("Method `prune`", PruneSettings, anchor="prune-method."),
            Section("Method `weights`", WeightSettings, anchor="weights-method."),
            Section("Method `exits`", ExitSettings, anchor="exits-method."),
            Section("Method `vocabulary`", VocabularySettings, anchor="vocabulary-method."),
        ),
    ),
    "distillation": SettingsPage(
        "Distillation terms",
        "Entries of a list of `terms`: `distillation.terms` of `pretrain` and `finetune`, and `width.terms`, "
        "`depth.terms` and `labels.terms` of elastic training. `N` is the index in the list.",
        _kinds(TERMS, "Term", "terms.N."),
    ),
    "fit": SettingsPage(
        "Settings of fit",
        "The settings of `bertsmith fit`, changed by its flags or `--set PATH=VALUE`.",
        (Section("Fit", FitSettings),),
    ),
    "serve": SettingsPage(
        "Settings of serve",
        "`bertsmith serve` takes flags instead of a recipe. Settings without a flag keep their default.",
        (Section("Service", ServeSettings), Section("Scheduler of a model", SchedulerLimits)),
    ),
    "network": SettingsPage(
        "Settings of a network",
        "A network written out as `model.network`, or as `config.json` of a model stores it. `N` is the index of a "
        "layer or head; a layer in TOML may have `repeat = 12`. `model.overrides` changes the sizes of a preset.",
        (
            Section("Model", ModelConfig),
            *_kinds(MIXERS, "Mixer", "encoder.layers.N.mixer."),
            *_kinds(HEADS, "Head", "heads.N."),
            *_sizes(),
        ),
    ),
}
_TABLES: tuple[tuple[Mapping[str, Any], str], ...] = (
    (OBJECTIVES, "pretrain"),
    (TASKS, "tasks"),
    (TERMS, "distillation"),
    (MIXERS, "network"),
    (HEADS, "network"),
)


def pages() -> dict[str, str]:
    """Return the Markdown of every page by its path in the documentation."""
    return {f"{FOLDER}/{name}.md": _page(page) for name, page in PAGES.items()}


def anchors() -> dict[str, list[tuple[str, str]]]:
    """Return (page, anchor) of every place where a setting is described, by its path."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name, page in PAGES.items():
        for section in page.sections:
            for setting in section.settings():
                found.setdefault(setting.path, []).append((f"{FOLDER}/{name}.md", section.anchor + setting.path))
    return found


def _page(page: SettingsPage) -> str:
    lines = [f"# {page.title}", "", page.intro, ""]
    for section in page.sections:
        group = ""
        lines += [f"## {section.title}", "", _summary(section.record), ""]
        for setting in section.settings():
            first = setting.path.removeprefix(section.prefix).split(".")[0]
            is_group = setting.path.count(".") > section.prefix.count(".")
            if is_group and first != group:
                lines += [f"### {section.prefix}{first} {{#{section.anchor}{section.prefix}{first}-group}}", ""]
            group = first if is_group else group
            default = f" · default `{setting.default}`" if setting.default else " · required"
            default = " · not set by default" if setting.default == "not set" else default
            lines += [f"#### `{setting.path}` {{#{section.anchor}{setting.path} .setting}}", ""]
            lines += [setting.type + default, "{: .setting-type }", "", setting.help, ""]
    return "\n".join(lines) + "\n"


def _summary(record: type[Record]) -> str:
    """Return the first paragraph of the record's own docstring."""
    return _escape(cleandoc(record.__dict__.get("__doc__") or "").split("\n\n")[0])


def _settings(record: type[Record], prefix: str, defaults: Any) -> Iterator[Setting]:
    """Yield the settings of a record in order, scalars before tables; `defaults` is the instance that holds them."""
    nested = []
    for name, field in record.model_fields.items():
        inner, table = _record_in(field.annotation), _table_in(field.annotation, field.metadata)
        default = _default(field) if defaults is _UNSET else getattr(defaults, name)
        if inner is not None and table is None and inner is not ModelConfig:
            nested.append((name, field, inner, default))
            continue
        yield Setting(prefix + name, _type(field, table), _toml(default), _help(record, name))
    for name, field, inner, default in nested:
        is_list = get_origin(_without_none(field.annotation)[0]) is tuple
        is_optional = type(None) in get_args(field.annotation)
        if is_list or is_optional or field.description:
            kind = "list of tables" if is_list else "table"
            shown = "" if default is _UNSET else "{}" if isinstance(default, Record) else _toml(default)
            yield Setting(prefix + name, kind.capitalize(), shown, _help(record, name))
        if name != "decoder":  # the same as encoder
            below = f"{prefix}{name}.N." if is_list else f"{prefix}{name}."
            yield from _settings(inner, below, default if isinstance(default, inner) else _UNSET)


def _help(record: type[Record], name: str) -> str:
    """Return the docstring of a field, from a base class if the record overrides the field without one."""
    bases = (base for base in record.__mro__ if issubclass(base, Record) and name in base.model_fields)
    return _escape(next((text for base in bases if (text := base.model_fields[name].description)), ""))


def _default(field: FieldInfo) -> Any:
    value = field.get_default(call_default_factory=True)
    return _UNSET if value is PydanticUndefined else value


def _toml(value: Any) -> str:
    """Return a default as TOML writes it."""
    if value is _UNSET:
        return ""
    if value is None:
        return "not set"
    if isinstance(value, Record):
        fields = type(value).model_fields
        settings = {name: getattr(value, name) for name in fields}
        settings = {name: v for name, v in settings.items() if name == "kind" or v != _default(fields[name])}
        return "{" + ", ".join(f"{name} = {_toml(inner)}" for name, inner in settings.items()) + "}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_toml, value))}]"
    return f"{value:g}" if isinstance(value, float) else json.dumps(value, default=str)


def _type(field: FieldInfo, table: tuple[Mapping[str, Any], str] | None) -> str:
    words = _type_words(field.annotation, field.metadata)
    if table is not None:
        kinds, page = table
        links = ", ".join(f"[`{kind}`]({page}.md#{_heading_anchor(kinds, kind)})" for kind in kinds)
        words = f"{'list of tables' if words.startswith('list') else 'table'}, `kind` is one of {links}"
    elif _record_in(field.annotation) is ModelConfig:
        words = "table, see [network](network.md)"
    return words[0].upper() + words[1:]


def _heading_anchor(table: Mapping[str, Any], kind: str) -> str:
    titles = {id(OBJECTIVES): "objective", id(TASKS): "task", id(TERMS): "term", id(MIXERS): "mixer", id(HEADS): "head"}
    return f"{titles[id(table)]}-{kind}"


def _type_words(annotation: Any, metadata: list[Any]) -> str:
    """Return a type in words, with its bounds: "number > 0"."""
    annotation, inner_metadata = _without_none(annotation)
    bounds = _bounds([*metadata, *inner_metadata])
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "one of " + ", ".join(f"`{json.dumps(value)}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type_words(argument, []) for argument in arguments)) + bounds
    if origin is tuple:
        of = dict.fromkeys(_type_words(argument, []) for argument in arguments if argument is not Ellipsis)
        if "…" not in of and Ellipsis not in arguments and arguments:
            return f"list of {len(arguments)}: {' or '.join(of)}"
        return f"list, each {' or '.join(of)}" + (f", {bounds.strip()} of them" if bounds else "")
    if origin in (dict, Mapping) or annotation is dict:
        return "table"
    names = {bool: "`true` or `false`", int: "whole number", float: "number", str: "text", Path: "path"}
    return names.get(annotation, "table") + bounds


def _bounds(metadata: list[Any]) -> str:
    found = []
    for mark in metadata:
        if isinstance(mark, FieldInfo):
            found += [_bounds(list(mark.metadata)).strip()]
        found += [f"{sign} {getattr(mark, name):g}" for name, sign in _BOUNDS.items() if _has_bound(mark, name)]
    return "".join(f" {bound}," for bound in found if bound).rstrip(",")


def _has_bound(mark: Any, name: str) -> bool:
    return isinstance(getattr(mark, name, None), int | float)


def _without_none(annotation: Any) -> tuple[Any, list[Any]]:
    """Return a type without `None` and without `Annotated`, and the marks of the latter."""
    if get_origin(annotation) is Annotated:
        inner, *marks = get_args(annotation)
        bare, more = _without_none(inner)
        return bare, [*marks, *more]
    if get_origin(annotation) in (Union, types.UnionType):
        others = [argument for argument in get_args(annotation) if argument is not type(None)]
        if len(others) == 1:
            return _without_none(others[0])
    return annotation, []


def _record_in(annotation: Any) -> type[Record] | None:
    if isinstance(annotation, type) and issubclass(annotation, Record):
        return annotation
    return next((found for argument in get_args(annotation) if (found := _record_in(argument)) is not None), None)


def _table_in(annotation: Any, metadata: list[Any]) -> tuple[Mapping[str, Any], str] | None:
    """Return the table of kinds that a field chooses from, and the page that describes them."""
    for mark in [*metadata, *getattr(annotation, "__metadata__", ())]:
        if isinstance(mark, ByKind):
            return next((table, page) for table, page in _TABLES if table is mark.table)
    return next((found for argument in get_args(annotation) if (found := _table_in(argument, [])) is not None), None)


def _escape(text: str) -> str:
    return " ".join(text.split()).replace("<", "&lt;").replace("*", r"\*")

"""Strict, frozen, nested settings: the base class of every config and recipe.

A misspelt key or an invalid value raises InputError, which names the field, the value and what is allowed.
"""

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, core_schema

from bertsmith.errors import InputError, nearest

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)  # pydantic has no public name for it

Plain = dict[str, Any]
"""Settings as plain data, as in TOML and JSON."""
RENAMED = {
    "deviation": ("init_std", "noise_std"),
    "farthest": ("max_distance",),
    "longest": ("max_length", "max_answer_length"),
    "longest_ngram": ("max_ngram",),
    "most": ("max_predictions",),
    "part": ("split",),
    "pieces": ("tokens",),
    "taps": ("kernel_size",),
}
"""Former names of settings and their new names, for the error message of an unknown setting."""
USUAL_NAMES: dict[str, tuple[str, ...]] = {
    "lr": ("learning_rate",),
    "batch_size": ("examples", "tokens"),
    "num_epochs": ("epochs",),
    "num_train_epochs": ("epochs",),
    "max_steps": ("steps",),
    "max_seq_length": ("length",),
    "warmup_ratio": ("warmup",),
    "hidden_size": ("width",),
    "num_hidden_layers": ("layers",),
}
"""Names of settings in other programs and their names here, for the error message of an unknown setting."""
MAX_REPEAT = 1024
"""Copies of one layer that `repeat` makes; more is a damaged file."""
_TYPE = re.compile(r"(literal|tuple|list|dict|function-\w+)\[")  # name of a type in the location of a pydantic error


class InvalidRecord(InputError):
    """A record that was built in Python from invalid values; the message names the first one."""


class _RecordType(ModelMetaclass):
    """Class of records: their constructors raise InputError instead of pydantic's ValidationError."""

    def __call__(cls, *arguments: Any, **values: Any) -> Any:
        try:
            return super().__call__(*arguments, **values)
        except ValidationError as error:
            raise InvalidRecord(explain(cls, error)) from None  # type: ignore[arg-type]


class Record(BaseModel, metaclass=_RecordType):
    """A frozen, strict group of settings. A docstring under a field is its help text."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # fields of any type may have them: null would be another value
    )
    short_field: ClassVar[str | None] = None
    """Field whose value alone stands for the record, as the activation of a hidden layer; None for no short form."""

    @classmethod
    def parse(cls, data: Mapping[str, Any], source: str = "settings") -> Self:
        """Validate plain data (from TOML, JSON or the command line) and return the record; raise InputError."""
        try:
            # JSON mode, because strict validation accepts a list for a tuple and a string for a path only there
            return cls.model_validate_json(json.dumps(_expand_repeats(cls._expand_fields(data, source))))
        except ValidationError as error:
            raise InputError(f"{source}: {explain(cls, error)}") from None
        except TypeError as error:  # a TOML date, for example
            raise InputError(f"{source}: {error}; allowed: text, numbers, true and false, lists, tables") from None

    @classmethod
    def expand(cls, value: Any, path: str) -> Any:
        """Expand a short form of this record, such as a name, to plain data; `path` names the field in errors."""
        return value

    @classmethod
    def _expand_fields(cls, data: Mapping[str, Any], source: str) -> Plain:
        expanded = dict(data)
        for name, field in cls.model_fields.items():
            record = _record_in(field.annotation) if name in data else None
            if record is not None:
                try:
                    expanded[name] = record.expand(data[name], name)
                except InputError as error:
                    raise InputError(f"{source}: {error}") from None
        return expanded

    def changed(self, **updates: Any) -> Self:
        """Return a copy with some fields changed, validated as a whole; raise InputError if it is invalid."""
        try:
            return type(self).model_validate(
                {**{name: getattr(self, name) for name in type(self).model_fields}, **updates}
            )
        except ValidationError as error:
            raise InputError(explain(type(self), error)) from None

    def help(self) -> dict[str, str]:
        """Return the help texts of all settings by path, such as `objective.masking.rate`."""
        texts: dict[str, str] = {}
        for name, field in type(self).model_fields.items():
            described = " ".join((field.description or "").split())
            values = _allowed_values(field.annotation, field.metadata)
            allowed = f"allowed: {', '.join(values)}" if values else ""
            if described or allowed:
                texts[name] = f"{described} ({allowed})" if described and allowed else described or allowed
            value = getattr(self, name)
            if isinstance(value, Record):
                texts |= {f"{name}.{inner}": text for inner, text in value.help().items()}
                if (
                    values and "kind" in type(value).model_fields
                ):  # the kinds of a record are allowed values of its field `kind`
                    texts[f"{name}.kind"] = allowed
        return texts

    def plain(self) -> Plain:
        """Return the record as JSON-ready data; `parse` is the inverse."""
        return self.model_dump(mode="json")


def check_same(earlier: Mapping[str, Any], now: Mapping[str, Any], path: str = "") -> None:
    """Raise InputError if the settings of a resumed run differ from the settings it was started with."""
    for name, value in earlier.items():
        setting = f"{path}{name}"
        if isinstance(value, dict) and isinstance(now.get(name), dict):
            check_same(value, now[name], f"{setting}.")
        elif value != now.get(name):
            raise InputError(
                f"--resume: {setting} is {now.get(name)!r}, but the run was started with {value!r}; start a new run to "
                "change it"
            )


class ByKind:
    """Annotation of a field whose record class is selected by its `kind`: `Annotated[Base, ByKind(TABLE)]`."""

    def __init__(self, table: Mapping[str, type[Record]], default: str | None = None) -> None:
        self.table, self.default = table, default

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        choices = {kind: handler.generate_schema(record) for kind, record in self.table.items()}
        return core_schema.tagged_union_schema(choices, discriminator=self._kind)

    def _kind(self, value: Any) -> str | None:
        return value.get("kind", self.default) if isinstance(value, Mapping) else getattr(value, "kind", None)


def _expand_repeats(data: Any) -> Any:
    """Return the data with every list item that has `repeat = n` repeated n times."""
    if isinstance(data, Mapping):
        return {key: _expand_repeats(value) for key, value in data.items()}
    if not isinstance(data, list | tuple):
        return data
    items: list[Any] = []
    for item in data:
        repeat = item.get("repeat", 1) if isinstance(item, Mapping) else 1
        if not isinstance(repeat, int) or not 1 <= repeat <= MAX_REPEAT:
            raise InputError(f"repeat is {repeat!r}; allowed: 1 to {MAX_REPEAT}")
        if isinstance(item, Mapping):
            item = {key: value for key, value in item.items() if key != "repeat"}
        items += [_expand_repeats(item)] * repeat
    return items


def explain(record: type[Record], error: ValidationError) -> str:
    """Return the first problem of a validation error of `record` as one sentence."""
    # report an unknown key before a missing one, because a misspelt key causes both
    problem = sorted(error.errors(include_url=False), key=lambda item: item["type"] != "extra_forbidden")[0]
    owner, names = _walk(record, problem["loc"])
    path = ".".join(names)
    value = problem["input"]
    match problem["type"]:
        case "extra_forbidden":
            fields = owner.model_fields if owner else {}
            for name in RENAMED.get(names[-1], ()):
                if name in fields:
                    return f"{path} is not a known setting; it was renamed to {'.'.join([*names[:-1], name])}"
            wanted = USUAL_NAMES.get(names[-1], names[-1:])
            here = [".".join([*names[:-1], name]) for name in wanted if name in fields]
            found = here or [place for name in wanted for place in setting_paths(record, name)]
            if found:
                return f"{path} is not a known setting; did you mean {' or '.join(map(repr, found))}?"
            return f"{path} is not a known setting; {nearest(names[-1], fields)}"
        case "missing":
            return f"{path} is required but not given"
        case "union_tag_invalid":
            tag = str(problem["ctx"]["tag"])
            kinds = [kind.strip(" '") for kind in str(problem["ctx"]["expected_tags"]).split(",")]
            return f"{path}.kind is {tag!r}; {nearest(tag, kinds)} (all: {', '.join(kinds)})"
        case "union_tag_not_found":
            return f"{path}.kind is required but not given"
        case "value_error":
            text = str(problem["ctx"]["error"])
            return f"{path}: {text}" if path else text
        case _:
            shown, text = repr(value), problem["msg"]
            shown = shown if len(shown) <= 80 else shown[:77] + "…"
            return f"{path} is {shown}: {text[0].lower()}{text[1:]}"


def setting_paths(record: type[Record], name: str) -> list[str]:
    """Return the paths of the settings with this name in the groups of a record, such as optimizer.learning_rate."""
    groups = {group: _record_in(field.annotation) for group, field in record.model_fields.items()}
    return [f"{group}.{name}" for group, inner in groups.items() if inner is not None and name in inner.model_fields]


def _allowed_values(annotation: Any, metadata: list[Any]) -> list[str]:
    """Return the values of a field that allows only some: the members of Literal types, the kinds or short forms of a
    record.

    >>> _allowed_values(Literal["a", "b"] | None, [])
    ['a', 'b']
    """
    kinds = _by_kind(annotation, metadata)
    if kinds:
        return list(kinds[0].table)
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    if isinstance(annotation, type) and issubclass(annotation, Record) and annotation.short_field is not None:
        field = annotation.model_fields[annotation.short_field]
        return _allowed_values(field.annotation, field.metadata)
    return [value for argument in get_args(annotation) for value in _allowed_values(argument, [])]


def _walk(record: type[Record], location: tuple[int | str, ...]) -> tuple[type[Record] | None, list[str]]:
    """Return the record class that owns the last name of a location, and the names without pydantic's kinds."""
    owner: type[Record] | None = record
    names: list[str] = []
    kinds: Mapping[str, type[Record]] | None = None
    target: type[Record] | None = record
    for part in location:
        if kinds is not None and isinstance(part, str) and part in kinds:
            target, kinds = kinds[part], None
            continue
        if isinstance(part, str) and (_TYPE.match(part) or (target is not None and part == target.__name__)):
            continue  # one of several types that pydantic tried
        names.append(str(part))
        if isinstance(part, int):
            continue
        owner = target
        field = owner.model_fields.get(part) if owner else None
        if field is None:
            target = None
            continue
        kinds = next((mark.table for mark in _by_kind(field.annotation, field.metadata)), None)
        target = _record_in(field.annotation)
    return owner, names


def _by_kind(annotation: Any, metadata: list[Any]) -> list[ByKind]:
    """Return all ByKind annotations of a field, including those nested in tuples and dicts."""
    marks = [mark for mark in metadata if isinstance(mark, ByKind)]
    for argument in getattr(annotation, "__metadata__", ()):
        if isinstance(argument, ByKind):
            marks.append(argument)
    for argument in get_args(annotation):
        marks += _by_kind(argument, [])
    return marks


def _record_in(annotation: Any) -> type[Record] | None:
    """Return the record class in a field's annotation, directly or inside a tuple, dict or optional."""
    if isinstance(annotation, type) and issubclass(annotation, Record):
        return annotation
    for argument in get_args(annotation):
        record = _record_in(argument)
        if record is not None:
            return record
    return None

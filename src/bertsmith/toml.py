"""Read and write recipes as TOML, and apply overrides such as `schedule.warmup=0.1`."""

import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bertsmith.errors import InputError
from bertsmith.files import read_text
from bertsmith.settings import Plain


def read_toml(path: Path) -> Plain:
    """Return the content of a TOML file as plain data."""
    if not path.exists():
        raise InputError(f"recipe {str(path)!r} does not exist")
    if path.is_dir():
        raise InputError(f"recipe {str(path)!r} is a folder; give a .toml file")
    try:
        return tomllib.loads(read_text(path).replace("\r\n", "\n"))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"recipe {str(path)!r} is not valid TOML: {error}") from None


def override(data: Mapping[str, Any], assignments: list[str]) -> Plain:
    """Return a copy of `data` with assignments applied; values are parsed as TOML, or else taken as text."""
    result = json.loads(json.dumps(data))
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        keys = [key.strip() for key in path.split(".")]
        if not equals or not all(keys):
            raise InputError(f"--set {assignment!r} is not of the form group.name=value")
        node = result
        for key in keys[:-1]:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise InputError(f"--set {assignment!r}: {key!r} is a value, not a group of settings")
        node[keys[-1]] = _value(text.strip())
    return result


def to_toml(data: Mapping[str, Any], notes: Mapping[str, str] | None = None) -> str:
    """Return plain data as TOML text; None values are omitted, because TOML has no null.

    `notes` are comments by the path of a setting, such as `run.steps`.
    """
    return "\n".join(_toml_lines(data, (), notes or {})).strip() + "\n"


def _toml_lines(data: Mapping[str, Any], path: tuple[str, ...], notes: Mapping[str, str]) -> list[str]:
    scalars = {k: v for k, v in data.items() if not isinstance(v, Mapping) and v is not None}
    tables = {k: v for k, v in data.items() if isinstance(v, Mapping)}
    lines = []
    for key, value in scalars.items():
        note = notes.get(".".join((*path, key)))
        lines.append(f"{_toml_key(key)} = {_toml_value(value)}" + (f"  # {note}" if note else ""))
    if lines and path:
        lines = [f"[{'.'.join(map(_toml_key, path))}]", *lines]
    if lines:
        lines.append("")
    for key, table in tables.items():
        lines += _toml_lines(table, (*path, key), notes)
    return lines


def _toml_key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else _toml_value(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_toml_key(k)} = {_toml_value(v)}" for k, v in value.items() if v is not None)
        return f"{{{inner}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # inf, -inf, nan
    # JSON and TOML write strings, numbers and booleans alike, except for this control character
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text

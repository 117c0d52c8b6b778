"""Reference pages of commands, presets and the Python API, generated from the code."""

import ast
import json
import re
from inspect import cleandoc
from pathlib import Path
from typing import Any, get_args

import bertsmith
from bertsmith.cli import COMMANDS, app
from bertsmith.models.cost import parameters
from bertsmith.models.published import PRESETS, preset
from bertsmith.recipes import DEFAULT_TIER, find, tiers_of

SETTINGS_PAGES = {"compare": "pretrain", **{name: name for name in ("pretrain", "finetune", "shrink", "fit", "serve")}}
_TYPES = {str: "text", Path: "path", int: "whole number", float: "number", bool: "switch"}
_API_GROUPS = {
    "Models": ("load", "save", "build", "preset", "extract", "convert", "factorise", "export", "Model", "Subnet"),
    "Text and data": ("Tokenizer", "SequenceLayout", "tokenizer", "corpus", "pairs"),
    "Training": ("pretrain", "compare", "finetune", "reproduce"),
    "Using fine-tuned models": ("Predictor", "evaluate", "predict", "GenerationConfig"),
    "Smaller and faster": ("shrink", "fit"),
    "Inspecting and serving": ("inspect", "verify", "serve"),
    "Errors": ("InputError",),
}

_PRESETS = f"""# Presets

A preset is a published size. `bertsmith.build(bertsmith.preset(NAME))` builds it with fresh weights, and a recipe
starts from it with `model.preset`. A recipe name is `NAME:TIER`, where the [tier](recipes.md) is `paper`, `crammed` or
`modern`; the default is `{DEFAULT_TIER}`.
"""


def pages(anchors: dict[str, list[tuple[str, str]]]) -> dict[str, str]:
    """Return the Markdown of every page by its path; `anchors` are the places that describe a setting."""
    return {
        "reference/commands.md": _commands(anchors),
        "reference/presets.md": _presets(),
        "reference/python.md": _python(),
        "reference/python-runtime.md": _module("runtime"),
        "reference/python-hf.md": _module("hf"),
    }


def _commands(anchors: dict[str, list[tuple[str, str]]]) -> str:
    lines = ["# Commands", "", "`bertsmith COMMAND --help` prints the same.", ""]
    lines += ["| command | |", "|---|---|"]
    lines += [f"| [`bertsmith {name}`](#{name}) | {help_} |" for name, (_, help_) in COMMANDS.items()] + [""]
    for name in COMMANDS:
        lines += _command(name, anchors)
    return "\n".join(lines) + "\n"


def _command(name: str, anchors: dict[str, list[tuple[str, str]]]) -> list[str]:
    command = app[name]
    function = command.default_command
    text = re.split(r"\n\s*Parameters\n\s*-+\n", cleandoc(function.__doc__ or ""))[0].strip()
    arguments = [found for found in command.assemble_argument_collection(parse_docstring=True) if found.parse]
    positional = [found for found in arguments if found.index is not None]
    usage = " ".join(["bertsmith", name, *(_usage(found) for found in positional), "[OPTIONS]"])
    lines = [f"## bertsmith {name} {{#{name}}}", "", "```", usage, "```", "", _escape(text), ""]
    if name in SETTINGS_PAGES:
        page = SETTINGS_PAGES[name]
        lines += [f"Settings of its recipe: [{page}](settings/{page}.md).", ""]
    for argument in arguments:
        flag = argument.names[0]
        shown = f"{flag[2:].upper().replace('-', '_')} or {flag}" if argument in positional else flag
        lines += [f"#### `{name} {shown}` {{#{name}{flag} .setting}}", ""]
        lines += [_argument_type(argument), "{: .setting-type }", ""]
        lines += [_linked(_escape(argument.parameter.help or ""), anchors, SETTINGS_PAGES.get(name)), ""]
    return lines


def _usage(argument: Any) -> str:
    name = argument.names[0][2:].upper().replace("-", "_")
    name += "..." if "list" in str(argument.hint) else ""
    return name if argument.required else f"[{name}]"


def _argument_type(argument: Any) -> str:
    choices, default = argument.get_choices(), argument.field_info.default
    hints = [hint for hint in get_args(argument.hint) or (argument.hint,) if hint is not type(None)]
    if choices:
        words = "one of " + ", ".join(f"`{choice}`" for choice in choices)
    elif "list" in str(argument.hint):
        words = "may be given several times"
    else:
        words = " or ".join(dict.fromkeys(_TYPES.get(hint, "text") for hint in hints))
    if argument.required:
        words += " · required"
    elif default not in (None, False, argument.field_info.empty):
        words += f" · default `{default if isinstance(default, str | Path) else json.dumps(default)}`"
    return words[0].upper() + words[1:]


def _linked(text: str, anchors: dict[str, list[tuple[str, str]]], page: str | None) -> str:
    """Return a help text in which the path of a setting is a link to its description."""

    def link(match: re.Match[str]) -> str:
        places = [place for place in anchors.get(match[1], ()) if page and place[0].endswith(f"/{page}.md")]
        if not places:
            return match[0]
        uri, anchor = places[0]
        return f"([`{match[1]}`]({uri.removeprefix('reference/')}#{anchor}))"

    return re.sub(r"\(([a-z_]+\.[a-z_.]+)\)", link, text)


def _presets() -> str:
    columns = ("preset", "family", "layers", "width", "heads", "vocabulary", "parameters")
    lines = [_PRESETS, f"| {' | '.join(columns)} |", "|---|---|--:|--:|--:|--:|--:|"]
    for name, (_, size) in PRESETS.items():
        config = preset(name)
        cells = [f"[`{name}`](#{name})", config.family, size.layers, size.width, size.heads, f"{size.vocabulary:,}"]
        cells.append(f"{parameters(config) / 1e6:,.1f} M")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", "## Recipes by preset", ""]
    for name in PRESETS:
        sources = [f"`{name}:{tier}` · {find(f'{name}:{tier}')[1].source}" for tier in tiers_of(name)]
        lines += [f"#### `{name}` {{#{name} .setting}}", "", "<br>".join(sources) or "No recipe.", ""]
    return "\n".join(lines) + "\n"


def _python() -> str:
    """Return the page of the public names; every name of `bertsmith.__all__` is on it."""
    grouped = [name for names in _API_GROUPS.values() for name in names]
    missing = sorted(set(bertsmith.__all__) ^ set(grouped))
    if missing:
        raise ValueError(f"names of bertsmith.__all__ and of the Python page differ: {', '.join(missing)}")
    lines = ["# Python API", "", "All names are attributes of `bertsmith`, imported when they are first used.", ""]
    for title, names in _API_GROUPS.items():
        lines += [f"## {title}", ""]
        for name in names:
            lines += [f"::: bertsmith.{name}", ""]
    return "\n".join(lines)


def _module(name: str) -> str:
    """Return the page of a public module: its docstring and the names of its `__all__`, read without importing it."""
    module = ast.parse((Path(bertsmith.__file__).parent / name / "__init__.py").read_text(encoding="utf-8"))
    exported = next(
        ast.literal_eval(node.value)
        for node in module.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    lines = [f"# bertsmith.{name}", "", ast.get_docstring(module) or "", ""]
    for public in exported:
        lines += [f"::: bertsmith.{name}.{public}", "    options:", "      heading_level: 2", ""]
    return "\n".join(lines)


def _escape(text: str) -> str:
    return "\n".join(line.strip() for line in text.splitlines()).replace("<", "&lt;").replace("*", r"\*")

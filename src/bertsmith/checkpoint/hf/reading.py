"""A Hugging Face folder as a model of ours, read without that library."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from bertsmith.checkpoint.files import copy_tensors, find_weights, read_json, read_tensors
from bertsmith.checkpoint.hf.adapter import TaskForm, Twin
from bertsmith.checkpoint.hf.registry import TWINS
from bertsmith.checkpoint.names import to_ours
from bertsmith.errors import InputError, nearest
from bertsmith.models.build import assemble
from bertsmith.models.config import ModelConfig
from bertsmith.models.model import Model
from bertsmith.settings import explain


def load_hf(folder: Path, *, ignore: tuple[str, ...] = ()) -> Model:
    """The model in a Hugging Face folder, every weight mapped; `ignore` lists starts of names to leave out.

    The head of a class for a task comes along if ours has its form.
    """
    data = read_json(folder / "config.json")
    twin = _twin(str(data.get("model_type")), folder)
    path = find_weights(folder)
    theirs = _canonical(read_tensors(path), twin, ignore, path)
    _check_tied(theirs, twin, path)
    form = _form(twin, data, theirs)
    parts = frozenset(part for part, rows in twin.optional.items() if rows[0].theirs[0] in theirs)
    try:
        config = read_config(twin, data, parts, form)
    except ValidationError as error:
        raise InputError(f"{str(folder / 'config.json')!r}: {explain(ModelConfig, error)}") from None
    except TypeError as error:
        raise InputError(f"{str(folder / 'config.json')!r} has a value of a wrong type: {error}") from None
    kinds = {head.kind for head in config.heads}
    parts = frozenset(part for part in parts if not part.startswith("heads.") or part.removeprefix("heads.") in kinds)
    rows = [*twin.rows(config, parts), *(() if form is None else form.rows)]
    used = {name for line in rows for name in line.theirs}
    foreign = sorted(theirs.keys() - used - twin.tied.keys())
    if foreign:
        raise InputError(
            f"{str(path)!r} has {len(foreign)} tensors that have no place in a {twin.model_type} model here, the first "
            f"is {foreign[0]!r}; leave them out with ignore=({foreign[0].split('.')[0]!r},)"
        )
    model = assemble(config)
    copy_tensors(to_ours(rows, theirs, str(path)), model, str(path))
    return model.eval()


def read_config(twin: Twin, data: dict[str, Any], parts: frozenset[str], form: TaskForm | None) -> ModelConfig:
    """Our config for a folder with these settings, optional parts and head of a task."""
    if form is None:
        return twin.read_config(data, parts)
    config = twin.read_config({**data, **form.settles}, parts - form.hides)
    return config.changed(heads=(*config.heads, form.read(data)))


def _form(twin: Twin, data: dict[str, Any], tensors: Mapping[str, Tensor]) -> TaskForm | None:
    """The form of the head of a task, if the folder's class has one and its tensors were not left out."""
    named = data.get("architectures") or []
    return next(
        (
            form
            for form in twin.forms
            if form.architecture in named
            and form.fits(data)
            and (not form.rows or any(name in tensors for name in form.rows[-1].theirs))
        ),
        None,
    )


def _twin(model_type: str, folder: Path) -> Twin:
    if model_type not in TWINS:
        raise InputError(f"{str(folder / 'config.json')!r}: model_type is {model_type!r}; {nearest(model_type, TWINS)}")
    return TWINS[model_type]


def _canonical(tensors: dict[str, Tensor], twin: Twin, ignore: tuple[str, ...], path: Path) -> dict[str, Tensor]:
    """The tensors under today's names: old norm names renewed, the encoder's prefix put where a file left it out."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        if name.startswith(twin.bare):
            name = twin.prefix + name
        is_derived = name in twin.derived or name.endswith("embeddings.position_ids")
        if is_derived or name.startswith(ignore or ("\0",)):
            continue
        known = renamed(name, twin.aliases)
        if known in result:
            raise InputError(f"{str(path)!r} has {name!r} and the same tensor under another name; leave one out")
        result[known] = tensor
    return result


def renamed(name: str, starts: Mapping[str, str]) -> str:
    """The name with its start replaced, if it is one of these."""
    start = next((start for start in starts if name.startswith(start)), None)
    return name if start is None else starts[start] + name.removeprefix(start)


def _check_tied(tensors: dict[str, Tensor], twin: Twin, path: Path) -> None:
    for copy, original in twin.tied.items():
        if copy in tensors and original in tensors and not torch.equal(tensors[copy], tensors[original]):
            raise InputError(f"{str(path)!r}: {copy!r} differs from {original!r}; allowed: tied weights")

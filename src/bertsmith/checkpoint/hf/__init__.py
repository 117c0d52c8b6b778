"""Hugging Face folders, read and written without that library."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from bertsmith.checkpoint.files import (
    copy_tensors,
    find_weights,
    read_json,
    read_tensors,
    tensors_of,
    write_json,
    write_tensors,
)
from bertsmith.checkpoint.hf.albert import ALBERT
from bertsmith.checkpoint.hf.bert import BERT
from bertsmith.checkpoint.hf.convbert import CONVBERT
from bertsmith.checkpoint.hf.deberta import DEBERTA, DEBERTA_V2
from bertsmith.checkpoint.hf.difference import first_difference
from bertsmith.checkpoint.hf.electra import ELECTRA
from bertsmith.checkpoint.hf.marian import MARIAN
from bertsmith.checkpoint.hf.modernbert import MODERNBERT
from bertsmith.checkpoint.hf.twin import Twin, cannot
from bertsmith.checkpoint.names import to_ours, to_theirs
from bertsmith.errors import InputError, nearest
from bertsmith.models.build import assemble
from bertsmith.models.config import ModelConfig
from bertsmith.models.heads import TaskHeadConfig
from bertsmith.models.model import Model
from bertsmith.settings import explain

_ALL = (BERT, ELECTRA, ALBERT, CONVBERT, DEBERTA, DEBERTA_V2, MARIAN, MODERNBERT)
TWINS: dict[str, Twin] = {twin.model_type: twin for twin in _ALL}


def load_hf(folder: Path, *, ignore: tuple[str, ...] = ()) -> Model:
    """The model in a Hugging Face folder, every weight mapped; `ignore` lists starts of names to leave out."""
    data = read_json(folder / "config.json")
    twin = _twin(str(data.get("model_type")), folder)
    path = find_weights(folder)
    theirs = _canonical(read_tensors(path), twin, ignore, path)
    _check_tied(theirs, twin, path)
    parts = frozenset(part for part, rows in twin.optional.items() if rows[0].theirs[0] in theirs)
    try:
        config = twin.read_config(data, parts)
    except ValidationError as error:
        raise InputError(f"{str(folder / 'config.json')!r}: {explain(ModelConfig, error)}") from None
    except TypeError as error:
        raise InputError(f"{str(folder / 'config.json')!r} has a value of a wrong type: {error}") from None
    kinds = {head.kind for head in config.heads}
    parts = frozenset(part for part in parts if not part.startswith("heads.") or part.removeprefix("heads.") in kinds)
    rows = twin.rows(config, parts)
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


def check_exportable(model: Model) -> tuple[Twin, frozenset[str]]:
    """The twin a model can be written as and the optional parts it has; a sentence says why if there is none."""
    fine_tuned = [head.kind for head in model.config.heads if isinstance(head, TaskHeadConfig)]
    if fine_tuned:
        raise InputError(
            f"the model was fine-tuned, and its head for the task ({fine_tuned[0]}) cannot be exported; allowed: "
            "models before fine-tuning, while bertsmith predict and bertsmith.Predictor.load use this one as it is"
        )
    twin, config, ours = twin_of(model), model.config, tensors_of(model)
    parts = twin.parts(ours)
    try:
        reason = first_difference(config, twin.read_config(twin.write_config(config), parts))
    except ValidationError as error:
        reason = explain(ModelConfig, error)
    if reason:
        raise cannot(twin.model_type, reason)
    placed = {line.ours for line in twin.rows(config, parts)}
    odd = min(ours.keys() ^ placed, default=None)
    if odd is not None:
        what = "has no place for" if odd in ours else "cannot be without"
        raise InputError(f"a Hugging Face {twin.model_type} {what} {odd!r}")
    return twin, parts


def twin_of(model: Model) -> Twin:
    """The twin of a model's family."""
    by_family = {twin.family: twin for twin in TWINS.values()}
    if model.config.family not in by_family:
        raise InputError(f"family is {model.config.family!r}; Hugging Face twins exist for: {', '.join(by_family)}")
    return by_family[model.config.family]


def save_hf(model: Model, folder: Path) -> None:
    """Writes config.json, model.safetensors and the tokenizer as `transformers` reads them."""
    twin, parts = check_exportable(model)
    write_json(folder / "config.json", twin.write_config(model.config) | _token_ids(model))
    theirs = to_theirs(twin.rows(model.config, parts), {name: p.detach() for name, p in tensors_of(model).items()})
    outward = twin.written(model.config)
    write_tensors(folder / "model.safetensors", {_renamed(name, outward): tensor for name, tensor in theirs.items()})
    if model.tokenizer is not None:
        model.tokenizer.save(folder)
        write_json(folder / "tokenizer_config.json", _tokenizer_config(model))


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
        known = _renamed(name, twin.aliases)
        if known in result:
            raise InputError(f"{str(path)!r} has {name!r} and the same tensor under another name; leave one out")
        result[known] = tensor
    return result


def _renamed(name: str, starts: Mapping[str, str]) -> str:
    """The name with its start replaced, if it is one of these."""
    start = next((start for start in starts if name.startswith(start)), None)
    return name if start is None else starts[start] + name.removeprefix(start)


def _check_tied(tensors: dict[str, Tensor], twin: Twin, path: Path) -> None:
    for copy, original in twin.tied.items():
        if copy in tensors and original in tensors and not torch.equal(tensors[copy], tensors[original]):
            raise InputError(f"{str(path)!r}: {copy!r} differs from {original!r}; allowed: tied weights")


def _token_ids(model: Model) -> dict[str, Any]:
    if model.tokenizer is None:
        return {}
    ids = {"pad_token_id": model.tokenizer.pad}
    if model.config.decoder is None:
        return ids
    start, end = model.tokenizer.start, model.tokenizer.separator
    return {**ids, "decoder_start_token_id": start, "eos_token_id": end, "forced_eos_token_id": end}


def _tokenizer_config(model: Model) -> dict[str, Any]:
    tokenizer = model.require_tokenizer()
    roles = {
        "pad_token": tokenizer.pad,
        "unk_token": tokenizer.unknown,
        "cls_token": tokenizer.start,
        "sep_token": tokenizer.separator,
        "mask_token": tokenizer.mask,
    }
    names = {role: tokenizer.pieces([index])[0] for role, index in roles.items()}
    longest = model.config.encoder.embedding.longest
    return {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": longest, **names}

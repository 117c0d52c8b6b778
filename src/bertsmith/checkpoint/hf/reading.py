"""Read a Hugging Face folder as a model of ours, without that library; the registry of adapters."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from bertsmith.checkpoint.files import check_size, copy_tensors, find_weights, read_tensors
from bertsmith.checkpoint.hf.adapter import POOLER, FamilyAdapter, HeadAdapter, HfConfig
from bertsmith.checkpoint.hf.albert import ALBERT
from bertsmith.checkpoint.hf.bert import BERT
from bertsmith.checkpoint.hf.convbert import CONVBERT
from bertsmith.checkpoint.hf.deberta import DEBERTA, DEBERTA_V2
from bertsmith.checkpoint.hf.distilbert import DISTILBERT
from bertsmith.checkpoint.hf.electra import ELECTRA
from bertsmith.checkpoint.hf.marian import MARIAN
from bertsmith.checkpoint.hf.modernbert import MODERNBERT
from bertsmith.checkpoint.hf.mpnet import MPNET
from bertsmith.checkpoint.hf.names import to_ours
from bertsmith.checkpoint.hf.roberta import ROBERTA, XLM_ROBERTA
from bertsmith.checkpoint.hf.sentences import encoder_folder, read_sentences
from bertsmith.errors import InputError
from bertsmith.files import read_json
from bertsmith.models.build import assemble
from bertsmith.models.config import ModelConfig
from bertsmith.models.model import Model
from bertsmith.settings import InvalidRecord

_ALL = (
    *(BERT, ROBERTA, XLM_ROBERTA, DISTILBERT, MPNET, ELECTRA, ALBERT),
    *(CONVBERT, DEBERTA, DEBERTA_V2, MARIAN, MODERNBERT),
)
ADAPTERS: dict[str, FamilyAdapter] = {adapter.model_type: adapter for adapter in _ALL}


def adapter_for(model: Model) -> FamilyAdapter:
    """Return the adapter of a model's family."""
    by_family = {adapter.family: adapter for adapter in ADAPTERS.values()}
    if model.config.family not in by_family:
        raise InputError(f"family is {model.config.family!r}; Hugging Face adapters exist for: {', '.join(by_family)}")
    return by_family[model.config.family]


def load_hf(folder: Path, *, ignore: tuple[str, ...] = ()) -> Model:
    """Load a Hugging Face folder with every weight; `ignore` lists starts of tensor names to skip.

    The head of a task class is loaded if there is an adapter for it; a folder of sentence-transformers has an embedder.
    """
    whole, folder = folder, encoder_folder(folder)
    data = HfConfig(read_json(folder / "config.json"))
    model_type = str(data.get("model_type"))
    if model_type not in ADAPTERS:
        problem = f"model_type is {model_type!r}, which has no adapter; allowed: {', '.join(sorted(ADAPTERS))}"
        raise InputError(f"{str(folder / 'config.json')!r}: {problem}")
    adapter, path = ADAPTERS[model_type], find_weights(folder)
    theirs = _canonical(read_tensors(path), adapter, ignore, path)
    _check_tied(theirs, adapter, path)
    _drop_empty_pooler(theirs, adapter)
    parts = frozenset(part for part, rows in adapter.optional_rows.items() if rows[0].theirs[0] in theirs)
    try:
        head = _find_head(adapter, data, theirs)
        config = read_config(adapter, data, parts, head)
        sentences = read_sentences(whole, config)
    except InvalidRecord as error:
        raise InputError(f"{str(folder / 'config.json')!r}: {error}") from None
    except InputError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, ArithmeticError) as error:
        raise InputError(f"{str(folder / 'config.json')!r} has a value of a wrong type: {error}") from None
    kinds = {head.kind for head in config.heads}
    parts = frozenset(part for part in parts if not part.startswith("heads.") or part.removeprefix("heads.") in kinds)
    rows = [*adapter.rows(config, parts), *(() if head is None else head.rows)]
    if head is not None:
        _drop_constants(theirs, head, config.encoder.width, path)
    used = {name for line in rows for name in line.theirs}
    foreign = sorted(theirs.keys() - used - adapter.tied.keys())
    if foreign:
        raise InputError(
            f"{str(path)!r} has {len(foreign)} tensors that a {adapter.model_type} model does not have here, the "
            f"first is {foreign[0]!r}; skip them with ignore=({foreign[0].split('.')[0]!r},)"
        )
    ours = to_ours(rows, theirs, str(path))
    if sentences is not None:
        config, ours = config.changed(heads=(*config.heads, sentences.head)), {**ours, **sentences.tensors}
    check_size(config, ours, folder)
    model = assemble(config)
    copy_tensors(ours, model, str(path))
    return model.eval()


def read_config(adapter: FamilyAdapter, data: HfConfig, parts: frozenset[str], head: HeadAdapter | None) -> ModelConfig:
    """Our config for these settings, optional parts and task head."""
    if head is None:
        return adapter.read_config(data, parts)
    config = adapter.read_config(HfConfig({**data, **head.overrides}), parts - head.excludes)
    return config.changed(heads=(*config.heads, head.read(data)))


def rename_start(name: str, starts: Mapping[str, str]) -> str:
    """Replace the start of a name if it is one of these."""
    start = next((start for start in starts if name.startswith(start)), None)
    return name if start is None else starts[start] + name.removeprefix(start)


def _find_head(adapter: FamilyAdapter, data: HfConfig, tensors: Mapping[str, Tensor]) -> HeadAdapter | None:
    """Return the adapter of the task head, if the folder's class has one and its tensors are not ignored."""
    named = data.get("architectures") or []
    for head in adapter.task_heads:
        has_tensors = not head.rows or any(name in tensors for name in head.rows[-1].theirs)
        if head.architecture in named and head.matches(data) and has_tensors:
            return head
    return None


def _canonical(
    tensors: dict[str, Tensor], adapter: FamilyAdapter, ignore: tuple[str, ...], path: Path
) -> dict[str, Tensor]:
    """Return the tensors under current names: old norm names replaced, missing prefixes of the encoder added."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        if name.startswith(adapter.unprefixed):
            name = adapter.prefix + name
        is_derived = name in adapter.derived or name.endswith("embeddings.position_ids")
        if is_derived or name.startswith(ignore or ("\0",)):
            continue
        known = rename_start(name, adapter.aliases)
        if known in result:
            raise InputError(f"{str(path)!r} has {name!r} and the same tensor under another name; leave one out")
        result[known] = tensor
    return result


def _drop_empty_pooler(tensors: dict[str, Tensor], adapter: FamilyAdapter) -> None:
    """Remove a pooler of zeros, which an export writes for a model without one."""
    names = [name for line in adapter.optional_rows.get(POOLER, ()) for name in line.theirs if name in tensors]
    if not any(tensors[name].any() for name in names):
        for name in names:
            del tensors[name]


def _drop_constants(tensors: dict[str, Tensor], head: HeadAdapter, width: int, path: Path) -> None:
    """Remove the tensors that have one value in this variant of the head; raise if one has another value."""
    for name, make in head.constants.items():
        tensor = tensors.pop(name, None)
        if tensor is None or not torch.equal(tensor.float(), make(width)):
            raise InputError(f"{str(path)!r}: a {head.architecture} with these settings needs the identity as {name!r}")


def _check_tied(tensors: dict[str, Tensor], adapter: FamilyAdapter, path: Path) -> None:
    for copy, original in adapter.tied.items():
        if copy in tensors and original in tensors and not torch.equal(tensors[copy], tensors[original]):
            raise InputError(f"{str(path)!r}: {copy!r} differs from {original!r}; allowed: tied weights")

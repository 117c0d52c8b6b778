"""Our model folders (config.json, model.safetensors, tokenizer.json), and `load`, which also reads Hugging Face's."""

from pathlib import Path
from typing import Literal

import torch

from bertsmith.bundled import bundled_hint, model_folder
from bertsmith.checkpoint.files import (
    Precision,
    check_size,
    copy_tensors,
    find_weights,
    in_precision,
    read_tensors,
    tensors_of,
    write_tensors,
)
from bertsmith.checkpoint.hf.reading import load_hf
from bertsmith.checkpoint.hf.sentences import encoder_folder, is_sentence_file, lowercases_texts
from bertsmith.checkpoint.hf.wrapped import FORMAT, MODELLING
from bertsmith.checkpoint.masks import MASKS_FILE, read_masks, write_masks
from bertsmith.errors import InputError
from bertsmith.files import SEAL, NewFolder, read_json, verification, write_json, write_seal
from bertsmith.layers.subnet import Subnet
from bertsmith.models.build import assemble, extract
from bertsmith.models.config import ModelConfig
from bertsmith.models.generator import fold
from bertsmith.models.model import Model
from bertsmith.text.tokenizer import Tokenizer

_MODEL_FILES = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "task.json", "README.md"}
_MODEL_FILES |= {MODELLING.name, SEAL, "artefact.json", "model.onnx", "onnx.json", MASKS_FILE}


def load(
    folder: str | Path,
    *,
    subnet: Subnet | None = None,
    device: str | torch.device = "cpu",
    ignore: tuple[str, ...] = (),
    keep_masks: bool = False,
    verify: bool = True,
) -> Model:
    """Load a model folder of ours or of Hugging Face in eval mode, optionally as a subnetwork.

    A bundled model is loaded by name: `load("small")`; a folder of that name by path: `load("./small")`.

    A model that was trained against a generator has it as `model.generator`. Pruned weights are zeros; `keep_masks`
    also keeps them at 0 in training, if the folder has masks.safetensors. Files that differ from the folder's seal.json
    raise InputError, unless `verify` is False.
    """
    with verification(verify):
        model = _load(folder, ignore, keep_masks)
    if subnet is not None:
        model = extract(model, subnet)
    return model.to(device)


def _load(given: str | Path, ignore: tuple[str, ...], keep_masks: bool) -> Model:
    folder = model_folder(given)
    if not folder.is_dir():
        raise InputError(f"model folder {str(given)!r} does not exist{bundled_hint(given)}")
    data = read_json(encoder_folder(folder) / "config.json")
    if "weights" in data:
        raise InputError(
            f"{str(folder)!r} holds {data['weights']} codes instead of weights, which only an engine runs; "
            "bertsmith evaluate, bertsmith predict and bertsmith.Predictor.load open it"
        )
    model = fold(_load_ours(folder)) if "bertsmith" in data else load_hf(folder, ignore=ignore)
    texts = encoder_folder(folder)
    if (texts / "tokenizer.json").exists() or (texts / "vocab.txt").exists():
        tokenizer = Tokenizer.load(texts)
        model.tokenizer = tokenizer.lowercasing() if lowercases_texts(folder) else tokenizer
        rows = model.config.encoder.vocabulary
        if model.tokenizer.size > rows:
            raise InputError(
                f"{str(folder)!r}: the tokenizer has {model.tokenizer.size} tokens and the embedding {rows} rows"
            )
    if keep_masks and "bertsmith" in data:
        read_masks(model, folder)
    return model


def save(model: Model, folder: str | Path, *, precision: Precision | None = None, force: bool = False) -> None:
    """Save a model as a folder of ours, complete or not at all; `force` replaces an existing model folder.

    Weights keep their precision unless `precision` is given; `load` widens half precision again.
    """
    with NewFolder(free_folder(folder, force)) as new:
        write_model(model, new, precision=precision)
        write_seal(new)


def free_folder(folder: str | Path, force: bool) -> Path:
    """Return the folder if writing there overwrites nothing but, with `force`, another model."""
    path = Path(folder).resolve()
    names = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    if path.exists() and not path.is_dir():
        raise InputError(f"{str(folder)!r} is a file; give a folder")
    if names and not force:
        raise InputError(f"{str(folder)!r} is not empty; give another folder, or force=True to replace a model in it")
    others = sorted(name for name in names - _MODEL_FILES if not is_sentence_file(name))
    if others:
        raise InputError(
            f"{str(folder)!r} holds more than a model ({others[0]!r}), so it is not replaced; give another folder"
        )
    return path


def write_model(
    model: Model,
    folder: Path,
    *,
    weights: Literal["float", "int8"] = "float",
    precision: Precision | None = None,
) -> None:
    """Write the files of a model into an existing folder; `weights` is the number format of its matrices."""
    kind = {} if weights == "float" else {"weights": weights}
    write_json(folder / "config.json", {"bertsmith": FORMAT, **kind, "model": model.config.plain()})
    write_tensors(folder / "model.safetensors", in_precision(tensors_of(model), precision))
    write_masks(model, folder)
    if model.tokenizer is not None:
        model.tokenizer.save(folder)


def read_config(folder: Path) -> ModelConfig:
    """Read the config of a model in a folder of ours."""
    path = folder / "config.json"
    data = read_json(path)
    if data.get("bertsmith") != FORMAT:
        raise InputError(f"{str(path)!r} has format {data.get('bertsmith')!r}; this version reads {FORMAT}")
    if not isinstance(data.get("model"), dict):
        raise InputError(f"{str(path)!r} has no 'model'")
    return ModelConfig.parse(data["model"], source=str(path))


def _load_ours(folder: Path) -> Model:
    config, weights = read_config(folder), find_weights(folder)
    tensors = read_tensors(weights)
    check_size(config, tensors, folder)
    model = assemble(config)
    copy_tensors(tensors, model, str(weights))
    return model.eval()

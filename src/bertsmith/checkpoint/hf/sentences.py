"""Folders of sentence-transformers: an encoder followed by pooling, linear layers and normalisation as our embedder."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from bertsmith.checkpoint.files import find_weights, read_tensors, write_tensors
from bertsmith.checkpoint.hf.adapter import HfSettings
from bertsmith.errors import InputError, nearest
from bertsmith.files import parse_json, read_json, read_text, write_json
from bertsmith.layers.elementwise import Activation
from bertsmith.models.config import ModelConfig
from bertsmith.models.heads.base import FeaturesConfig
from bertsmith.models.heads.task import DenseConfig, EmbedderConfig, Pooling, TextsConfig

MODULES_FILE = "modules.json"
_FILES = re.compile(r"modules\.json|sentence_bert_config\.json|config_sentence_transformers\.json|\d+_[A-Z][a-z]+")

_POOLINGS: dict[str, Pooling] = {
    "cls": "first",
    "lasttoken": "last",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt",
    "weightedmean": "weighted_mean",
}
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Settings of versions before 5.4, one flag per mode."""
_ACTIVATIONS: dict[str, Activation | None] = {
    "Identity": None,
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
}
_ACTIVATION_CLASSES = {ours: f"torch.nn.modules.activation.{name}" for name, ours in _ACTIVATIONS.items()}
_ACTIVATION_CLASSES[None] = "torch.nn.modules.linear.Identity"
_PROMPTS = ("query", "document")
"""Prompts that sentence-transformers writes for every model, empty by default."""


@dataclass(frozen=True)
class SentenceFolder:
    """The embedder that a folder of sentence-transformers describes."""

    head: EmbedderConfig
    tensors: Mapping[str, Tensor]
    """Weights of the embedder, by their names in our model."""


def is_sentence_file(name: str) -> bool:
    """Whether a file or folder with this name belongs to sentence-transformers."""
    return _FILES.fullmatch(name) is not None


def encoder_folder(folder: Path) -> Path:
    """Return the folder of the encoder: a subfolder in old folders of sentence-transformers, else the folder itself."""
    if (folder / "config.json").is_file() or not (folder / MODULES_FILE).is_file():
        return folder
    modules = _modules(folder)
    return _module_folder(folder, modules[0]) if modules else folder


def lowercases_texts(folder: Path) -> bool:
    """Whether sentence-transformers lower-cases every text before the tokenizer."""
    settings = encoder_folder(folder) / "sentence_bert_config.json"
    return settings.is_file() and bool(read_json(settings).get("do_lower_case"))


def read_sentences(folder: Path, config: ModelConfig) -> SentenceFolder | None:
    """Read the embedder of a folder whose encoder has this config; None if the folder has no pooling."""
    if not (folder / MODULES_FILE).is_file():
        return None
    kinds = [str(module.get("type")).rpartition(".")[2] for module in _modules(folder)]
    if "Pooling" not in kinds:
        return None
    is_normalised = kinds[-1] == "Normalize"
    between = kinds[2:-1] if is_normalised else kinds[2:]
    if kinds[:2] != ["Transformer", "Pooling"] or set(between) - {"Dense"}:
        raise InputError(
            f"{str(folder / MODULES_FILE)!r} lists {', '.join(kinds)}; allowed: Transformer, Pooling, any number of "
            "Dense, at most one Normalize at the end"
        )
    _, pooling, *rest = (_module_folder(folder, module) for module in _modules(folder))
    layers = [_read_dense(path) for path in rest[: len(between)]]
    dense = [layer for layer, _ in layers]
    # a first linear layer without activation is the projection that `bertsmith finetune` trains
    has_projection = bool(dense) and dense[0] == DenseConfig(width=dense[0].width)
    usage = _read_usage(folder)
    head = EmbedderConfig(
        pooling=_read_pooling(pooling / "config.json"),
        projection=dense[0].width if has_projection else None,
        dense=tuple(dense[1:] if has_projection else dense),
        is_normalised=is_normalised,
        similarity=usage.get("similarity_fn_name") or "cosine",
        texts=TextsConfig(
            max_length=read_length(encoder_folder(folder), config.encoder.embedding.max_length),
            prompts={name: prompt for name, prompt in (usage.get("prompts") or {}).items() if prompt},
            default_prompt=usage.get("default_prompt_name"),
        ),
    )
    tensors = {
        f"heads.embedder.{name}.{part}": tensor
        for name, (_, weights) in zip(head.layers, layers, strict=True)
        for part, tensor in weights.items()
    }
    return SentenceFolder(head, tensors)


def pooling_refusal(head: EmbedderConfig) -> str | None:
    """Why the modules of sentence-transformers cannot compute a head's vectors from the last hidden states, or None."""
    if head.pooling == "pooler":
        return "sentence-transformers cannot use a model's pooler"
    if head.features != FeaturesConfig() or head.recurrent is not None:
        return "sentence-transformers reads the last hidden states only, and the embedder reads others"
    return None


def write_sentences(config: ModelConfig, folder: Path, tensors: Mapping[str, Tensor], *, is_native: bool) -> None:
    """Write the files of sentence-transformers for a model with an embedder; nothing for other models.

    A native class returns hidden states, which modules pool; a class of ours returns the vectors themselves.
    """
    head = config.embedder
    if head is None:
        return
    modules: dict[str, str] = {"": "Transformer"}
    settings: HfSettings = {"max_seq_length": config.text_length, "do_lower_case": False}
    if is_native:
        modules |= _write_modules(head, config.encoder.width, folder, tensors)
    else:
        settings["modality_config"] = {"text": {"method": "forward", "method_output_name": "pooler_output"}}
        settings["module_output_name"] = "sentence_embedding"
    rows = enumerate((path, f"sentence_transformers.models.{kind}") for path, kind in modules.items())
    listed = [{"idx": index, "name": str(index), "path": path, "type": kind} for index, (path, kind) in rows]
    write_json(folder / MODULES_FILE, listed)
    write_json(folder / "sentence_bert_config.json", settings)
    usage: HfSettings = {"prompts": {**dict.fromkeys(_PROMPTS, ""), **head.texts.prompts}}
    usage |= {"default_prompt_name": head.texts.default_prompt, "similarity_fn_name": head.similarity}
    write_json(folder / "config_sentence_transformers.json", usage)


def _write_modules(head: EmbedderConfig, width: int, folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Write the folders of pooling, linear layers and normalisation; return the kind of each in order."""
    mode = next(theirs for theirs, ours in _POOLINGS.items() if ours == head.pooling)
    modules = {"1_Pooling": "Pooling"}
    (folder / "1_Pooling").mkdir()
    flags = {flag: known == mode for flag, known in _POOLING_FLAGS.items()}  # every version reads these
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": width, **flags})
    for name, layer in head.layers.items():
        path = f"{len(modules) + 1}_Dense"
        modules[path] = "Dense"
        weights = {part: tensors.get(f"heads.embedder.{name}.{part}") for part in ("weight", "bias")}
        present = {f"linear.{part}": tensor for part, tensor in weights.items() if tensor is not None}
        settings: HfSettings = {"in_features": present["linear.weight"].shape[1], "out_features": layer.width}
        settings |= {"bias": layer.has_bias, "activation_function": _ACTIVATION_CLASSES[layer.activation]}
        (folder / path).mkdir()
        write_json(folder / path / "config.json", settings)
        write_tensors(folder / path / "model.safetensors", present)
    return {**modules, **({f"{len(modules) + 1}_Normalize": "Normalize"} if head.is_normalised else {})}


def _modules(folder: Path) -> list[dict[str, Any]]:
    """Return the content of modules.json."""
    path = folder / MODULES_FILE
    modules = parse_json(read_text(path), str(path))
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise InputError(f"{str(path)!r} is not a list of modules")
    return modules


def _module_folder(folder: Path, module: Mapping[str, Any]) -> Path:
    path = str(module.get("path") or "")
    if Path(path).name != path:
        raise InputError(f"{str(folder / MODULES_FILE)!r} names {path!r}; allowed: a folder beside it")
    return folder / path


def _read_pooling(path: Path) -> Pooling:
    settings = read_json(path)
    modes = settings.get("pooling_mode") or [mode for flag, mode in _POOLING_FLAGS.items() if settings.get(flag)]
    modes = [modes] if isinstance(modes, str) else modes or ["mean"]
    if len(modes) > 1:
        raise InputError(f"{str(path)!r} concatenates {', '.join(modes)}; allowed: one pooling mode")
    if modes[0] not in _POOLINGS:
        raise InputError(f"{str(path)!r}: pooling_mode is {modes[0]!r}; {nearest(str(modes[0]), _POOLINGS)}")
    if not settings.get("include_prompt", True):
        raise InputError(f"{str(path)!r}: include_prompt is false; allowed: true, which pools the prompt's tokens, too")
    return _POOLINGS[modes[0]]


def _read_dense(folder: Path) -> tuple[DenseConfig, dict[str, Tensor]]:
    """Return the settings of a linear layer and its weights, "weight" and "bias"."""
    path = folder / "config.json"
    settings = read_json(path)
    name = str(settings.get("activation_function", "Tanh")).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise InputError(f"{str(path)!r}: activation_function is {name!r}; {nearest(name, _ACTIVATIONS)}")
    for key, only in (("use_residual", False), ("module_input_name", "sentence_embedding")):
        if settings.get(key, only) != only:
            raise InputError(f"{str(path)!r}: {key} is {settings[key]!r}; allowed: {only!r}")
    weights = read_tensors(find_weights(folder))
    tensors = {part: weights[f"linear.{part}"] for part in ("weight", "bias") if f"linear.{part}" in weights}
    if "weight" not in tensors:
        raise InputError(f"{str(folder)!r} has no tensor 'linear.weight'")
    layer = DenseConfig(width=len(tensors["weight"]), activation=_ACTIVATIONS[name], has_bias="bias" in tensors)
    return layer, tensors


def read_length(folder: Path, encoder_length: int) -> int | None:
    """Return the number of tokens that texts are truncated to; None for the encoder's maximum."""
    files = (("sentence_bert_config.json", "max_seq_length"), ("tokenizer_config.json", "model_max_length"))
    given = (read_json(folder / name).get(key) for name, key in files if (folder / name).is_file())
    length = next((int(value) for value in given if isinstance(value, int | float)), encoder_length)
    return length if length < encoder_length else None


def _read_usage(folder: Path) -> dict[str, Any]:
    path = folder / "config_sentence_transformers.json"
    return read_json(path) if path.is_file() else {}

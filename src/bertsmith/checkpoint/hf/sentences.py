"""Vectors of texts elsewhere: the files by which sentence-transformers makes them of an encoder's states."""

from pathlib import Path
from typing import Any

from bertsmith.checkpoint.files import write_json
from bertsmith.checkpoint.hf.adapter import TaskForm
from bertsmith.errors import InputError
from bertsmith.models.config import ModelConfig
from bertsmith.models.heads import HeadConfig
from bertsmith.models.heads.base import FeaturesConfig
from bertsmith.models.heads.task import EmbedderConfig

EMBEDDER = "embedder"
"""A key of ours in their config.json: the head's settings. transformers ignores it, and has no class with such a head;
it gives the states, of which sentence-transformers makes the vectors."""
FILES = ("modules.json", "sentence_bert_config.json", "1_Pooling", "2_Normalize")
_MODULES = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}


def sentence_form(architecture: str) -> TaskForm:
    """The encoder's own class, with the pooling in files beside it."""
    return TaskForm(
        architecture=architecture,
        kind="embedder",
        rows=(),
        read=_read,
        write=lambda head: {EMBEDDER: head.plain()},
        fits=lambda data: EMBEDDER in data,
        takes=why_not_sentences,
    )


def why_not_sentences(head: HeadConfig) -> str | None:
    """What keeps sentence-transformers from making a head's vectors, as part of a sentence; None if nothing does."""
    assert isinstance(head, EmbedderConfig)
    if head.pooling == "pooler":
        return "sentence-transformers has no pooling by a model's pooler"
    if head.features != FeaturesConfig() or head.recurrent is not None:
        return "sentence-transformers reads the last states alone, and the embedder others"
    if head.projection is not None:
        return "the embedder has a projection, for which the files of sentence-transformers are not written here"
    return None


def write_sentences(config: ModelConfig, folder: Path, length: int | None) -> None:
    """Puts those files beside a model with such an embedder, and none elsewhere; texts are cut to `length` tokens."""
    head = next((head for head in config.heads if isinstance(head, EmbedderConfig)), None)
    if head is None or why_not_sentences(head) is not None:
        return
    paths = [path for path in _MODULES if path != "2_Normalize" or head.is_normalised]
    kinds = enumerate((path, f"sentence_transformers.models.{_MODULES[path]}") for path in paths)
    modules = [{"idx": index, "name": str(index), "path": path, "type": kind} for index, (path, kind) in kinds]
    write_json(folder / "modules.json", modules)
    longest = config.encoder.embedding.longest
    settings = {"max_seq_length": longest if length is None else min(length, longest), "do_lower_case": False}
    write_json(folder / "sentence_bert_config.json", settings)
    pooling = {"word_embedding_dimension": config.encoder.width, "pooling_mode_cls_token": head.pooling == "first"}
    pooling |= {"pooling_mode_mean_tokens": head.pooling == "mean", "pooling_mode_max_tokens": False}
    for path in paths[1:]:
        (folder / path).mkdir()
    write_json(folder / "1_Pooling" / "config.json", {**pooling, "pooling_mode_mean_sqrt_len_tokens": False})


def _read(data: dict[str, Any]) -> HeadConfig:
    if not isinstance(data[EMBEDDER], dict):
        raise InputError(f"config.json: {EMBEDDER} is {data[EMBEDDER]!r}; allowed: the settings of an embedder head")
    return EmbedderConfig.parse(data[EMBEDDER], source=f"config.json: {EMBEDDER}")

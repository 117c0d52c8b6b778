"""The model a fine-tuning starts from: a folder's, or fresh weights with a tokenizer learned from the task's texts."""

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from bertsmith.bundled import NAMES, model_folder
from bertsmith.checkpoint.files import read_json
from bertsmith.checkpoint.hf import TWINS
from bertsmith.checkpoint.store import read_config
from bertsmith.errors import InputError, nearest
from bertsmith.layers.subnet import Subnet
from bertsmith.models.build import build, extract
from bertsmith.models.config import ModelConfig
from bertsmith.models.heads import HeadConfig, SequenceHeadConfig, TaskHeadConfig
from bertsmith.models.model import Model
from bertsmith.models.published import PRESETS, preset
from bertsmith.settings import Record
from bertsmith.text.learn import learn_tokenizer
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.training.continued import OF_A_FOLDER, fit_heads, read_folder


class ModelSource(Record):
    """The network to start from."""

    name: str
    """A bundled model, a folder, ours or Hugging Face's, or a preset with fresh weights, such as "bert-mini"."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Settings of the preset to change, such as layers or dropout; of a folder only dropout and layer_drop."""
    subnet: Subnet | None = None
    """The part of a folder's model to start from, such as its first layers: subnet.layers = [0, 1, 2], or every second
    one: subnet.depth = 0.5. None for all of it."""

    @property
    def is_preset(self) -> bool:
        return self.name in PRESETS

    @model_validator(mode="after")
    def _check_overrides(self) -> "ModelSource":
        fixed = [name for name in self.overrides if name not in OF_A_FOLDER]
        if fixed and not self.is_preset:
            raise ValueError(f"overrides.{fixed[0]} changes a preset, and name is {self.name!r}, which is none")
        if self.subnet is not None and self.is_preset:
            raise ValueError(f"subnet cuts the model of a folder, and name is {self.name!r}, a preset")
        return self


class TokenizerChoice(Record):
    """The tokenizer that is learned from the training texts, where the model has none yet."""

    kind: Literal["wordpiece", "bytes", "unigram"] = "bytes"
    """"bytes" is byte-level BPE: whatever the texts hold, decoding gives it back exactly."""
    vocabulary: int = Field(default=8000, gt=0)
    lowercase: bool = False

    def learned(self, texts: Iterable[str]) -> Tokenizer:
        """The tokenizer of some texts."""
        return learn_tokenizer(texts, self.kind, self.vocabulary, lowercase=self.lowercase, progress=False)


def starting_config(source: ModelSource, vocabulary: int) -> ModelConfig:
    """The config of the network without any weights being touched; that of a preset has the given vocabulary."""
    if source.is_preset:
        return _checked(preset(source.name, **{"vocabulary": vocabulary, **source.overrides}), source.name)
    return _checked(_of_folder(source).config, source.name)


def described_config(source: ModelSource) -> ModelConfig:
    """The config by what is written of the network, without its weights and so without heads that only these show."""
    path = model_folder(source.name) / "config.json"
    if source.is_preset or source.subnet is not None or not path.is_file():
        return starting_config(source, TokenizerChoice().vocabulary)
    data = read_json(path)
    if "bertsmith" in data:
        return _checked(read_config(path.parent), source.name)
    if data.get("model_type") not in TWINS:
        return starting_config(source, 0)  # which says what is wrong with it
    try:
        return _checked(TWINS[data["model_type"]].read_config(data, frozenset()), source.name)
    except (ValidationError, TypeError):
        return starting_config(source, 0)


def starting_encoder(
    source: ModelSource,
    tokenizer: TokenizerChoice,
    texts: Iterable[str],
    *,
    seed: int,
    given: Tokenizer | None = None,
) -> Model:
    """The encoder to start from, with its tokenizer; fresh weights take the one that is `given`, if any."""
    if not source.is_preset:
        model = _of_folder(source)
        model.require_tokenizer()
        return model
    starting_config(source, tokenizer.vocabulary)  # what is wrong with it is said before a tokenizer is learned
    learned = tokenizer.learned(texts) if given is None else given
    model = build(starting_config(source, learned.size), seed=seed)
    model.tokenizer = learned
    return model


def with_task_head(model: Model, head: HeadConfig, *, seed: int) -> Model:
    """The model with the head of a task, its pooler if that head reads it, and nothing else of pre-training.

    A head of the same settings keeps its weights: fine-tuning can go on.
    """
    needs_pooler = isinstance(head, SequenceHeadConfig) and head.pooling == "pooler"
    kept = [own for own in model.config.heads if own.kind == "pooler" and needs_pooler]
    for own in model.config.heads:
        if isinstance(own, TaskHeadConfig) and own != head:
            del model.heads[own.kind]
    fitted, _ = fit_heads(model, model.config.changed(heads=(*kept, head)), "the model", seed=seed)
    fitted.config, fitted.generator = fitted.config.changed(generator=None), None
    return fitted


def check_name(name: str) -> None:
    """Raises a sentence if there is neither a bundled model nor a preset nor a folder of this name."""
    if name in PRESETS:
        return
    folder = model_folder(name)
    if not folder.is_dir():
        raise InputError(
            f"MODEL is {name!r}, which is neither a bundled model nor the folder of a model nor a preset; "
            f"{nearest(name, [*NAMES, *PRESETS])}"
        )
    if not (folder / "config.json").is_file():
        raise InputError(f"MODEL {name!r} is not the folder of a model: it has no config.json")


def _of_folder(source: ModelSource) -> Model:
    check_name(source.name)
    model = read_folder(source.name, source.overrides)
    return model if source.subnet is None else extract(model, source.subnet)


def _checked(config: ModelConfig, name: str) -> ModelConfig:
    if config.decoder is not None:
        raise InputError(f"MODEL {name!r} has a decoder, which is for translation; this task wants an encoder alone")
    return config

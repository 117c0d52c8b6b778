"""Where a model comes from: one setting, `model`, for every command and recipe."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from bertsmith.bundled import NAMES, model_folder
from bertsmith.bundled.hub import full_hub_name, hub_hint
from bertsmith.checkpoint.hf.adapter import HfConfig
from bertsmith.checkpoint.hf.reading import ADAPTERS
from bertsmith.checkpoint.store import load, read_config
from bertsmith.errors import InputError, nearest
from bertsmith.files import read_json
from bertsmith.layers.mixers.sparse import SparseConfig
from bertsmith.layers.subnet import Subnet
from bertsmith.models.build import extract, rebuild
from bertsmith.models.config import ModelConfig
from bertsmith.models.convert import with_sparse_attention
from bertsmith.models.model import Model
from bertsmith.models.published import PRESETS, preset
from bertsmith.settings import InvalidRecord, Plain, Record

SOURCES = ("preset", "folder", "network")
TRAINABLE_OVERRIDES = ("dropout", "layer_drop", "sparse")
"""Overrides that are allowed for existing weights: they change no weight; a learned α of sparse attention is added."""
DEFAULT_VOCABULARY = 8000
"""Vocabulary size of a preset before its tokenizer is known."""


class ModelSource(Record):
    """A model to start from: fresh weights of a preset or of a written-out network, or the weights of a folder.

    In a recipe the name alone is enough: `model = "small"` or `model = "bert-mini"`.
    """

    preset: str | None = None
    """A published size with fresh weights, such as "bert-mini"."""
    folder: str | None = None
    """A bundled model, the folder of a model, ours or Hugging Face's, or a model of the hub as owner/name."""
    network: ModelConfig | None = None
    """A config written out, with fresh weights."""
    overrides: Plain = Field(default_factory=dict)
    """Changed settings of the preset, such as layers or dropout; for a folder only dropout, layer_drop and sparse.
    `sparse` replaces the softmax of all attention, for example {kind = "sparsemax", sparsity = -1.0}."""
    subnet: Subnet | None = None
    """Sub-network of the folder's model, such as every second layer: subnet.depth = 0.5. None for the whole model."""
    keep_masks: bool = True
    """Keep the pruned weights of the folder's model at 0 in training, if it has masks.safetensors."""

    is_optional: ClassVar[bool] = False

    @classmethod
    def expand(cls, value: Any, path: str) -> Any:
        """Return a name as a table; refuse `name`, which the tables of earlier versions had."""
        if isinstance(value, Mapping) and "name" in value:
            [(key, name)] = source_fields(str(value["name"])).items()
            raise InputError(f'{path}.name is called {path}.{key} now: write {path} = "{name}", or {key} in a table')
        return source_fields(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> "ModelSource":
        given = [name for name in SOURCES if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given; allowed: one of preset, folder, network")
        if not given and not self.is_optional:
            raise ValueError("give one of preset, folder, network")
        fixed = [name for name in self.overrides if name not in TRAINABLE_OVERRIDES]
        if self.folder is not None and fixed:
            allowed = ", ".join(f"overrides.{name}" for name in TRAINABLE_OVERRIDES)
            raise ValueError(
                f"overrides.{fixed[0]} belongs to the weights of the folder {self.folder!r}; allowed: {allowed}"
            )
        if self.network is not None and self.overrides:
            raise ValueError("overrides change a preset or a folder; write them into the network")
        if self.subnet is not None and self.folder is None:
            raise ValueError("subnet takes a part of the model of a folder; give folder")
        return self

    @model_validator(mode="after")
    def _check_sparse(self) -> "ModelSource":
        _ = self.sparse
        return self

    @property
    def sparse(self) -> SparseConfig | None:
        """The sparse attention weights of the overrides; None for the model's own."""
        settings = self.overrides.get("sparse")
        if settings is None:
            return None
        table = SparseConfig.expand(settings, "overrides.sparse")
        if not isinstance(table, Mapping):
            raise InputError(f"overrides.sparse is {settings!r}; allowed: a name such as 'sparsemax', or a table")
        return SparseConfig.parse(table, source="overrides.sparse")

    @property
    def is_given(self) -> bool:
        return self.preset is not None or self.folder is not None or self.network is not None

    @property
    def is_preset(self) -> bool:
        return self.preset is not None

    @property
    def name(self) -> str:
        """Name of the preset or the folder, for messages."""
        return self.preset or self.folder or "network"

    def config(self, vocabulary: int) -> ModelConfig | None:
        """Return the config of fresh weights; None for a folder."""
        if self.preset is None:
            return self.network
        sizes = {name: value for name, value in self.overrides.items() if name != "sparse"}
        config = preset(self.preset, **{"vocabulary": vocabulary, **sizes})
        return config if self.sparse is None else with_sparse_attention(config, self.sparse)

    def load(self, *, allows_decoder: bool = False) -> Model:
        """Load the folder's model in float32, with the overridden settings, cut to the subnet."""
        assert self.folder is not None
        model = load(self.folder, keep_masks=self.keep_masks).float()
        if not allows_decoder:
            check_encoder(model.config, self.folder)
        return self.with_overrides(model)

    def with_overrides(self, model: Model) -> Model:
        """Return the folder's model with the overridden settings, cut to the subnet."""
        plain = model.config.plain()
        if "dropout" in self.overrides:
            plain = _set_dropout(plain, self.overrides["dropout"])
        if "layer_drop" in self.overrides:
            plain["encoder"]["layer_drop"] = self.overrides["layer_drop"]
        config = ModelConfig.parse(plain, source=f"overrides of {self.folder!r}")
        if self.sparse is not None:
            config = with_sparse_attention(config, self.sparse)
        model = model if config == model.config else rebuild(model, config)
        return model if self.subnet is None else extract(model, self.subnet)

    def encoder_config(self, vocabulary: int = DEFAULT_VOCABULARY) -> ModelConfig:
        """Return the config of the encoder, with the given vocabulary where its weights are fresh."""
        config = self.config(vocabulary)
        if config is None:
            check_name(self.name)
            config = self.load().config
        check_encoder(config, self.name)
        return config

    def described_config(self) -> ModelConfig:
        """Return the config from the folder's config.json alone: heads that only the weights show are missing."""
        if self.folder is None or self.subnet is not None:
            return self.encoder_config()
        path = model_folder(self.folder) / "config.json"
        data = read_json(path) if path.is_file() else {}
        if "bertsmith" in data:
            config = read_config(path.parent)
        elif data.get("model_type") in ADAPTERS:
            try:
                config = ADAPTERS[data["model_type"]].read_config(HfConfig(data), frozenset())
            except (InvalidRecord, TypeError):
                return self.encoder_config()
        else:
            return self.encoder_config()  # raises with the reason
        check_encoder(config, self.folder)
        return config


class FineTunedSource(ModelSource):
    """The folder of a fine-tuned model, or a part of its model."""

    @model_validator(mode="after")
    def _check_folder(self) -> "FineTunedSource":
        if self.folder is None:
            kind = "preset" if self.preset is not None else "network"
            raise ValueError(f"{kind} has fresh weights; give folder with a fine-tuned model (bertsmith finetune)")
        return self

    @property
    def path(self) -> Path:
        """Return the folder of the model; raise InputError if it does not exist."""
        path = model_folder(self.name)
        if not path.is_dir():
            raise InputError(f"MODEL is {self.name!r}, which is not a folder; give the folder of a fine-tuned model")
        return path


class GeneratorSource(ModelSource):
    """The generator of replaced-token detection.

    By default the one in the model's folder, or the one published with its preset (unless an override changes the
    model's shape), or else the model's own layers, narrower.
    """

    width: float | None = Field(default=None, gt=0, le=1)
    """Width of the generator as a share of the model's; all of it if only depth is given. Without both it is a quarter,
    except for DeBERTa, whose generators are as wide and half as deep."""
    depth: float | None = Field(default=None, gt=0, le=1)
    """Number of layers as a share of the model's; all of them if only width is given."""
    has_mask_decoder: bool | None = None
    """Whether a generator derived from the model's layers has a mask decoder; by default if the model has no absolute
    positions."""
    sharing: Literal["none", "full", "gradient_disentangled"] | None = None
    """Embedding weights that model and generator share: none, all, or the generator's token vectors without gradient
    (DeBERTa v3). None for the value of the model's folder, else "full"."""

    is_optional: ClassVar[bool] = True

    @model_validator(mode="after")
    def _check_shares(self) -> "GeneratorSource":
        if self.is_given and (self.width, self.depth) != (None, None):
            raise ValueError("width and depth narrow the model's own layers; allowed: without preset, folder, network")
        if self.is_given and self.has_mask_decoder is not None:
            raise ValueError(
                "has_mask_decoder is a setting of a generator derived from the model's layers; for a preset set "
                "overrides.has_mask_decoder"
            )
        if not self.is_given and self.overrides:
            raise ValueError("overrides change a preset or a folder; give one")
        return self


def source_fields(name: str) -> dict[str, str]:
    """Return the setting that a name stands for: a preset, else a folder (bundled models are folders)."""
    return {"preset" if name in PRESETS and name not in NAMES else "folder": name}


def replace_source(recipe: Any, model: str) -> Plain:
    """Return the `model` table of a recipe with another model given by name; only its subnet is kept then."""
    fields = source_fields(model)
    table = expand_source(recipe)
    if fields.items() <= table.items():
        return table
    return {**fields, **({"subnet": table["subnet"]} if "subnet" in table else {})}


def expand_source(recipe: Any) -> Plain:
    """Return the `model` setting of a recipe as a table."""
    if isinstance(recipe, str):
        return dict(source_fields(recipe))
    return dict(recipe or {})


def check_name(name: str) -> None:
    """Raise InputError unless `name` is a preset, a bundled model or the folder of a model."""
    if name in PRESETS:
        return
    folder = model_folder(name)
    if not folder.is_dir():
        problem = f"MODEL is {name!r}, which is neither a bundled model nor the folder of a model nor a preset; "
        if full := full_hub_name(name):
            raise InputError(f"{problem}did you mean {full!r}, the model of the Hugging Face hub?")
        raise InputError(
            f"{problem}{nearest(name, [*NAMES, *PRESETS])} (presets have random weights; a model of the Hugging Face "
            f"hub is given as owner/name){hub_hint(name)}"
        )
    if not (folder / "config.json").is_file():
        raise InputError(f"MODEL {name!r} is not the folder of a model: it has no config.json")


def check_encoder(config: ModelConfig, name: str) -> None:
    """Raise InputError if the model has a decoder."""
    if config.decoder is not None:
        raise InputError(f"model {name!r} has a decoder; allowed: encoders (bertsmith finetune trains it on pairs)")


def _set_dropout(data: Any, rate: float) -> Any:
    """Return plain settings with one rate for every dropout."""
    if isinstance(data, list):
        return [_set_dropout(item, rate) for item in data]
    if not isinstance(data, dict):
        return data
    return {name: rate if name.endswith("dropout") else _set_dropout(value, rate) for name, value in data.items()}

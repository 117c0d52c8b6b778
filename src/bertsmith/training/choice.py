"""Which network a run trains: chosen in the settings, fresh or from a folder, with the heads its objective needs."""

import copy
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from bertsmith.checkpoint.store import load
from bertsmith.errors import InputError
from bertsmith.models.build import build
from bertsmith.models.config import GeneratorConfig, ModelConfig
from bertsmith.models.generator import attach, generator_of, unfold
from bertsmith.models.heads import HEADS, HeadConfig
from bertsmith.models.model import Model
from bertsmith.models.published import PRESETS, preset
from bertsmith.settings import Record

_OF_ANY_SHAPE = {"vocabulary", "longest", "dropout", "deviation"}
"""Overrides that a model and its generator can have in common."""


class NetworkChoice(Record):
    """A network: a preset with overrides, written out whole, or that of a folder with its weights."""

    preset: str | None = None
    """A published size, such as "bert-mini"."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Settings of the preset's family to change, such as layers or dropout."""
    network: ModelConfig | None = None
    """A config written out, instead of a preset."""
    folder: str | None = None
    """A model folder, ours or Hugging Face's, to go on from, instead of fresh weights."""

    @model_validator(mode="after")
    def _check_one(self) -> "NetworkChoice":
        given = [name for name in ("preset", "network", "folder") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given; allowed: one of preset, network, folder")
        if self.preset is None and self.overrides:
            raise ValueError("overrides change a preset; give one, or write them into the network")
        return self

    def config(self, vocabulary: int) -> ModelConfig | None:
        """The config of fresh weights; None where there is no preset and no network."""
        if self.preset is not None:
            return preset(self.preset, **{"vocabulary": vocabulary, **self.overrides})
        return self.network


class ModelChoice(NetworkChoice):
    """The network to train."""

    @model_validator(mode="after")
    def _check_given(self) -> "ModelChoice":
        if self.preset is None and self.network is None and self.folder is None:
            raise ValueError("give one of preset, network, folder")
        return self


class GeneratorChoice(NetworkChoice):
    """For replaced_tokens: the generator; by default the one published with the model's preset, where there is one and
    no override gives the model another shape, or else the model's own layers, narrower."""

    width: float | None = Field(default=None, gt=0, le=1)
    """Of the model's own layers: the generator's width as a share of the model's, all of it if only depth is given.
    Without both it is a quarter, but for DeBERTa, whose generators are as wide and half as deep."""
    depth: float | None = Field(default=None, gt=0, le=1)
    """Likewise its number of layers, all of them if only width is given."""
    sharing: Literal["none", "full", "gradient_disentangled"] = "full"
    """What both embeddings have in common: nothing, everything, or the generator's token vectors without moving them
    (DeBERTa v3)."""


def with_heads(config: ModelConfig, kinds: tuple[str, ...]) -> ModelConfig:
    """The config with exactly these heads, those it has as it has them, and its mask decoder where one is of use."""
    given = {head.kind: head for head in config.heads}
    wanted = [*kinds, *(["mask_decoder"] if "masked_tokens" in kinds and "mask_decoder" in given else [])]
    fresh: dict[str, type[HeadConfig]] = HEADS
    return config.changed(heads=tuple(given.get(kind) or fresh[kind]() for kind in wanted))  # type: ignore[call-arg]


def chosen_config(
    model: ModelChoice, generator: GeneratorChoice | None, heads: tuple[str, ...], vocabulary: int
) -> ModelConfig:
    """The config of the network that will be trained."""
    if model.folder is not None:
        return chosen_model(model, generator, heads, vocabulary, seed=0).config
    config = model.config(vocabulary)
    assert config is not None
    if generator is None:
        return with_heads(config, heads)
    if generator.folder is not None:
        other = load(generator.folder).config
    else:
        other = _generator_config(model, generator, config, vocabulary)
    kept = GeneratorConfig(model=with_heads(other, ("masked_tokens",)), sharing=generator.sharing)
    config = with_heads(config, heads)
    if generator.sharing == "gradient_disentangled":
        encoder = config.encoder
        return config.changed(
            encoder=encoder.changed(embedding=encoder.embedding.changed(table="difference")), generator=kept
        )
    return config.changed(generator=kept)


def _generator_config(
    model: ModelChoice, generator: GeneratorChoice, config: ModelConfig, vocabulary: int
) -> ModelConfig:
    """The generator that was chosen, or the published one, or one derived from the model's config."""
    chosen, published = generator.config(vocabulary), f"{model.preset}-generator"
    is_derived = generator.width is not None or generator.depth is not None
    if chosen is None and not is_derived and published in PRESETS and set(model.overrides) <= _OF_ANY_SHAPE:
        return preset(published, **{"vocabulary": vocabulary, **model.overrides})
    return chosen or generator_of(config, width=generator.width, depth=generator.depth)


def chosen_model(
    model: ModelChoice, generator: GeneratorChoice | None, heads: tuple[str, ...], vocabulary: int, *, seed: int
) -> Model:
    """The network to train: fresh, or with the weights of a folder and fresh ones only for what the folder lacks."""
    if model.folder is None and (generator is None or generator.folder is None):
        return build(chosen_config(model, generator, heads, vocabulary), seed=seed)
    if model.folder is None:
        config = model.config(vocabulary)
        assert config is not None
        start = build(with_heads(config, heads), seed=seed)
    else:
        start = _refitted(load(Path(model.folder)), heads, seed)
    if generator is None:
        return start
    if start.generator is None:
        if generator.folder is not None:
            beside = _refitted(load(Path(generator.folder)), ("masked_tokens",), seed)
        else:
            other = _generator_config(model, generator, start.config, vocabulary)
            beside = build(with_heads(other, ("masked_tokens",)), seed=seed)
        start = attach(start, beside, generator.sharing)
    return unfold(start)


def _refitted(model: Model, heads: tuple[str, ...], seed: int) -> Model:
    """A loaded model with exactly these heads: those it has keep their weights, others are fresh."""
    config = with_heads(model.config, heads)
    fresh = build(config.changed(generator=None), seed=seed)
    for kind, head in model.heads.items():
        if kind in fresh.heads:
            fresh.heads[kind] = copy.deepcopy(head)
    fresh.encoder, fresh.generator, fresh.config = model.encoder, model.generator, config
    fresh.tokenizer = model.tokenizer
    return fresh


def check_encoder(config: ModelConfig, name: str) -> None:
    """Raises a sentence if this is no encoder alone."""
    if config.decoder is not None:
        raise InputError(f"model {name!r} has a decoder; allowed: encoders (bertsmith finetune trains it on pairs)")

"""Which network a run trains: chosen in the settings, fresh or from a folder, with the heads its objective needs."""

from typing import Any, Literal

from pydantic import Field, model_validator

from bertsmith.errors import InputError
from bertsmith.layers.subnet import Subnet
from bertsmith.models.build import build, extract
from bertsmith.models.config import GeneratorConfig, ModelConfig
from bertsmith.models.generator import attach, generator_of, part_of, unfold
from bertsmith.models.heads import HEADS, HeadConfig
from bertsmith.models.model import Model
from bertsmith.models.published import PRESETS, preset
from bertsmith.settings import Record
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.training.continued import OF_A_FOLDER, agree, fit_heads, fit_tokenizer, read_folder

_OF_ANY_SHAPE = {"vocabulary", "longest", "dropout", "layer_drop", "deviation"}
"""Overrides that a model and its generator can have in common."""


class NetworkChoice(Record):
    """A network: a preset with overrides, written out whole, or that of a folder with its weights."""

    preset: str | None = None
    """A published size, such as "bert-mini"."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Settings of the preset's family to change, such as layers or dropout; of a folder only dropout and layer_drop."""
    network: ModelConfig | None = None
    """A config written out, instead of a preset."""
    folder: str | None = None
    """A bundled model or the folder of one, ours or Hugging Face's, to go on from, instead of fresh weights."""
    subnet: Subnet | None = None
    """The part of the folder's model to go on from, such as every second layer: subnet.depth = 0.5; None for all."""

    @model_validator(mode="after")
    def _check_one(self) -> "NetworkChoice":
        given = [name for name in ("preset", "network", "folder") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given; allowed: one of preset, network, folder")
        fixed = [name for name in self.overrides if name not in OF_A_FOLDER]
        if self.folder is not None and fixed:
            allowed = " and ".join(f"overrides.{name}" for name in OF_A_FOLDER)
            raise ValueError(f"overrides.{fixed[0]} belongs to the weights of the folder; allowed: {allowed}")
        if self.subnet is not None and self.folder is None:
            raise ValueError("subnet cuts the model of a folder; give folder")
        if self.network is not None and self.overrides:
            raise ValueError("overrides change a preset or a folder; write them into the network")
        return self

    @property
    def is_given(self) -> bool:
        return self.preset is not None or self.network is not None or self.folder is not None

    def config(self, vocabulary: int) -> ModelConfig | None:
        """The config of fresh weights; None where there is no preset and no network."""
        if self.preset is not None:
            return preset(self.preset, **{"vocabulary": vocabulary, **self.overrides})
        return self.network


class ModelChoice(NetworkChoice):
    """The network to train."""

    @model_validator(mode="after")
    def _check_given(self) -> "ModelChoice":
        if not self.is_given:
            raise ValueError("give one of preset, network, folder")
        return self


class GeneratorChoice(NetworkChoice):
    """For replaced_tokens: the generator; by default the one in the model's folder, or published with its preset (where
    no override gives the model another shape), or else the model's own layers, narrower."""

    width: float | None = Field(default=None, gt=0, le=1)
    """Of the model's own layers: the generator's width as a share of the model's, all of it if only depth is given.
    Without both it is a quarter, but for DeBERTa, whose generators are as wide and half as deep."""
    depth: float | None = Field(default=None, gt=0, le=1)
    """Likewise its number of layers, all of them if only width is given."""
    sharing: Literal["none", "full", "gradient_disentangled"] | None = None
    """What both embeddings have in common: nothing, everything, or the generator's token vectors without moving them
    (DeBERTa v3). By default that of the model's folder, else everything."""

    @model_validator(mode="after")
    def _check_shares(self) -> "GeneratorChoice":
        if self.is_given and (self.width, self.depth) != (None, None):
            raise ValueError("width and depth narrow the model's own layers; allowed: without preset, network, folder")
        if not self.is_given and self.overrides:
            raise ValueError("overrides change a preset or a folder; give one")
        return self


def with_heads(config: ModelConfig, kinds: tuple[str, ...]) -> ModelConfig:
    """The config with exactly these heads, those it has as it has them, and its mask decoder where one is of use."""
    given = {head.kind: head for head in config.heads}
    wanted = [*kinds, *(["mask_decoder"] if "masked_tokens" in kinds and "mask_decoder" in given else [])]
    return config.changed(heads=tuple(given.get(kind) or _fresh_head(config, kind) for kind in wanted))


def _fresh_head(config: ModelConfig, kind: str) -> HeadConfig:
    """A head as the published sizes of the same family have it, or with its defaults where none has one."""
    published = (architecture(size) for architecture, size in PRESETS.values())
    known = (head for other in published if other.family == config.family for head in other.heads)
    fresh: dict[str, type[HeadConfig]] = HEADS
    return next((head for head in known if head.kind == kind), None) or fresh[kind]()  # type: ignore[call-arg]


def continued(
    choice: NetworkChoice, heads: tuple[str, ...], tokenizer: Tokenizer | None, notices: list[str], *, seed: int
) -> Model:
    """The model of a folder with the corpus's vocabulary and exactly these heads; says in `notices` what is new."""
    folder = choice.folder
    assert folder is not None
    model = read_folder(folder, choice.overrides)
    if choice.subnet is not None:
        model = extract(model, choice.subnet)
    if tokenizer is not None:
        notices += fit_tokenizer(model, tokenizer, folder)
    model, said = fit_heads(model, with_heads(model.config, heads), folder, seed=seed)
    notices += said
    return model


def chosen_config(
    model: ModelChoice,
    generator: GeneratorChoice | None,
    heads: tuple[str, ...],
    vocabulary: int,
    tokenizer: Tokenizer | None = None,
) -> ModelConfig:
    """The config of the network that will be trained."""
    if model.folder is not None or (generator is not None and generator.folder is not None):
        return chosen_model(model, generator, heads, vocabulary, tokenizer, seed=0)[0].config
    config = model.config(vocabulary)
    assert config is not None
    if generator is None:
        return with_heads(config, heads)
    sharing = generator.sharing or "full"
    other = _generator_config(model, generator, config, vocabulary)
    kept = GeneratorConfig(model=with_heads(other, ("masked_tokens",)), sharing=sharing)
    config = with_heads(config, heads)
    if sharing == "gradient_disentangled":
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
    model: ModelChoice,
    generator: GeneratorChoice | None,
    heads: tuple[str, ...],
    vocabulary: int,
    tokenizer: Tokenizer | None,
    *,
    seed: int,
) -> tuple[Model, list[str]]:
    """The network to train, and sentences a person should read: what a folder lacks and has fresh weights, and so on.

    `tokenizer` is the corpus's; None, before there is a corpus, leaves a folder's vocabulary as it is.
    """
    if model.folder is None and (generator is None or generator.folder is None):
        return build(chosen_config(model, generator, heads, vocabulary), seed=seed), []
    notices: list[str] = []
    guesser = None
    if generator is not None and generator.folder is not None:
        guesser = continued(generator, ("masked_tokens",), tokenizer, notices, seed=seed)
        vocabulary = max(vocabulary, guesser.config.encoder.vocabulary)  # tables may have more rows than are used
    if model.folder is not None:
        start = continued(model, heads, tokenizer, notices, seed=seed)
    else:
        config = model.config(vocabulary)
        assert config is not None
        start = build(with_heads(config, heads), seed=seed)
    if generator is None:
        if start.generator is not None:
            notices.append("the folder's generator is left out: the objective has no use for one")
        return part_of(start, "encoder"), notices
    if start.config.generator is not None and not generator.is_given:
        _check_sharing(start.config.generator, generator, model)
        return unfold(start), notices
    if guesser is None:
        guesser = _fresh_generator(model, generator, start.config, seed)
        inner = guesser.config.encoder
        size = f"layers: {len(inner.layers)}, width: {inner.width}"
        notices.append(f"the generator is fresh ({size}): its first guesses are nearly random")
    start, sharing = part_of(start, "encoder"), generator.sharing or "full"
    agree(start, guesser, sharing, fresh=(model.folder is None, generator.folder is None))
    return unfold(attach(start, guesser, sharing)), notices


def _fresh_generator(model: ModelChoice, choice: GeneratorChoice, config: ModelConfig, seed: int) -> Model:
    """The chosen generator beside a model, with as many rows as the model has."""
    other = _generator_config(model, choice, config, config.encoder.vocabulary)
    return build(with_heads(other, ("masked_tokens",)), seed=seed)


def _check_sharing(kept: GeneratorConfig, choice: GeneratorChoice, model: ModelChoice) -> None:
    if choice.sharing not in (None, kept.sharing):
        raise InputError(
            f"generator.sharing is {choice.sharing!r} and the generator in {model.folder!r} was trained with "
            f"{kept.sharing!r}; leave it out, or give another generator"
        )

"""The model that a training run starts from: weights, vocabulary, heads and generator."""

from collections.abc import Iterable
from typing import Literal

import torch
from pydantic import Field

from bertsmith.checkpoint.source import DEFAULT_VOCABULARY, GeneratorSource, ModelSource, check_name
from bertsmith.errors import InputError
from bertsmith.models.attach_heads import fit_heads, with_heads
from bertsmith.models.build import build
from bertsmith.models.config import GeneratorConfig, ModelConfig
from bertsmith.models.generator import attach, generator_of, part_of, unfold
from bertsmith.models.masks import refuse_masks
from bertsmith.models.model import Model
from bertsmith.models.published import PRESETS, preset
from bertsmith.models.vocabulary import add_tokens
from bertsmith.settings import Record
from bertsmith.text.extend import new_tokens, tokenizer_difference
from bertsmith.text.learn import learn_tokenizer
from bertsmith.text.tokenizer import Tokenizer

_SHARED_OVERRIDES = {"vocabulary", "max_length", "dropout", "layer_drop", "init_std"}
"""Overrides that a model and its published generator can have in common."""


class TokenizerConfig(Record):
    """Tokenizer to learn from the training texts if the model has none."""

    kind: Literal["wordpiece", "bytes", "unigram", "characters"] = "bytes"
    """"bytes" is byte-level BPE: decoding gives every text back exactly."""
    vocabulary: int = Field(default=DEFAULT_VOCABULARY, gt=0)
    lowercase: bool = False

    def learn(self, texts: Iterable[str]) -> Tokenizer:
        """Learn the tokenizer from texts."""
        return learn_tokenizer(texts, self.kind, self.vocabulary, lowercase=self.lowercase, progress=False)


def finetuning_encoder(
    source: ModelSource,
    tokenizer: TokenizerConfig,
    texts: Iterable[str],
    *,
    seed: int,
    given: Tokenizer | None = None,
) -> Model:
    """Return the encoder to fine-tune, with its tokenizer; fresh weights use `given` or learn one from the texts."""
    if source.folder is not None:
        check_name(source.folder)
        model = source.load()
        model.require_tokenizer()
        return model
    source.encoder_config(tokenizer.vocabulary)  # raises before a tokenizer is learned
    own = tokenizer.learn(texts) if given is None else given
    model = build(source.encoder_config(own.size), seed=seed)
    model.tokenizer = own
    return model


def pretraining_config(
    model: ModelSource,
    generator: GeneratorSource | None,
    heads: tuple[str, ...],
    vocabulary: int,
    tokenizer: Tokenizer | None = None,
) -> ModelConfig:
    """Return the config of the network to pre-train."""
    if model.folder is not None or (generator is not None and generator.folder is not None):
        return pretraining_model(model, generator, heads, vocabulary, tokenizer, seed=0)[0].config
    config = model.config(vocabulary)
    assert config is not None
    if generator is None:
        return with_heads(config, heads)
    sharing = generator.sharing or "full"
    inner = _generator_config(model, generator, config, vocabulary)
    joint = GeneratorConfig(model=with_heads(inner, ("masked_tokens",)), sharing=sharing)
    config = with_heads(config, heads)
    if sharing == "gradient_disentangled":
        encoder = config.encoder
        return config.changed(
            encoder=encoder.changed(embedding=encoder.embedding.changed(table="difference")), generator=joint
        )
    return config.changed(generator=joint)


def pretraining_model(
    model: ModelSource,
    generator: GeneratorSource | None,
    heads: tuple[str, ...],
    vocabulary: int,
    tokenizer: Tokenizer | None,
    *,
    seed: int,
) -> tuple[Model, list[str]]:
    """Return the network to pre-train, and notices, such as which parts of a folder's model are fresh.

    `tokenizer` is the corpus's; None, before there is a corpus, keeps the folder's vocabulary.
    """
    if model.folder is None and (generator is None or generator.folder is None):
        return build(pretraining_config(model, generator, heads, vocabulary), seed=seed), []
    notices: list[str] = []
    generator_model = None
    if generator is not None and generator.folder is not None:
        generator_model = _continued_model(generator, ("masked_tokens",), tokenizer, notices, seed=seed)
        vocabulary = max(vocabulary, generator_model.config.encoder.vocabulary)  # tables may have unused rows
    if model.folder is not None:
        start = _continued_model(model, heads, tokenizer, notices, seed=seed)
    else:
        config = model.config(vocabulary)
        assert config is not None
        start = build(with_heads(config, heads), seed=seed)
    if generator is None:
        if start.generator is not None:
            notices.append("the folder's generator is left out: the objective does not use one")
        return part_of(start, "encoder"), notices
    if start.config.generator is not None and not generator.is_given:
        _check_sharing(start.config.generator, generator, model)
        return unfold(start), notices
    if generator_model is None:
        config = _generator_config(model, generator, start.config, start.config.encoder.vocabulary)
        generator_model = build(with_heads(config, ("masked_tokens",)), seed=seed)
        size = f"layers: {len(config.encoder.layers)}, width: {config.encoder.width}"
        notices.append(f"the generator is fresh ({size}): its first predictions are nearly random")
    start, sharing = part_of(start, "encoder"), generator.sharing or "full"
    share_embeddings(start, generator_model, sharing, fresh=(model.folder is None, generator.folder is None))
    return unfold(attach(start, generator_model, sharing)), notices


def _continued_model(
    source: ModelSource, heads: tuple[str, ...], tokenizer: Tokenizer | None, notices: list[str], *, seed: int
) -> Model:
    """Load a folder's model with the corpus's vocabulary and exactly these heads; append notices about fresh parts."""
    model = source.load()
    refuse_masks(model, "pre-training")
    if tokenizer is not None:
        notices += extend_vocabulary(model, tokenizer, source.name)
    model, changes = fit_heads(model, with_heads(model.config, heads), source.name, seed=seed)
    notices += changes
    return model


def _generator_config(
    model: ModelSource, generator: GeneratorSource, config: ModelConfig, vocabulary: int
) -> ModelConfig:
    """Return the config of the given generator, the published one, or one derived from the model's config."""
    given, published = generator.config(vocabulary), f"{model.preset}-generator"
    is_derived = (generator.width, generator.depth, generator.has_mask_decoder) != (None, None, None)
    if given is None and not is_derived and published in PRESETS and set(model.overrides) <= _SHARED_OVERRIDES:
        return preset(published, **{"vocabulary": vocabulary, **model.overrides})
    return given or generator_of(
        config, width=generator.width, depth=generator.depth, has_mask_decoder=generator.has_mask_decoder
    )


def _check_sharing(own: GeneratorConfig, generator: GeneratorSource, model: ModelSource) -> None:
    if generator.sharing not in (None, own.sharing):
        raise InputError(
            f"generator.sharing is {generator.sharing!r} and the generator in {model.folder!r} was trained with "
            f"{own.sharing!r}; leave it out, or give another generator"
        )


def extend_vocabulary(model: Model, tokenizer: Tokenizer, folder: str) -> list[str]:
    """Add rows to the model for the tokens that only the corpus's tokenizer has; return notices."""
    own, rows = model.tokenizer, model.config.encoder.vocabulary
    if own is None:
        if tokenizer.size > rows:
            raise InputError(
                f"the corpus has {tokenizer.size} tokens and {folder!r}, which holds no tokenizer, {rows} rows; "
                "put its tokenizer.json there and make the corpus with it"
            )
        return [f"{folder!r} holds no tokenizer: the corpus's {tokenizer.size:,} tokens are taken to be its own"]
    difference = tokenizer_difference(own, tokenizer)
    if difference is not None:
        raise InputError(
            f"the corpus's tokenizer differs from the tokenizer of {folder!r}: {difference}; make the corpus with "
            f"`bertsmith corpus --tokenizer {folder}`, or with an extension of it"
        )
    parts = new_tokens(own, tokenizer)
    if not parts:
        return []
    add_tokens(model, parts)
    grown = model.config.encoder.vocabulary - rows
    return [
        f"{len(parts):,} tokens of the corpus's tokenizer are new to {folder!r}: each starts as the mean of its parts "
        f"({grown:,} rows added, {rows:,} there before)"
    ]


@torch.no_grad()
def share_embeddings(model: Model, generator: Model, sharing: str, *, fresh: tuple[bool, bool]) -> None:
    """Copy the vectors that a model and its generator share to the one of the two that is fresh.

    If both are trained, fully shared embeddings must be equal already.
    """
    if sharing == "none" or all(fresh):
        return
    both = [part.encoder.embedding for part in (model, generator)]
    starts = ("token_table",) if sharing == "gradient_disentangled" else ("token_table", "type_", "position.", "norm.")
    own, others = (
        {name: tensor for name, tensor in part.state_dict().items() if name.startswith(starts)} for part in both
    )
    for name in [name for name in own if name in others]:
        if own[name].shape != others[name].shape:
            return  # attach() raises: their configs do not fit
        if fresh[1]:
            others[name].copy_(own[name])
        elif fresh[0]:
            own[name].copy_(others[name])
        elif sharing == "full" and not torch.allclose(own[name], others[name], rtol=0, atol=1e-6):
            raise InputError(
                f"generator.sharing is 'full', and the model's {name} is not the generator's; "
                "allowed here: 'gradient_disentangled', 'none'"
            )

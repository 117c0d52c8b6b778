"""The generator of replaced-token detection: derive its config, attach it to an encoder, and separate the two.

While training with gradient-disentangled embeddings the encoder's token table holds only its difference from the
generator's (He et al. 2023): `unfold` converts a model to that form and `fold` back to an ordinary model. `load` always
returns folded models; only training checkpoints are unfolded. `part_of` returns one of the two networks for export.
"""

import copy
from typing import Literal

import torch

from bertsmith.errors import InputError
from bertsmith.layers.mixers.base import MixerConfig
from bertsmith.models.build import share
from bertsmith.models.config import GeneratorConfig, LayerConfig, ModelConfig
from bertsmith.models.heads import AnyHead, MaskDecoderConfig, MaskedTokensConfig
from bertsmith.models.model import Model

Part = Literal["encoder", "generator"]

_RELATIVE_SIZES = {"deberta": (1.0, 0.5), "deberta-v2": (1.0, 0.5)}
"""Width and depth of a family's generators relative to the encoder; default: a quarter of the width, full depth."""
_FACTORISED_FAMILIES = {"bert": "electra"}
"""Family of a generator whose embedding and layers differ in width."""


def generator_of(
    config: ModelConfig,
    *,
    width: float | None = None,
    depth: float | None = None,
    has_mask_decoder: bool | None = None,
) -> ModelConfig:
    """Return the config of a generator: width and number of layers scaled, same embedding.

    Heads keep their width, so a quarter of the width is a quarter of the heads, at least one. By default the scales
    match the family's published generators, and it has a mask decoder if the encoder has no absolute positions.
    """
    if width is None and depth is None:
        width, depth = _RELATIVE_SIZES.get(config.family, (0.25, 1.0))
    width, depth = (1.0 if given is None else given for given in (width, depth))
    for name, scale in (("width", width), ("depth", depth)):
        if not 0 < scale <= 1:
            raise InputError(f"generator {name} is {scale}; allowed: above 0, up to 1")
    encoder = config.encoder
    heads = max(1, round(width * encoder.layers[0].mixer.heads))
    narrow = encoder.width * heads // encoder.layers[0].mixer.heads
    layers = tuple(_narrow_layer(layer, encoder.width, narrow) for layer in encoder.layers)
    kept = layers[: max(1, round(depth * len(layers)))]
    embedding = encoder.embedding.changed(width=encoder.embedding_width, table="own")
    small = encoder.changed(width=narrow, layers=kept, embedding=embedding)
    is_factorised = small.embedding_width != narrow
    family = _FACTORISED_FAMILIES.get(config.family, config.family) if is_factorised else config.family
    token_heads = _generator_heads(config, has_mask_decoder)
    return config.changed(family=family, encoder=small, heads=token_heads, generator=None)


def _generator_heads(config: ModelConfig, has_mask_decoder: bool | None) -> tuple[AnyHead, ...]:
    """Return the model's own masked-token heads, or BERT's, with DeBERTa's mask decoder if it has no positions."""
    own = {head.kind: head for head in config.heads if head.kind in ("masked_tokens", "mask_decoder")}
    encoder, embedding = config.encoder, config.encoder.embedding
    if has_mask_decoder is None:
        lacks_positions = embedding.positions == "none" and encoder.layers[-1].mixer.reads_positions
        has_mask_decoder = "mask_decoder" in own if own else lacks_positions and encoder.other_walk is None
    plain = own.get("masked_tokens", MaskedTokensConfig(epsilon=embedding.epsilon))
    if not has_mask_decoder:
        return (plain,)
    return own.get("mask_decoder", MaskDecoderConfig(max_length=embedding.max_length)), plain


def _narrow_layer(layer: LayerConfig, width: int, narrow: int) -> LayerConfig:
    mixer, feedforward = layer.mixer, layer.feedforward
    return layer.changed(
        mixer=mixer.changed(heads=_scaled_heads(mixer, width, narrow)),
        feedforward=feedforward.changed(neurons=max(feedforward.groups, feedforward.neurons * narrow // width)),
    )


def _scaled_heads(mixer: MixerConfig, width: int, narrow: int) -> int:
    return max(1, mixer.heads * narrow // width)


def attach(model: Model, generator: Model, sharing: str) -> Model:
    """Return the folded model with a generator attached, tying the embeddings if `sharing` is "full"."""
    config = GeneratorConfig.parse({"model": generator.config.plain(), "sharing": sharing}, source="generator")
    model.config = model.config.changed(generator=config)
    model.generator = generator
    share(model)
    return model


@torch.no_grad()
def unfold(model: Model) -> Model:
    """Return the model in training form: the encoder's table is its difference from the generator's."""
    if model.config.generator is None or model.config.generator.sharing != "gradient_disentangled":
        return model
    if model.generator is not None and not model.encoder.embedding.is_difference:
        _own_table(model).sub_(model.generator.token_table)
        _set_table(model, "difference")
    return model


@torch.no_grad()
def fold(model: Model) -> Model:
    """Return the model in inference form: the encoder's table is the sum of both."""
    if model.given_table is not None:
        _own_table(model).add_(model.given_table)
        _set_table(model, "own")
    return model


def part_of(model: Model, part: Part) -> Model:
    """Return the encoder with its heads, folded, or the generator, as a model that shares the given model's weights.

    An unfolded model is not modified: its encoder's weights are copied.
    """
    if part == "generator":
        if model.generator is None:
            raise InputError("part is 'generator', but this model has none; allowed: 'encoder'")
        model.generator.tokenizer = model.tokenizer
        return model.generator
    if part != "encoder":
        raise InputError(f"part is {part!r}; allowed: 'encoder', 'generator'")
    if model.generator is None:
        return model
    if model.given_table is not None:
        model = fold(copy.deepcopy(model))
    without = Model(model.config.changed(generator=None), model.encoder, dict(model.heads.items()))
    without.tokenizer = model.tokenizer
    return without.train(model.training)


def _own_table(model: Model) -> torch.Tensor:
    table = model.encoder.embedding.token_table
    assert table is not None
    return table


def _set_table(model: Model, table: str) -> None:
    encoder = model.config.encoder
    model.config = model.config.changed(encoder=encoder.changed(embedding=encoder.embedding.changed(table=table)))
    model.encoder.embedding.is_difference = table == "difference"

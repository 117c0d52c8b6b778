"""The generator beside an encoder that learns to find its guesses: made, attached, and left behind again.

In training with gradient-disentangled embeddings the encoder's token table holds only its difference from the
generator's (He et al. 2023): `unfold` puts a model into that form, `fold` makes an ordinary model of it. Folders that
`load` reads always give folded models; only a run's own state is unfolded. `part_of` takes both apart for export.
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

_SHARES = {"deberta": (1.0, 0.5), "deberta-v2": (1.0, 0.5)}
"""Width and depth of a family's generators as shares of the encoder's; elsewhere a quarter as wide and as deep."""
_WIDENED = {"bert": "electra"}
"""The family of an encoder of this one on an embedding wider than itself."""


def generator_of(config: ModelConfig, *, width: float | None = None, depth: float | None = None) -> ModelConfig:
    """A generator for an encoder: its layers narrowed and their number lowered to these shares, its embedding as it is.

    Heads keep their width, so a quarter of the width is a quarter of the heads, at least one. Without shares they are
    those of the family's published generators.
    """
    if width is None and depth is None:
        width, depth = _SHARES.get(config.family, (0.25, 1.0))
    width, depth = (1.0 if given is None else given for given in (width, depth))
    for name, share_of_it in (("width", width), ("depth", depth)):
        if not 0 < share_of_it <= 1:
            raise InputError(f"generator {name} is {share_of_it}; allowed: a share above 0, up to 1")
    encoder = config.encoder
    heads = max(1, round(width * encoder.layers[0].mixer.heads))
    narrow = encoder.width * heads // encoder.layers[0].mixer.heads
    layers = tuple(_narrowed(layer, encoder.width, narrow) for layer in encoder.layers)
    kept = layers[: max(1, round(depth * len(layers)))]
    embedding = encoder.embedding.changed(width=encoder.embedding_width, table="own")
    small = encoder.changed(width=narrow, layers=kept, embedding=embedding)
    is_widened = small.embedding_width != narrow
    family = _WIDENED.get(config.family, config.family) if is_widened else config.family
    return config.changed(family=family, encoder=small, heads=_guessing(config), generator=None)


def _guessing(config: ModelConfig) -> tuple[AnyHead, ...]:
    """The heads with which a model like this one guesses tokens: its own, or BERT's and, without places, DeBERTa's."""
    own = tuple(head for head in config.heads if head.kind in ("masked_tokens", "mask_decoder"))
    if own:
        return own
    encoder, embedding = config.encoder, config.encoder.embedding
    plain = MaskedTokensConfig(epsilon=embedding.epsilon)
    is_placeless = embedding.positions == "none" and encoder.layers[-1].mixer.reads_positions
    if not is_placeless or encoder.universal is not None:
        return (plain,)
    return MaskDecoderConfig(max_length=embedding.max_length), plain


def _narrowed(layer: LayerConfig, width: int, narrow: int) -> LayerConfig:
    mixer, feedforward = layer.mixer, layer.feedforward
    return layer.changed(
        mixer=mixer.changed(heads=_scaled(mixer, width, narrow)),
        feedforward=feedforward.changed(neurons=max(feedforward.groups, feedforward.neurons * narrow // width)),
    )


def _scaled(mixer: MixerConfig, width: int, narrow: int) -> int:
    return max(1, mixer.heads * narrow // width)


def attach(model: Model, generator: Model, sharing: str) -> Model:
    """The model with a generator beside it, folded; with shared embeddings the generator reads the model's own."""
    kept = GeneratorConfig.parse({"model": generator.config.plain(), "sharing": sharing}, source="generator")
    model.config = model.config.changed(generator=kept)
    model.generator = generator
    share(model)
    return model


@torch.no_grad()
def unfold(model: Model) -> Model:
    """The model in the form in which it is trained: the encoder's table is its difference from the generator's."""
    if model.config.generator is None or model.config.generator.sharing != "gradient_disentangled":
        return model
    if model.generator is not None and not model.encoder.embedding.is_difference:
        _own_table(model).sub_(model.generator.token_table)
        _set_table(model, "difference")
    return model


@torch.no_grad()
def fold(model: Model) -> Model:
    """The model in the form in which it is used: the encoder's table is whole, the sum of both."""
    if model.given_table is not None:
        _own_table(model).add_(model.given_table)
        _set_table(model, "own")
    return model


def part_of(model: Model, part: Part) -> Model:
    """The encoder with its heads, folded, or its generator: each a model of its own, with the weights of the given one.

    A model in its training form stays in it: of that one the encoder's weights are copies.
    """
    if part == "generator":
        if model.generator is None:
            raise InputError("part is 'generator' and this model has none; allowed: 'encoder'")
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

"""From a config to a network: `build` for a fresh one, `extract` for a part of a trained one."""

import copy
from typing import Any

import torch
from torch import nn

from bertsmith.errors import InputError
from bertsmith.layers.block import Block
from bertsmith.layers.mixers.favor import FavorAttention
from bertsmith.layers.subnet import Subnet, is_even
from bertsmith.models.config import SHARED, EncoderConfig, LayerConfig, ModelConfig
from bertsmith.models.encoder import Encoder
from bertsmith.models.model import Model
from bertsmith.models.seq2seq import Seq2Seq
from bertsmith.models.universal import StepSignal, UniversalEncoder


def build(config: ModelConfig, *, seed: int | None = None) -> Model:
    """A model with fresh weights; the same seed gives the same weights (None: from PyTorch's global generator)."""
    model = assemble(config)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    initialise(model, config.encoder.deviation, generator)
    return model


def assemble(config: ModelConfig) -> Model:
    """The network of a config with weights that are not set yet, for those who fill them in."""
    last = config.decoder or config.encoder  # heads stand on the last stack
    heads = {head.kind: head.build(last.width, last.embedding_width, last.vocabulary) for head in config.heads}
    if config.decoder is None:
        return Model(config, _stack(config.encoder), heads)
    return Seq2Seq(config, _stack(config.encoder), _stack(config.decoder), heads)


@torch.no_grad()
def initialise(model: nn.Module, deviation: float, generator: torch.Generator | None = None) -> None:
    """BERT's first weights: matrices from a truncated normal, biases 0, norms 1.

    A part that needs others has a method `initialise(deviation, generator)`, which is called after the common rule.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            limit = 2 * deviation
            nn.init.trunc_normal_(parameter, std=deviation, a=-limit, b=limit, generator=generator)
        elif name.endswith("norm.weight"):
            nn.init.ones_(parameter)
        else:
            nn.init.zeros_(parameter)
    for module in model.modules():
        own = getattr(module, "initialise", None)
        if callable(own):
            own(deviation, generator)


def rebuild(model: Model, config: ModelConfig, *, seed: int = 0) -> Model:
    """The same weights in the network of another config, one that asks for the same parameters.

    Random matrices that the model does not have are drawn with the seed, those it has no more use for are dropped.
    """
    other = assemble(config).to(next(model.parameters()))
    refusal = "the weights of this model do not fit the config:"
    try:
        differing = other.load_state_dict(model.state_dict(), strict=False)
    except RuntimeError as error:
        raise InputError(f"{refusal} {str(error).splitlines()[1].strip()}") from None
    for name in (*differing.missing_keys, *differing.unexpected_keys):
        if not name.endswith(".projection"):
            raise InputError(f"{refusal} only one of them has {name}")
    generator = torch.Generator().manual_seed(seed)
    for name, module in other.named_modules():
        if isinstance(module, FavorAttention) and f"{name}.projection" in differing.missing_keys:
            module.initialise(config.encoder.deviation, generator)
    other.tokenizer = model.tokenizer
    return other.train(model.training)


def extract(model: Model, subnet: Subnet) -> Model:
    """The sub-network as an ordinary, smaller model with weights of its own; of a seq2seq model both stacks are cut."""
    config = model.config.changed(encoder=_cut_config(model.config.encoder, model.encoder, subnet))
    if isinstance(model, Seq2Seq):
        assert config.decoder is not None
        config = config.changed(decoder=_cut_config(config.decoder, model.decoder, subnet))
        small: Model = Seq2Seq(config, model.encoder.extract(subnet), model.decoder.extract(subnet), {})
    else:
        small = Model(config, model.encoder.extract(subnet), {})
    small.heads.update({kind: copy.deepcopy(head) for kind, head in model.heads.items()})
    small.tokenizer = model.tokenizer
    return small.train(model.training)


def _stack(config: EncoderConfig) -> Encoder:
    parts = (
        config.embedding.build(config.vocabulary, config.width),
        _blocks(config),
        config.final_norm.build(config.width) if config.final_norm else None,
        config.relative.build(config.width) if config.relative else None,
    )
    if config.universal is None:
        return Encoder(*parts)
    signal = StepSignal(config.embedding.longest, len(config.layers), config.width)
    halting = config.universal.halting
    return UniversalEncoder(*parts, signal=signal, halting=halting.build(config.width) if halting else None)


def _blocks(config: EncoderConfig) -> list[Block]:
    """The layers; the parts that `sharing` names are the first layer's in all of them."""
    blocks: list[Block] = []
    for layer in config.layers:
        shared = {name: getattr(blocks[0], name) for name in SHARED[config.sharing]} if blocks else {}
        blocks.append(_block(layer, config.width, shared))
    return blocks


def _block(layer: LayerConfig, width: int, shared: dict[str, nn.Module | None]) -> Block:
    make = {
        "mixer": lambda: layer.mixer.build(width),
        "mixer_norm": lambda: layer.norm.build(width),
        "cross": lambda: layer.cross.build(width) if layer.cross else None,
        "cross_norm": lambda: layer.norm.build(width) if layer.cross else None,
        "feedforward": lambda: layer.feedforward.build(width),
        "feedforward_norm": lambda: layer.norm.build(width),
        "branch": lambda: layer.branch.build(width) if layer.branch else None,
    }
    parts: dict[str, Any] = {name: shared[name] if name in shared else part() for name, part in make.items()}
    return Block(**parts, dropout=layer.dropout, is_pre_norm=layer.norm.placement == "pre")


def _cut_config(config: EncoderConfig, stack: Encoder, subnet: Subnet) -> EncoderConfig:
    layers, cuts = [], subnet.cuts(stack.units)
    for index, cut in cuts:
        layer = config.layers[index]
        mixer, feedforward = layer.mixer.cut(cut, config.width), layer.feedforward.cut(cut)
        cross = None if layer.cross is None else layer.cross.cut(cut, config.width)
        layers.append(layer.changed(mixer=mixer, cross=cross, feedforward=feedforward))
    return config.changed(layers=tuple(layers), sharing=config.sharing if is_even(cuts) else "none")

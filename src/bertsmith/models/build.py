"""Build a network from a config with `build`, or a smaller one from a trained model with `extract`."""

import copy

import torch
from torch import nn

from bertsmith.errors import InputError
from bertsmith.layers.block import Block
from bertsmith.layers.mixers.favor import FavorAttention
from bertsmith.layers.mixers.sparse import SparseWeights
from bertsmith.layers.subnet import Subnet, is_even
from bertsmith.models.config import EncoderConfig, LayerConfig, ModelConfig
from bertsmith.models.encoder import Encoder
from bertsmith.models.equilibrium import EquilibriumEncoder
from bertsmith.models.masks import masks_of, put_masks
from bertsmith.models.model import Model
from bertsmith.models.quantise import make_quantised
from bertsmith.models.reversible import ReversibleEncoder
from bertsmith.models.seq2seq import Seq2Seq
from bertsmith.models.universal import StepSignal, UniversalEncoder


def build(config: ModelConfig, *, seed: int | None = None) -> Model:
    """Return a model with fresh weights, reproducible by seed (None uses PyTorch's global generator)."""
    model = assemble(config)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    initialise(model, config.encoder.init_std, generator)
    decoder = config.decoder
    if isinstance(model, Seq2Seq) and decoder is not None and decoder.init_std != config.encoder.init_std:
        initialise(model.decoder, decoder.init_std, generator)
    if model.generator is not None and config.generator is not None:
        initialise(model.generator, config.generator.model.encoder.init_std, generator)
    scale_outputs(model)
    return model


def assemble(config: ModelConfig) -> Model:
    """Return the network of a config with uninitialised weights."""
    last = config.decoder or config.encoder  # heads read the last stack
    heads = {head.kind: head.build(last.width, last.embedding_width, last.vocabulary) for head in config.heads}
    if config.decoder is None:
        generator = None if config.generator is None else assemble(config.generator.model)
        model = Model(config, _stack(config.encoder), heads, generator)
        share(model)
        make_quantised(model)
        return model
    translator = Seq2Seq(config, _stack(config.encoder), _stack(config.decoder), heads)
    make_quantised(translator)
    return translator


def share(model: Model) -> None:
    """Tie the generator's embedding to the model's if `sharing` is "full"; its width projection stays separate."""
    if model.generator is None or model.config.generator is None or model.config.generator.sharing != "full":
        return
    own, others = model.encoder.embedding, model.generator.encoder.embedding
    others.token_table, others.type_table = own.token_table, own.type_table
    others.position, others.norm = own.position, own.norm


@torch.no_grad()
def initialise(model: nn.Module, init_std: float, generator: torch.Generator | None = None) -> None:
    """Initialise weights as BERT does: matrices from a truncated normal, biases 0, norms 1.

    A module with its own scheme has a method `initialise(init_std, generator)`, which is called afterwards.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            limit = 2 * init_std
            nn.init.trunc_normal_(parameter, std=init_std, a=-limit, b=limit, generator=generator)
        elif name.endswith("norm.weight"):
            nn.init.ones_(parameter)
        else:
            nn.init.zeros_(parameter)
    for module in model.modules():
        own = getattr(module, "initialise", None)
        if callable(own):
            own(init_std, generator)


@torch.no_grad()
def scale_outputs(model: Model) -> None:
    """Divide the n output projections of each stack with `scales_outputs` by √n."""
    stacks = [(model.encoder, model.config.encoder)]
    if isinstance(model, Seq2Seq) and model.config.decoder is not None:
        stacks.append((model.decoder, model.config.decoder))
    for stack, config in stacks:
        if config.scales_outputs:
            sublayers = [outputs for block in stack._blocks() for outputs in block.outputs]
            # a shared projection counts in every layer but is scaled once
            for output in dict.fromkeys(output for outputs in sublayers for output in outputs):
                output.weight.div_(len(sublayers) ** 0.5)
    if model.generator is not None:
        scale_outputs(model.generator)


def rebuild(model: Model, config: ModelConfig, *, seed: int = 0) -> Model:
    """Return a model with the same weights and another config, which must have the same parameters.

    Missing random feature matrices are drawn with the seed, a missing α of sparse attention starts at 1.5; unused ones
    are dropped.
    """
    other = assemble(config).to(next(model.parameters()))
    message = "the weights of this model do not fit the config:"
    try:
        differing = other.load_state_dict(model.state_dict(), strict=False)
    except RuntimeError as error:
        raise InputError(f"{message} {str(error).splitlines()[1].strip()}") from None
    for name in (*differing.missing_keys, *differing.unexpected_keys):
        if not name.endswith((".projection", ".alpha_logits")):
            raise InputError(f"{message} only one of them has {name}")
    generator, lacking = torch.Generator().manual_seed(seed), {key.rpartition(".")[0] for key in differing.missing_keys}
    for name, module in other.named_modules():
        if isinstance(module, FavorAttention | SparseWeights) and name in lacking:
            module.initialise(config.encoder.init_std, generator)
    put_masks(other, masks_of(model))
    other.tokenizer = model.tokenizer
    return other.train(model.training)


def extract(model: Model, subnet: Subnet) -> Model:
    """Return the sub-network as an ordinary, smaller model with its own weights.

    Both stacks of a seq2seq model are cut. A generator is dropped, and so are exits if layers are removed.
    """
    encoder, quantisation = _cut_config(model.config.encoder, model.encoder, subnet), model.config.quantisation
    if quantisation is not None:
        depth = len(model.config.encoder.layers)
        kept = subnet.kept_layers(depth)
        if model.config.decoder is not None:
            kept = (*kept, *(depth + index for index in subnet.kept_layers(len(model.config.decoder.layers))))
        quantisation = quantisation.with_layers(kept)
    is_whole = len(encoder.layers) == len(model.config.encoder.layers)
    heads = tuple(head for head in model.config.heads if is_whole or head.kind not in ("exits", "decoder_exits"))
    decoder = model.config.decoder
    if isinstance(model, Seq2Seq) and decoder is not None:
        decoder = _cut_config(decoder, model.decoder, subnet)
    config = model.config.changed(
        encoder=encoder, decoder=decoder, heads=heads, generator=None, quantisation=quantisation
    )
    if isinstance(model, Seq2Seq):
        small: Model = Seq2Seq(config, model.encoder.extract(subnet), model.decoder.extract(subnet), {})
    else:
        small = Model(config, model.encoder.extract(subnet), {})
    small.heads.update({head.kind: copy.deepcopy(model.heads[head.kind]) for head in config.heads})
    small.tokenizer = model.tokenizer
    return small.train(model.training)


def _stack(config: EncoderConfig) -> Encoder:
    parts = (
        config.embedding.build(config.vocabulary, config.width),
        _blocks(config),
        config.final_norm.build(config.width) if config.final_norm else nn.Identity(),
        config.relative.build(config.width) if config.relative else None,
    )
    if config.reversible:
        return ReversibleEncoder(*parts)
    if config.equilibrium is not None:
        return EquilibriumEncoder(*parts, settings=config.equilibrium)
    if config.universal is None:
        return Encoder(*parts, layer_drop=config.layer_drop)
    signal = StepSignal(config.embedding.max_length, len(config.layers), config.width)
    halting = config.universal.halting
    return UniversalEncoder(*parts, signal=signal, halting=halting.build(config.width) if halting else None)


def _blocks(config: EncoderConfig) -> list[Block]:
    """Return all layers; shared modules are created once, in the first layer."""
    first = _block(config.layers[0], config.width)
    mixing = first if config.shares_mixer else None
    feeding = first if config.shares_feedforward else None
    return [first, *(_block(layer, config.width, mixing, feeding) for layer in config.layers[1:])]


def _block(layer: LayerConfig, width: int, mixing: Block | None = None, feeding: Block | None = None) -> Block:
    """Return one layer; `mixing` and `feeding` are blocks whose mixers and feed-forward it shares."""
    if mixing is None:
        mixer, mixer_norm = layer.mixer.build(width), _mixer_norm(layer, width)
        cross = None if layer.cross is None else (layer.cross.build(width), layer.norm.build(width))
    else:
        mixer, mixer_norm, cross = mixing.mixer, mixing.mixer_norm, mixing.cross_sublayer
    if feeding is None:
        feedforward, feedforward_norm = layer.feedforward.build(width), layer.norm.build(width)
    else:
        feedforward, feedforward_norm = feeding.feedforward, feeding.feedforward_norm
    if mixing is not None and feeding is not None:
        branch = mixing.branch
    else:
        branch = None if layer.branch is None else layer.branch.build(width, is_causal=layer.mixer.is_causal)
    return Block(
        mixer,
        feedforward,
        mixer_norm,
        feedforward_norm,
        dropout=layer.dropout,
        is_pre_norm=layer.norm.placement == "pre",
        cross=cross,
        branch=branch,
    )


def _mixer_norm(layer: LayerConfig, width: int) -> nn.Module:
    return layer.norm.build(width) if layer.has_mixer_norm else nn.Identity()


def _cut_config(config: EncoderConfig, stack: Encoder, subnet: Subnet) -> EncoderConfig:
    layers, cuts = [], subnet.cuts(stack.units)
    for index, cut in cuts:
        layer = config.layers[index]
        mixer, feedforward = layer.mixer.cut(cut, config.width), layer.feedforward.cut(cut)
        cross = None if layer.cross is None else layer.cross.cut(cut, config.width)
        layers.append(layer.changed(mixer=mixer, cross=cross, feedforward=feedforward))
    return config.changed(layers=tuple(layers), sharing=config.sharing if is_even(cuts) else "none")

"""From a config to a network: `build` for a fresh one, `extract` for a part of a trained one."""

import copy

import torch
from torch import nn

from bertsmith.layers.block import Block
from bertsmith.layers.subnet import Subnet
from bertsmith.models.config import EncoderConfig, LayerConfig, ModelConfig
from bertsmith.models.encoder import Encoder
from bertsmith.models.model import Model


def build(config: ModelConfig, *, seed: int | None = None) -> Model:
    """A model with fresh weights; the same seed gives the same weights (None: from PyTorch's global generator)."""
    model = assemble(config)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    initialise(model, config.encoder.deviation, generator)
    return model


def assemble(config: ModelConfig) -> Model:
    """The network of a config with weights that are not set yet, for those who fill them in."""
    encoder = config.encoder
    blocks = [_block(layer, encoder.width) for layer in encoder.layers]
    final_norm = encoder.final_norm.build(encoder.width) if encoder.final_norm else None
    embedding = encoder.embedding.build(encoder.vocabulary, encoder.width)
    heads = {head.kind: head.build(encoder.width, encoder.embedding_width, encoder.vocabulary) for head in config.heads}
    return Model(config, Encoder(embedding, blocks, final_norm), heads)


@torch.no_grad()
def initialise(model: nn.Module, deviation: float, generator: torch.Generator | None = None) -> None:
    """BERT's first weights: matrices from a truncated normal, biases 0, norms 1."""
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            limit = 2 * deviation
            nn.init.trunc_normal_(parameter, std=deviation, a=-limit, b=limit, generator=generator)
        elif name.endswith("norm.weight"):
            nn.init.ones_(parameter)
        else:
            nn.init.zeros_(parameter)


def extract(model: Model, subnet: Subnet) -> Model:
    """The sub-network as an ordinary, smaller model with weights of its own."""
    small = Model(_cut_config(model, subnet), model.encoder.extract(subnet), {})
    small.heads.update({kind: copy.deepcopy(head) for kind, head in model.heads.items()})
    small.tokenizer = model.tokenizer
    return small.train(model.training)


def _block(layer: LayerConfig, width: int) -> Block:
    return Block(
        layer.mixer.build(width),
        layer.feedforward.build(width),
        layer.norm.build(width),
        layer.norm.build(width),
        dropout=layer.dropout,
        is_pre_norm=layer.norm.placement == "pre",
    )


def _cut_config(model: Model, subnet: Subnet) -> ModelConfig:
    encoder: EncoderConfig = model.config.encoder
    layers = []
    for index, cut in subnet.cuts(model.encoder.units):
        layer = encoder.layers[index]
        parts = {"mixer": layer.mixer.cut(cut, encoder.width), "feedforward": layer.feedforward.cut(cut)}
        layers.append(layer.model_copy(update=parts))
    return model.config.model_copy(update={"encoder": encoder.model_copy(update={"layers": tuple(layers)})})

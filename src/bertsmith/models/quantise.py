"""A model whose layers round as integers would (layers/quantised.py), from one that does not, and back."""

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from bertsmith.errors import InputError
from bertsmith.layers.embedding import Embedding, TokenRows
from bertsmith.layers.feedforward import FeedForward
from bertsmith.layers.linear import ElasticLinear, GroupedLinear
from bertsmith.layers.mixers.base import QueryKeyValueMixer
from bertsmith.layers.mixers.kernels import DepthwiseKernel, FixedKernel
from bertsmith.layers.quantised import (
    QuantisationConfig,
    QuantisedGroupedLinear,
    QuantisedLinear,
    QuantisedRows,
    RangeKind,
    Ranges,
    WeightRounding,
)
from bertsmith.models.model import Model

Make = Callable[[str, nn.Module, nn.Module], nn.Module]
"""What takes the place of a part, from its name, what holds it, and the part itself; that part if it stays."""


def quantised(model: Model, config: QuantisationConfig) -> Model:
    """A copy of a model that rounds as the config says; activations from the first batch on that passes in training.

    Let batches pass under `measuring` to give activations their ranges without training.
    """
    copied = dequantised(model)
    copied.config = copied.config.changed(quantisation=config)
    make_quantised(copied)
    return copied


def dequantised(model: Model) -> Model:
    """A copy of a model without rounding: the weights are those that were rounded whenever they were used."""
    copied = copy.deepcopy(model)
    copied.config = copied.config.changed(quantisation=None)
    swap(copied, lambda _, __, part: _plain(part))
    return copied.train(model.training)


def make_quantised(model: Model) -> None:
    """Puts rounding layers in the place of a model's own where its config says so."""
    config = model.config.quantisation
    if config is None:
        return
    plain_embeddings, layers = WeightRounding(config, config.embedding_bits), len(model.config.encoder.layers)

    def make(name: str, parent: nn.Module, part: nn.Module) -> nn.Module:
        bits = _bits(config, name, layers)
        if isinstance(part, ElasticLinear) and not is_kernel(parent):
            # queries, keys and values enter products with each other
            rounds_outputs = isinstance(parent, QueryKeyValueMixer) and part.units_out is not None
            return QuantisedLinear(part, config, bits, rounds_outputs=rounds_outputs)
        if isinstance(part, GroupedLinear) and isinstance(parent, FeedForward):
            return QuantisedGroupedLinear(part, config, bits, units=parent.neurons)
        if isinstance(part, TokenRows) and isinstance(parent, Embedding) and parent.token_table is not None:
            return QuantisedRows(plain_embeddings, scores=name == model.config.scored_rows)
        return part  # a decoder without a table of its own reads rounded vectors

    swap(model, make)
    for part in model.modules():
        if isinstance(part, Ranges):
            part.to(next(model.parameters()))
    model.train(model.training)


def is_kernel(part: nn.Module) -> bool:
    """Whether the matrix of this part is the taps of a convolution, which multiply no states."""
    return isinstance(part, FixedKernel | DepthwiseKernel)


def swap(model: nn.Module, make: Make) -> None:
    """Puts what is made of a model's parts into their places; a part that stands in several is made once."""
    made: dict[nn.Module, nn.Module] = {}
    for path, parent in list(model.named_modules()):
        for name, part in list(parent.named_children()):
            if part not in made:
                made[part] = make(f"{path}.{name}", parent, part)
            if made[part] is not part:
                setattr(parent, name, made[part])


@contextmanager
def measuring(model: Model, kind: RangeKind = "mean_max") -> Iterator[None]:
    """Inside, every batch that passes adds to the ranges of activations, which are those of these batches alone.

    mean_max: the mean over batches of the largest |activation|. kl: the threshold at which clipping and rounding lose
    least information, from a histogram of all values; inputs of a few far spikes stay in floating point.
    """
    ranges = [part for part in model.modules() if isinstance(part, Ranges)]
    if not ranges:
        raise InputError("this model rounds no activations, so there is nothing to measure; quantise it first")
    was_training = model.training
    for part in ranges:
        part.limits.zero_()
        part.counts = torch.zeros_like(part.limits)
        part.histograms = {} if kind == "kl" else None
    model.eval()
    try:
        yield
    finally:
        for part in ranges:
            part.take_thresholds()
            part.counts = part.histograms = None
        model.train(was_training)


def _plain(part: nn.Module) -> nn.Module:
    if isinstance(part, QuantisedLinear | QuantisedGroupedLinear):
        return part.plain()
    return TokenRows() if isinstance(part, QuantisedRows) else part


def _bits(config: QuantisationConfig, name: str, encoder_layers: int) -> int:
    """The bits of a matrix by where it stands; the decoder's layers follow the encoder's."""
    layer = re.match(r"(encoder|decoder)\.blocks\.(\d+)\.", name)
    if config.layer_bits is None or layer is None:
        return config.weight_bits
    return config.layer_bits[int(layer[2]) + (encoder_layers if layer[1] == "decoder" else 0)]

"""Convert a model to simulated quantisation (layers/quantised.py) and back."""

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from bertsmith.errors import InputError
from bertsmith.layers.elementwise import Norm
from bertsmith.layers.embedding import Embedding, EmbeddingRounding, TokenRows
from bertsmith.layers.feedforward import FeedForward
from bertsmith.layers.linear import ElasticLinear, GroupedLinear
from bertsmith.layers.mixers.base import QueryKeyValueMixer
from bertsmith.layers.mixers.full import FullAttention
from bertsmith.layers.quantised import (
    QuantisationConfig,
    QuantisedGroupedLinear,
    QuantisedLinear,
    QuantisedRows,
    RangeKind,
    Ranges,
    WeightRounding,
)
from bertsmith.layers.rounded import RoundedEmbedding, RoundedNorm, RoundedSoftmax
from bertsmith.models.masks import refuse_masks
from bertsmith.models.model import Model
from bertsmith.models.swapping import multiplies_no_states, swap


def quantised(model: Model, config: QuantisationConfig) -> Model:
    """Return a copy with simulated quantisation; activation ranges are initialised by the first training batch.

    Run batches under `measuring` to calibrate the ranges without training.
    """
    refuse_masks(model, "quantisation-aware training")
    copied = dequantised(model)
    copied.config = copied.config.changed(quantisation=config)
    make_quantised(copied)
    return copied


def dequantised(model: Model) -> Model:
    """Return a copy without quantisation, with the full-precision weights."""
    copied = copy.deepcopy(model)
    copied.config = copied.config.changed(quantisation=None)
    swap(copied, lambda _, __, part: _plain(part))
    for mixer in _attention_mixers(copied):
        mixer.softmax = None
    return copied.train(model.training)


def make_quantised(model: Model) -> None:
    """Replace layers by their quantised versions if the config has `quantisation`."""
    config = model.config.quantisation
    if config is None:
        return
    embedding_rounding, layers = WeightRounding(config, config.embedding_bits), len(model.config.encoder.layers)

    def make(name: str, parent: nn.Module, part: nn.Module) -> nn.Module:
        bits = _bits(config, name, layers)
        if isinstance(part, ElasticLinear) and not multiplies_no_states(parent, part):
            return _quantised_linear(config, bits, parent, part)
        if isinstance(part, GroupedLinear) and isinstance(parent, FeedForward):
            return QuantisedGroupedLinear(part, config, bits, units=parent.neurons)
        if isinstance(part, TokenRows) and isinstance(parent, Embedding) and parent.token_table is not None:
            # with places = "all", the scored hidden states are the rounded outputs of a norm
            is_scored = name == model.config.scored_rows and config.places == "linear"
            return QuantisedRows(embedding_rounding, scores=is_scored)
        if config.places == "all" and isinstance(part, Norm):
            return RoundedNorm(part, config, bits)
        if config.places == "all" and isinstance(part, EmbeddingRounding):
            return RoundedEmbedding(config)
        return part  # a decoder without a table of its own reads rounded vectors

    swap(model, make)
    if config.places == "all":
        for mixer in _attention_mixers(model):
            mixer.softmax = RoundedSoftmax(config, mixer.heads)
    for part in model.modules():
        if isinstance(part, Ranges):
            part.to(next(model.parameters()))
    model.train(model.training)


@contextmanager
def measuring(model: Model, kind: RangeKind = "mean_max") -> Iterator[None]:
    """Calibrate activation ranges: inside the context they are measured on all batches that are run.

    mean_max: the mean over batches of the largest |activation|. kl: the threshold at which clipping and rounding lose
    least information, from a histogram of all values; inputs of a few far spikes stay in floating point.
    """
    ranges = [part for part in model.modules() if isinstance(part, Ranges)]
    if not ranges:
        raise InputError("this model has no quantised activations to measure; quantise it first")
    if kind == "kl" and any(part.lows is not None for part in ranges):
        raise InputError("kind is 'kl', but the model has quantisation.form = 'affine'; allowed: 'mean_max'")
    was_training = model.training
    for part in ranges:
        part.reset(kind)
    model.eval()
    try:
        yield
    finally:
        for part in ranges:
            part.take_thresholds()
            part.counts = part.histograms = None
        model.train(was_training)


def _quantised_linear(config: QuantisationConfig, bits: int, parent: nn.Module, part: ElasticLinear) -> QuantisedLinear:
    # queries, keys and values are operands of the attention products
    is_projection = isinstance(parent, QueryKeyValueMixer) and part.units_out is not None
    if config.places == "linear":
        return QuantisedLinear(part, config, bits, rounds_outputs=is_projection)
    is_expansion = isinstance(parent, FeedForward) and part is parent.expand
    return QuantisedLinear(
        part,
        config,
        bits,
        # a second range would round the rounded output of a norm again
        rounds_inputs=not (is_projection or is_expansion or isinstance(parent, Embedding)),
        rounds_outputs=isinstance(parent, QueryKeyValueMixer | FeedForward | Embedding) and not is_expansion,
        has_positive_inputs=isinstance(parent, FeedForward) and parent.activation == "relu" and not parent.is_gated,
    )


def _attention_mixers(model: Model) -> list[FullAttention]:
    return [part for part in model.modules() if isinstance(part, FullAttention)]


def _plain(part: nn.Module) -> nn.Module:
    if isinstance(part, QuantisedLinear | QuantisedGroupedLinear | RoundedNorm):
        return part.plain()
    if isinstance(part, RoundedEmbedding):
        return EmbeddingRounding()
    return TokenRows() if isinstance(part, QuantisedRows) else part


def _bits(config: QuantisationConfig, name: str, encoder_layers: int) -> int:
    """Return the bits of a matrix from its module path; the decoder's layers follow the encoder's."""
    layer = re.match(r"(encoder|decoder)\.blocks\.(\d+)\.", name)
    if config.layer_bits is None or layer is None:
        return config.weight_bits
    return config.layer_bits[int(layer[2]) + (encoder_layers if layer[1] == "decoder" else 0)]

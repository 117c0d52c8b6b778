"""Rounding of the tensors between linear layers (Prato et al. 2020): sum of embeddings, parts of norms and softmax."""

import copy
from functools import partial

import torch
from torch import Tensor, nn

from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.layers.elementwise import Norm
from bertsmith.layers.embedding import EmbeddingRounding
from bertsmith.layers.quantised import QuantisationConfig, Ranges, WeightRounding
from bertsmith.ops.rounded_softmax import SoftmaxRounding


class RoundedEmbedding(EmbeddingRounding):
    """Rounds position and type tables like weights, and the sum of all vectors like activations."""

    def __init__(self, config: QuantisationConfig) -> None:
        super().__init__()
        self.rounding = WeightRounding(config, config.embedding_bits)
        self.summed = Ranges.of(config)

    def forward(self, vectors: Tensor, layout: SequenceLayout) -> Tensor:
        if self.summed.is_observing and layout.is_token is not None:
            raise InputError(
                "the batch is padded, and padding would widen the ranges of activations; use layout = 'packed'"
            )
        return self.summed(vectors)

    def table(self, table: Tensor) -> Tensor:
        return self.rounding(table)


class RoundedNorm(Norm):
    """A norm whose gain, differences from the mean, standard deviations, quotients and outputs are rounded."""

    def __init__(self, plain: Norm, config: QuantisationConfig, bits: int) -> None:
        super().__init__(len(plain.weight), plain.epsilon, plain.kind, has_bias=plain.bias is not None)
        self.weight, self.bias = plain.weight, plain.bias
        self.rounding = WeightRounding(config, bits)
        self.centred = Ranges.of(config) if self.kind == "layer" else None
        self.deviation, self.quotient, self.leaving = Ranges.of(config), Ranges.of(config), Ranges.of(config)

    def plain(self) -> Norm:
        """Return the norm without rounding, with the same weights."""
        plain = Norm(len(self.weight), self.epsilon, self.kind, has_bias=self.bias is not None)
        plain.weight, plain.bias = self.weight, self.bias
        return plain

    def _normalised(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        centred = wide if self.centred is None else wide - wide.mean(-1, keepdim=True)
        deviation = self.deviation((centred.square().mean(-1, keepdim=True) + self.epsilon).sqrt())
        quotient = self.quotient((centred if self.centred is None else self.centred(centred)) / deviation)
        scaled = quotient * self.rounding(weight[None])[0]  # (width,) -> (1, width): one range
        return self.leaving(scaled if bias is None else scaled + bias).to(hidden.dtype)


class RoundedSoftmax(nn.Module):
    """Ranges of the parts of a softmax, for every number of kept heads; the minimum of all but the sums is 0."""

    def __init__(self, config: QuantisationConfig, heads: int) -> None:
        super().__init__()
        self.numerators = Ranges.of(config, units=heads, is_positive=True)
        self.denominators = Ranges.of(config, units=heads)
        self.weights = Ranges.of(config, units=heads, is_positive=True)

    def forward(self, keep_heads: int | None) -> SoftmaxRounding:
        """Return the rounding for the first heads; None for all."""

        def rounding(ranges: Ranges, tensor: Tensor, where: Tensor) -> Tensor:
            return ranges(tensor, keep=keep_heads, where=where)

        parts = (self.numerators, self.denominators, self.weights)
        return SoftmaxRounding(*(partial(rounding, ranges) for ranges in parts))

    def extract(self, heads: int) -> "RoundedSoftmax":
        """Return a new module with the ranges of the first heads."""
        small = copy.deepcopy(self)
        small.numerators = self.numerators.extract(heads)
        small.denominators = self.denominators.extract(heads)
        small.weights = self.weights.extract(heads)
        return small

"""Layers for quantisation-aware training: they compute the values of b-bit integers in floating point.

Quantisation is symmetric: codes are integers from -M to M, M = 2^(b-1) - 1, and a code times the step, range / M, is
the value (Zafrir et al. 2019, Q8BERT). docs/how-to/quantisation.md lists the quantised tensors.
"""

from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.functional import embedding

from bertsmith.layers.embedding import TokenRows
from bertsmith.layers.linear import ALL_UNITS, ElasticLinear, GroupedLinear, WeightSlice
from bertsmith.settings import Record

_BITS = range(2, 9)


class QuantisationConfig(Record):
    """Quantisation of weights and activations; the defaults are Q8BERT's."""

    weight_bits: int = Field(default=8, ge=_BITS.start, lt=_BITS.stop)
    """Bits of the weights of all linear layers, including the model's head."""
    layer_bits: tuple[int, ...] | None = None
    """Bits of the weights of each encoder layer, then of each decoder layer, instead of one number for all (Q-BERT)."""
    embedding_bits: int = Field(default=8, ge=_BITS.start, lt=_BITS.stop)
    """Bits of the token table."""
    activation_bits: int = Field(default=8, ge=_BITS.start, le=16)
    """Bits of the inputs of linear layers, and of queries, keys and values."""
    rounds_activations: bool = True
    """Quantise activations, too, not only weights."""
    weight_ranges: Literal["matrix", "row", "group"] = "matrix"
    """Weights that share a range, the largest |weight|: a whole matrix (Q8BERT), a row, or a group of rows (Q-BERT)."""
    groups: int = Field(default=128, gt=0)
    """Groups of consecutive rows per matrix, with weight_ranges = "group"."""
    decay: float = Field(default=0.9999, ge=0, lt=1)
    """Decay of the moving average of the largest |activation|, the range of activations."""

    @model_validator(mode="after")
    def _check_layer_bits(self) -> "QuantisationConfig":
        for bits in self.layer_bits or ():
            if bits not in _BITS:
                raise ValueError(f"layer_bits has {bits}; allowed: {_BITS.start} to {_BITS.stop - 1}")
        return self

    def with_layers(self, layers: tuple[int, ...]) -> "QuantisationConfig":
        """Return the config of an encoder that keeps only these layers."""
        if self.layer_bits is None:
            return self
        return self.changed(layer_bits=tuple(self.layer_bits[index] for index in layers))


def highest_code(bits: int) -> int:
    """Return M, the largest code of this many bits; the smallest is -M."""
    return 2 ** (bits - 1) - 1


def step_of(limit: Tensor, bits: int) -> Tensor:
    """Return the quantisation step of values from -limit to limit; 1 where the limit is 0."""
    return torch.where(limit > 0, limit / highest_code(bits), 1.0)


def codes_of(tensor: Tensor, step: Tensor, bits: int) -> Tensor:
    """Return the nearest codes, rounding halves to even, as floating-point numbers."""
    highest = highest_code(bits)
    return (tensor / step).round().clamp(-highest, highest)


def fake_quantise(tensor: Tensor, limit: Tensor, bits: int) -> Tensor:
    """Quantise and dequantise, with the straight-through gradient.

    Values with a limit of 0 stay unchanged. Shape: limit must broadcast over the tensor.
    """
    if torch.is_grad_enabled() and tensor.requires_grad:
        result: Tensor = _StraightThrough.apply(tensor, limit, bits)
        return result
    return _quantise_dequantise(tensor, limit, bits)


def _quantise_dequantise(tensor: Tensor, limit: Tensor, bits: int) -> Tensor:
    wide = tensor.float() if tensor.dtype.itemsize < 4 else tensor  # half precision is too coarse to divide by the step
    step = step_of(limit, bits)
    rounded = torch.where(limit > 0, codes_of(wide, step, bits) * step, wide)
    # no `to` without effect: in compiled code such an output of an autograd function has no gradient (PyTorch 2.11)
    return rounded if rounded.dtype == tensor.dtype else rounded.to(tensor.dtype)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, limit: Tensor, bits: int) -> Tensor:
        return _quantise_dequantise(tensor, limit, bits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


class WeightRounding:
    """Quantisation of one matrix: its bits and the rows that share a range."""

    def __init__(self, config: QuantisationConfig, bits: int) -> None:
        self.config, self.bits = config, bits

    def limits(self, rows: Tensor) -> Tensor:
        """Return the range of every row: (rows, columns) -> (rows, 1)."""
        largest = rows.detach().abs().amax(1)
        groups = {"matrix": 1, "row": len(rows), "group": min(self.config.groups, len(rows))}
        count = groups[self.config.weight_ranges]
        index = torch.arange(len(rows), device=rows.device) * count // len(rows)
        shared = largest.new_zeros(count).scatter_reduce(0, index, largest, "amax")
        return shared[index][:, None]

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the quantised and dequantised matrix."""
        return fake_quantise(rows, self.limits(rows), self.bits)


RangeKind = Literal["mean_max", "kl"]
FLOAT = -1.0
"""Range of activations that stay in floating point on purpose; 0 stands for a range that was never measured."""


class Histogram:
    """Counts of |value| in equal bins; the range doubles when a larger value comes."""

    BINS = 2048
    SPARSE_BINS, SPARSE_SHARE = 0.01, 0.999

    def __init__(self) -> None:
        self.counts = np.zeros(self.BINS)
        self.limit = 0.0

    def add(self, values: Tensor) -> None:
        """Count some values."""
        sizes = values.float().abs().flatten().cpu().numpy()
        largest = float(sizes.max(initial=0.0))
        self.limit = self.limit or largest
        while largest > self.limit:
            merged = self.counts.reshape(-1, 2).sum(1)
            self.counts = np.concatenate([merged, np.zeros(self.BINS // 2)])
            self.limit *= 2
        if self.limit:
            self.counts += np.histogram(sizes, self.BINS, (0.0, self.limit))[0]

    @property
    def is_sparse(self) -> bool:
        """Whether nearly all values lie in very few bins and the rest far away, so that 8 bits would lose them."""
        used = int(self.SPARSE_BINS * self.BINS)
        return bool(np.sort(self.counts)[-used:].sum() > self.SPARSE_SHARE * self.counts.sum())

    def kl_threshold(self, bits: int) -> float:
        """Return the clipping threshold of least KL divergence between the values and their quantised form."""
        levels = highest_code(bits) + 1
        used = int(np.flatnonzero(self.counts).max(initial=0)) + 1
        candidates = range(min(levels, used), used + 1)
        losses = [_clipping_loss(self.counts, size, levels) for size in candidates]
        best = candidates[int(np.argmin(losses))]
        return float(min(best + 0.5, used) * self.limit / self.BINS)


def _clipping_loss(counts: np.ndarray, size: int, levels: int) -> float:
    """KL divergence between the first bins, which get all larger values, and the same bins merged to few levels."""
    inside = counts[:size]
    clipped = inside.copy()
    clipped[-1] += counts[size:].sum()
    starts = np.unique(np.arange(levels) * size // levels)
    widths = np.diff(np.append(starts, size))
    is_used = inside > 0
    mass = np.add.reduceat(inside, starts)
    filled = np.add.reduceat(is_used.astype(float), starts)
    spread = np.repeat(mass / np.maximum(filled, 1), widths) * is_used
    if not spread.any():
        return np.inf
    p, q = clipped / clipped.sum(), spread / spread.sum()
    is_missing = (q == 0) & (p > 0)
    smoothing = 1e-4
    q = np.where(is_missing, smoothing, np.where(q > 0, q - smoothing * is_missing.sum() / (q > 0).sum(), 0.0))
    is_there = p > 0
    if (q[is_there] <= 0).any():
        q = np.maximum(q, 1e-12)
    return float((p[is_there] * np.log(p[is_there] / q[is_there])).sum())


class Ranges(nn.Module):
    """Fake quantisation of activations by a moving average of the largest |activation|.

    Every number of kept units has its own range, because the activations of a narrower sub-network differ. A width that
    was never seen uses the range of the whole layer; if that was never seen either, nothing is quantised. `uses` counts
    the different inputs of one layer, `parts` the tensors that are concatenated in one. Ranges are updated in training
    mode; under `measuring` (models/quantise.py) they are means over all batches.
    Shape: limits (uses, parts, units + 1); the last entry is the whole layer's.
    """

    limits: Tensor

    def __init__(self, uses: int, parts: int, units: int, bits: int, decay: float) -> None:
        super().__init__()
        self.bits, self.decay = bits, decay
        self.register_buffer("limits", torch.zeros(uses, parts, units + 1))
        self.counts: Tensor | None = None
        self.histograms: dict[tuple[int, int, int], Histogram] | None = None

    def forward(self, tensor: Tensor, use: int = 0, parts: slice | None = None, keep: int | None = None) -> Tensor:
        """Return the fake-quantised activations, (…, parts · channels), of a layer that keeps this many units."""
        index = (use, slice(None) if parts is None else parts, -1 if keep is None else keep)
        count = self.limits[index].shape[0]
        by_part = tensor.unflatten(-1, (count, -1))  # (…, parts · channels) -> (…, parts, channels)
        if (self.training or self.counts is not None) and tensor.numel():
            self._observe(by_part, index)
        return fake_quantise(by_part, self.effective_limits(use, keep)[index[1], None], self.bits).flatten(-2)

    def effective_limits(self, use: int = 0, keep: int | None = None) -> Tensor:
        """Return the ranges of all parts for a number of kept units, (parts,)."""
        measured = self.limits[use, :, -1 if keep is None else keep]
        limits = torch.where(measured != 0, measured, self.limits[use, :, -1])
        # a call for some parts that was never measured, such as `absorb` of self-attention, has the input of all parts
        return limits if use == 0 else torch.where(limits != 0, limits, self.effective_limits(0, keep))

    @torch.no_grad()
    def _observe(self, by_part: Tensor, index: tuple[int, slice, int]) -> None:
        largest = by_part.detach().abs().amax(-1).flatten(0, -2).amax(0).to(self.limits.dtype)  # (parts,)
        average = self.limits[index]
        if self.counts is None:
            share = torch.where(average > 0, torch.full_like(average, 1 - self.decay), 1.0)
        else:
            self.counts[index] += 1
            share = 1 / self.counts[index]
            self._count(by_part, index)
        average.add_(share * (largest - average))

    def _count(self, by_part: Tensor, index: tuple[int, slice, int]) -> None:
        """Add the values of each part to its histogram, where there are histograms."""
        if self.histograms is None:
            return
        use, parts, keep = index
        numbers = range(self.limits.shape[1])[parts]
        for number, values in zip(numbers, by_part.detach().flatten(0, -3).unbind(-2), strict=True):
            self.histograms.setdefault((use, number, keep), Histogram()).add(values)

    def take_thresholds(self) -> None:
        """Replace the ranges by the thresholds of the histograms, where there are histograms."""
        for index, histogram in (self.histograms or {}).items():
            self.limits[index] = FLOAT if histogram.is_sparse else histogram.kl_threshold(self.bits)

    @torch.no_grad()
    def extract(self, keep: int | None) -> "Ranges":
        """Return the ranges of an extracted layer with this many units; the last entry is the range of that width."""
        uses, parts, entries = self.limits.shape
        units = entries - 1 if keep is None else keep
        small = Ranges(uses, parts, units, self.bits, self.decay)
        small.limits = self.limits[..., : units + 1].clone()
        small.limits[..., -1] = torch.stack([self.effective_limits(use, keep) for use in range(uses)])
        return small.train(self.training)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        before = self.limits
        super()._apply(fn, recurse)
        if self.limits.dtype.itemsize < 4:  # weights are cast to half precision; ranges keep their dtype
            self.limits = before.to(self.limits.device)
        return self


class QuantisedLinear(ElasticLinear):
    """An elastic layer with fake-quantised weights and inputs and, optionally, outputs."""

    def __init__(self, plain: ElasticLinear, config: QuantisationConfig, bits: int, *, rounds_outputs: bool) -> None:
        super().__init__(
            plain.inputs,
            plain.outputs,
            units_in=plain.units_in,
            units_out=plain.units_out,
            parts=plain.parts,
            parts_in=plain.parts_in,
            bias=plain.biased,
        )
        self.weight, self.bias = plain.weight, plain.bias
        self.rounding = WeightRounding(config, bits)
        # calls for all parts are use 0, calls for some parts 1 + the first of them: their inputs may differ
        uses, units = (1 if plain.parts == 1 else plain.parts + 1), plain.units_in or plain.units_out or 0
        has_ranges, options = config.rounds_activations, (units, config.activation_bits, config.decay)
        self.entering = Ranges(uses, 1, *options) if has_ranges else None
        self.leaving = Ranges(uses, plain.parts, *options) if has_ranges and rounds_outputs else None

    def forward(self, hidden: Tensor, used: WeightSlice = ALL_UNITS) -> Tensor:
        use, keep = (0 if used.parts is None else used.parts.start + 1), self._keep(used.keep_in, used.keep_out)
        if self.entering is not None:
            hidden = self.entering(hidden, use, keep=keep)
        output = super().forward(hidden, used)
        return output if self.leaving is None else self.leaving(output, use, used.parts, keep)

    def prefix(self, keep_in: int | None, keep_out: int | None) -> tuple[Tensor, Tensor | None]:
        """Return weight, quantised by the ranges of these units alone, and bias of the first units."""
        weight, bias = super().prefix(keep_in, keep_out)
        return self.rounding(weight), bias

    @torch.no_grad()
    def extract(self, *, keep_in: int | None = None, keep_out: int | None = None) -> "QuantisedLinear":
        plain, keep = super().extract(keep_in=keep_in, keep_out=keep_out), self._keep(keep_in, keep_out)
        rounding, leaving = self.rounding, self.leaving
        small = QuantisedLinear(plain, rounding.config, rounding.bits, rounds_outputs=leaving is not None)
        small.entering = None if self.entering is None else self.entering.extract(keep)
        small.leaving = None if leaving is None else leaving.extract(keep)
        return small

    def plain(self) -> ElasticLinear:
        """Return the layer without quantisation, with a copy of its weights."""
        return super().extract()

    def _keep(self, keep_in: int | None, keep_out: int | None) -> int | None:
        return keep_out if self.units_in is None else keep_in


class QuantisedGroupedLinear(GroupedLinear):
    """A grouped linear layer with fake-quantised weights and inputs; a row holds the weights of one output.

    `units` is the number of inputs or outputs, whichever side shrinks.
    """

    def __init__(self, plain: GroupedLinear, config: QuantisationConfig, bits: int, *, units: int) -> None:
        super().__init__(plain.inputs, plain.outputs, plain.groups)
        self.weight, self.bias = plain.weight, plain.bias
        self.rounding = WeightRounding(config, bits)
        ranges = Ranges(1, 1, units, config.activation_bits, config.decay)
        self.entering = ranges if config.rounds_activations else None

    def forward(self, hidden: Tensor, used: WeightSlice = ALL_UNITS) -> Tensor:
        if self.entering is not None:
            hidden = self.entering(hidden, keep=used.keep_out if used.keep_in is None else used.keep_in)
        return super().forward(hidden, used)

    def prefix(self, keep_in: int | None, keep_out: int | None) -> tuple[Tensor, Tensor]:
        """Return weight, quantised by the ranges of these units alone, and bias of the first units of every group."""
        weight, bias = super().prefix(keep_in, keep_out)
        return grouped_columns(self.rounding(grouped_rows(weight)), self.groups), bias

    @torch.no_grad()
    def extract(self, *, keep_in: int | None = None, keep_out: int | None = None) -> "QuantisedGroupedLinear":
        plain, keep = self.plain().extract(keep_in=keep_in, keep_out=keep_out), keep_out if keep_in is None else keep_in
        rounding, units = self.rounding, keep or max(self.inputs, self.outputs)
        small = QuantisedGroupedLinear(plain, rounding.config, rounding.bits, units=units)
        small.entering = None if self.entering is None else self.entering.extract(keep)
        return small

    def plain(self) -> GroupedLinear:
        """Return the layer without quantisation, with the same weights."""
        plain = GroupedLinear(self.inputs, self.outputs, self.groups)
        plain.weight, plain.bias = self.weight, self.bias
        return plain


def grouped_rows(weight: Tensor) -> Tensor:
    """Return one row per output: (groups, inputs / groups, outputs / groups) -> (outputs, inputs / groups)."""
    return weight.transpose(1, 2).flatten(0, 1)


def grouped_columns(rows: Tensor, groups: int) -> Tensor:
    """The inverse of `grouped_rows`: (outputs, inputs / groups) -> (groups, inputs / groups, outputs / groups)."""
    return rows.unflatten(0, (groups, -1)).transpose(1, 2)


class QuantisedRows(TokenRows):
    """Look-up of token vectors in a fake-quantised table.

    With `scores`, the hidden states of a product with the whole table are quantised, too.
    """

    def __init__(self, rounding: WeightRounding, *, scores: bool = False) -> None:
        super().__init__()
        self.rounding = rounding
        config = rounding.config
        has_ranges = scores and config.rounds_activations
        self.scored = Ranges(1, 1, 0, config.activation_bits, config.decay) if has_ranges else None

    def forward(self, tokens: Tensor, table: Tensor | None) -> Tensor:
        assert table is not None, "an embedding without its own table needs the argument table"
        # quantise the looked-up rows only, by the ranges of the whole table
        limits = embedding(tokens, self.rounding.limits(table))
        return fake_quantise(embedding(tokens, table), limits, self.rounding.bits)

    def whole(self, table: Tensor | None) -> Tensor:
        return self.rounding(super().whole(table))

    def scores(self, hidden: Tensor, table: Tensor | None, bias: Tensor | None = None) -> Tensor:
        return super().scores(hidden if self.scored is None else self.scored(hidden), table, bias)

"""Layers for quantisation-aware training: they compute the values of b-bit integers in floating point.

symmetric: codes are integers from -M to M, M = 2^(b-1) - 1, and a code times the step, range / M, is the value (Zafrir
et al. 2019, Q8BERT). affine: codes are 0 to 2^b - 1, and the value is the lowest value plus a code times the step,
(highest - lowest) / (2^b - 1) (Prato et al. 2020). docs/how-to/quantisation.md lists the quantised tensors.
"""

import copy
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.functional import embedding

from bertsmith.layers.embedding import TokenRows
from bertsmith.layers.histogram import Histogram
from bertsmith.layers.linear import ALL_UNITS, ElasticLinear, GroupedLinear, WeightSlice
from bertsmith.settings import Record

_BITS = range(2, 9)
Form = Literal["symmetric", "affine"]


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
    """Decay of the moving average of activation ranges: of the largest |activation|, or of minimum and maximum."""
    places: Literal["linear", "all"] = "linear"
    """Rounded tensors: weights, inputs of linear layers, queries, keys and values; or all, which adds the sum of
    embeddings, the parts of softmax and norms, and the outputs of attention and feed-forward (Prato et al. 2020)."""
    form: Form = "symmetric"
    """Range of a tensor: from -maximum to maximum of |x|, or from minimum to maximum ("affine")."""
    clamps_gradient: bool = False
    """No gradient for values outside of the range; otherwise the straight-through gradient passes them, too."""

    @model_validator(mode="after")
    def _check_places(self) -> "QuantisationConfig":
        if self.places == "linear":
            return self
        if self.form != "affine":  # small denominators would round to 0
            raise ValueError(f"places is 'all' and form is {self.form!r}; allowed: 'affine'")
        if not self.rounds_activations:
            raise ValueError("places is 'all' and rounds_activations is false; allowed: true")
        return self

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


def fake_quantise(
    tensor: Tensor, limit: Tensor, bits: int, low: Tensor | None = None, *, clamps_gradient: bool = False
) -> Tensor:
    """Quantise and dequantise, with the straight-through gradient: symmetric, or affine from `low` to `limit`.

    Values with an empty range (a limit of 0, or equal to `low`) stay unchanged.
    Shape: limit and low must broadcast over the tensor.
    """
    if torch.is_grad_enabled() and tensor.requires_grad:
        result: Tensor = _StraightThrough.apply(tensor, limit, bits, low, clamps_gradient)
        return result
    return _quantise_dequantise(tensor, limit, bits, low)


def _quantise_dequantise(tensor: Tensor, limit: Tensor, bits: int, low: Tensor | None) -> Tensor:
    wide = tensor.float() if tensor.dtype.itemsize < 4 else tensor  # half precision is too coarse to divide by the step
    if low is None:
        step = step_of(limit, bits)
        rounded = torch.where(limit > 0, codes_of(wide, step, bits) * step, wide)
    else:
        highest = 2**bits - 1
        step = torch.where(limit > low, (limit - low) / highest, 1.0)
        rounded = ((wide - low) / step).round().clamp(0, highest) * step + low
        rounded = torch.where(limit > low, rounded, wide)
    # no `to` without effect: in compiled code such an output of an autograd function has no gradient (PyTorch 2.11)
    return rounded if rounded.dtype == tensor.dtype else rounded.to(tensor.dtype)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, limit: Tensor, bits: int, low: Tensor | None, clamps: bool) -> Tensor:
        ctx.clamps = clamps
        if clamps:
            lowest = -limit if low is None else low
            is_outside = ((tensor < lowest) | (tensor > limit)) & (limit > lowest)
            ctx.save_for_backward(is_outside)
        return _quantise_dequantise(tensor, limit, bits, low)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        if ctx.clamps:
            (is_outside,) = ctx.saved_tensors
            gradient = gradient.masked_fill(is_outside, 0.0)
        return gradient, None, None, None, None


class WeightRounding:
    """Quantisation of one matrix: its bits and the rows that share a range."""

    def __init__(self, config: QuantisationConfig, bits: int) -> None:
        self.config, self.bits = config, bits

    def limits(self, rows: Tensor) -> Tensor:
        """Return the symmetric range of every row: (rows, columns) -> (rows, 1)."""
        return self._shared(rows.detach().abs().amax(1), "amax")

    def ranges(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the limit and, in affine form, the lowest value of every row: (rows, columns) -> (rows, 1) each."""
        if self.config.form == "symmetric":
            return self.limits(rows), None
        return self._shared(rows.detach().amax(1), "amax"), self._shared(rows.detach().amin(1), "amin")

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the quantised and dequantised matrix."""
        limits, lows = self.ranges(rows)
        return fake_quantise(rows, limits, self.bits, lows)

    def _shared(self, extremes: Tensor, reduce: Literal["amax", "amin"]) -> Tensor:
        """Return the extreme value of all rows that share a range with each row: (rows,) -> (rows, 1)."""
        rows = len(extremes)
        count = {"matrix": 1, "row": rows, "group": min(self.config.groups, rows)}[self.config.weight_ranges]
        index = torch.arange(rows, device=extremes.device) * count // rows
        shared = extremes.new_zeros(count).scatter_reduce(0, index, extremes, reduce, include_self=False)
        return shared[index][:, None]


RangeKind = Literal["mean_max", "kl"]
FLOAT = -1.0
"""Range of activations that stay in floating point on purpose; 0 stands for a range that was never measured."""


class Ranges(nn.Module):
    """Fake quantisation of activations by a moving average of the largest |activation|, or of maximum and minimum.

    Every number of kept units has its own range, because the activations of a narrower sub-network differ. A width that
    was never seen uses the range of the whole layer; if that was never seen either, nothing is quantised. `uses` counts
    the different inputs of one layer, `parts` the tensors that are concatenated in one. Ranges are updated in training
    mode; under `measuring` (models/quantise.py) they are means over all batches. `is_positive` fixes the minimum of
    an affine range to 0, which then has a code.
    Shape: limits and lows (uses, parts, units + 1); the last entry is the whole layer's.
    """

    limits: Tensor
    lows: Tensor | None

    def __init__(
        self,
        uses: int,
        parts: int,
        units: int,
        bits: int,
        decay: float,
        *,
        form: Form = "symmetric",
        clamps_gradient: bool = False,
        is_positive: bool = False,
    ) -> None:
        super().__init__()
        self.bits, self.decay = bits, decay
        self.clamps_gradient, self.is_positive = clamps_gradient, is_positive
        self.register_buffer("limits", torch.zeros(uses, parts, units + 1))
        self.register_buffer("lows", torch.zeros(uses, parts, units + 1) if form == "affine" else None)
        self.counts: Tensor | None = None
        self.histograms: dict[tuple[int, int, int], Histogram] | None = None

    @classmethod
    def of(
        cls, config: QuantisationConfig, uses: int = 1, parts: int = 1, units: int = 0, *, is_positive: bool = False
    ) -> "Ranges":
        """Return the ranges of activations of a config."""
        form, clamps = config.form, config.clamps_gradient
        bits, decay = config.activation_bits, config.decay
        return cls(uses, parts, units, bits, decay, form=form, clamps_gradient=clamps, is_positive=is_positive)

    @property
    def is_observing(self) -> bool:
        """Whether calls update the ranges."""
        return self.training or self.counts is not None

    def forward(
        self,
        tensor: Tensor,
        use: int = 0,
        parts: slice | None = None,
        keep: int | None = None,
        where: Tensor | None = None,
    ) -> Tensor:
        """Return the fake-quantised activations, (…, parts · channels), of a layer that keeps this many units.

        `where`, only for one part, is True at the values that count for the range; it must broadcast over the tensor.
        """
        index = (use, slice(None) if parts is None else parts, -1 if keep is None else keep)
        count = self.limits[index].shape[0]
        by_part = tensor.unflatten(-1, (count, -1))  # (…, parts · channels) -> (…, parts, channels)
        if self.is_observing and tensor.numel():
            self._observe(by_part, index, None if where is None else where.unsqueeze(-2))
        limits, lows = self.effective_ranges(use, keep)
        low = None if lows is None else lows[index[1], None]
        limit = limits[index[1], None]
        return fake_quantise(by_part, limit, self.bits, low, clamps_gradient=self.clamps_gradient).flatten(-2)

    def effective_limits(self, use: int = 0, keep: int | None = None) -> Tensor:
        """Return the limits of all parts for a number of kept units, (parts,)."""
        return self.effective_ranges(use, keep)[0]

    def effective_ranges(self, use: int = 0, keep: int | None = None) -> tuple[Tensor, Tensor | None]:
        """Return limits and, in affine form, lowest values of all parts for a number of kept units, (parts,) each."""
        width = -1 if keep is None else keep
        # a call for some parts that was never measured, such as `absorb` of self-attention, has the input of all parts
        *first, last = dict.fromkeys([(use, width), (use, -1), (0, width), (0, -1)])
        limits, lows = self._at(*last)
        for own_limits, own_lows in (self._at(*position) for position in reversed(first)):
            is_measured = own_limits != (0 if own_lows is None else own_lows)
            limits = torch.where(is_measured, own_limits, limits)
            lows = None if lows is None or own_lows is None else torch.where(is_measured, own_lows, lows)
        return limits, lows

    def _at(self, use: int, width: int) -> tuple[Tensor, Tensor | None]:
        return self.limits[use, :, width], None if self.lows is None else self.lows[use, :, width]

    @torch.no_grad()
    def _observe(self, by_part: Tensor, index: tuple[int, slice, int], where: Tensor | None) -> None:
        values, limits, lows = by_part.detach(), self.limits[index], None if self.lows is None else self.lows[index]
        if self.counts is None:
            is_measured = limits > 0 if lows is None else limits != lows
            share = torch.where(is_measured, torch.full_like(limits, 1 - self.decay), 1.0)
        else:
            self.counts[index] += 1
            share = 1 / self.counts[index]
            self._count(by_part, index)
        highest = _largest(values.abs() if lows is None else values, where).to(limits.dtype)
        limits.add_(share * (highest - limits))
        if lows is not None and not self.is_positive:
            lowest = -_largest(-values, where).to(lows.dtype)
            lows.add_(share * (lowest - lows))

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
            self.limits[index] = FLOAT if histogram.is_sparse else histogram.kl_threshold(highest_code(self.bits) + 1)

    @torch.no_grad()
    def extract(self, keep: int | None) -> "Ranges":
        """Return the ranges of an extracted layer with this many units; the last entry is the range of that width."""
        small, units = copy.deepcopy(self), self.limits.shape[-1] - 1 if keep is None else keep
        effective = [self.effective_ranges(use, keep) for use in range(len(self.limits))]
        small.limits = self.limits[..., : units + 1].clone()
        small.limits[..., -1] = torch.stack([limits for limits, _ in effective])
        if self.lows is not None:
            small.lows = self.lows[..., : units + 1].clone()
            small.lows[..., -1] = torch.stack([lows for _, lows in effective if lows is not None])
        return small

    def reset(self, kind: RangeKind) -> None:
        """Forget the ranges and measure new ones until `counts` is None again."""
        self.limits.zero_()
        if self.lows is not None:
            self.lows.zero_()
        self.counts = torch.zeros_like(self.limits)
        self.histograms = {} if kind == "kl" else None

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        limits, lows = self.limits, self.lows
        super()._apply(fn, recurse)
        if self.limits.dtype.itemsize < 4:  # weights are cast to half precision; ranges keep their dtype
            self.limits = limits.to(self.limits.device)
            self.lows = None if lows is None else lows.to(self.limits.device)
        return self


def _largest(by_part: Tensor, where: Tensor | None) -> Tensor:
    """Return the largest value of each part: (…, parts, channels) -> (parts,)."""
    values = by_part if where is None else by_part.masked_fill(~where, -torch.inf)
    return values.amax(-1).flatten(0, -2).amax(0)


class QuantisedLinear(ElasticLinear):
    """An elastic layer with fake-quantised weights and, optionally, inputs and outputs.

    `has_positive_inputs` for inputs that are never negative, such as outputs of a ReLU.
    """

    def __init__(
        self,
        plain: ElasticLinear,
        config: QuantisationConfig,
        bits: int,
        *,
        rounds_inputs: bool = True,
        rounds_outputs: bool,
        has_positive_inputs: bool = False,
    ) -> None:
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
        self.entering = self.leaving = None
        if config.rounds_activations and rounds_inputs:
            self.entering = Ranges.of(config, uses, 1, units, is_positive=has_positive_inputs)
        if config.rounds_activations and rounds_outputs:
            self.leaving = Ranges.of(config, uses, plain.parts, units)

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
        small = QuantisedLinear(plain, self.rounding.config, self.rounding.bits, rounds_outputs=False)
        small.entering = None if self.entering is None else self.entering.extract(keep)
        small.leaving = None if self.leaving is None else self.leaving.extract(keep)
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
        self.entering = Ranges.of(config, units=units) if config.rounds_activations else None

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
        self.scored = Ranges.of(config) if scores and config.rounds_activations else None

    def forward(self, tokens: Tensor, table: Tensor | None) -> Tensor:
        assert table is not None, "an embedding without its own table needs the argument table"
        # quantise the looked-up rows only, by the ranges of the whole table
        limits, lows = self.rounding.ranges(table)
        low = None if lows is None else embedding(tokens, lows)
        return fake_quantise(embedding(tokens, table), embedding(tokens, limits), self.rounding.bits, low)

    def whole(self, table: Tensor | None) -> Tensor:
        return self.rounding(super().whole(table))

    def scores_input(self, hidden: Tensor) -> Tensor:
        return hidden if self.scored is None else self.scored(hidden)

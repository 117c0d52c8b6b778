"""Layers that compute what b-bit integers would give, in floating point, so that a model learns to live with them.

Codes are whole numbers from -M to M, M = 2^(b-1) - 1, without a zero point; a code times the step, range / M, is the
value (Zafrir et al. 2019, Q8BERT). docs/how-to/quantisation.md says what is rounded and what is not.
"""

from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.functional import embedding

from bertsmith.layers.embedding import TokenRows
from bertsmith.layers.linear import ALL_UNITS, ElasticLinear, GroupedLinear, WeightSlice
from bertsmith.settings import Record

_BITS = range(2, 9)


class QuantisationConfig(Record):
    """How weights and activations are rounded; the defaults are Q8BERT's."""

    weight_bits: int = Field(default=8, ge=_BITS.start, lt=_BITS.stop)
    """Of the matrices of all linear layers, those of the heads among them."""
    layer_bits: tuple[int, ...] | None = None
    """Bits of the matrices of each layer of the encoder, instead of one number for all (Q-BERT)."""
    embedding_bits: int = Field(default=8, ge=_BITS.start, lt=_BITS.stop)
    """Of the table of token vectors."""
    activation_bits: int = Field(default=8, ge=_BITS.start, le=16)
    """Of what enters a linear layer, and of queries, keys and values."""
    rounds_activations: bool = True
    """Whether activations are rounded at all, or only weights."""
    weight_ranges: Literal["matrix", "row", "group"] = "matrix"
    """What shares a range, its largest |weight|: a whole matrix (Q8BERT), one row, or a stretch of rows (Q-BERT)."""
    groups: int = Field(default=128, gt=0)
    """Stretches of rows of every matrix that have a range of their own, with weight_ranges = "group"."""
    decay: float = Field(default=0.9999, ge=0, lt=1)
    """Of the moving average of the largest |activation|, by which activations have their range."""

    @model_validator(mode="after")
    def _check_layer_bits(self) -> "QuantisationConfig":
        for bits in self.layer_bits or ():
            if bits not in _BITS:
                raise ValueError(f"layer_bits has {bits}; allowed: {_BITS.start} to {_BITS.stop - 1}")
        return self

    def with_layers(self, layers: tuple[int, ...]) -> "QuantisationConfig":
        """The config of an encoder that keeps only these layers."""
        if self.layer_bits is None:
            return self
        return self.changed(layer_bits=tuple(self.layer_bits[index] for index in layers))


def highest_code(bits: int) -> int:
    """M, the largest whole number that a signed code of so many bits stands for, and its negative."""
    return 2 ** (bits - 1) - 1


def step_of(limit: Tensor, bits: int) -> Tensor:
    """What one more in a code stands for, where values reach up to the limit; 1 where there is nothing but 0."""
    return torch.where(limit > 0, limit / highest_code(bits), 1.0)


def codes_of(tensor: Tensor, step: Tensor, bits: int) -> Tensor:
    """The nearest codes of values, halves to the even one, as floating-point numbers."""
    highest = highest_code(bits)
    return (tensor / step).round().clamp(-highest, highest)


def rounded(tensor: Tensor, limit: Tensor, bits: int) -> Tensor:
    """The values that their codes stand for, with the gradient of the values themselves (straight through).

    A limit of 0 stands for none: such values stay as they are. Shape: limit must broadcast over the tensor.
    """
    if torch.is_grad_enabled() and tensor.requires_grad:
        result: Tensor = _StraightThrough.apply(tensor, limit, bits)
        return result
    return _rounded(tensor, limit, bits)


def _rounded(tensor: Tensor, limit: Tensor, bits: int) -> Tensor:
    wide = tensor.float() if tensor.dtype.itemsize < 4 else tensor  # half precision has too few places to round in
    step = step_of(limit, bits)
    rounded = torch.where(limit > 0, codes_of(wide, step, bits) * step, wide)
    # no `to` that changes nothing: compiled, such an output of a function has no gradient in PyTorch 2.11
    return rounded if rounded.dtype == tensor.dtype else rounded.to(tensor.dtype)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, limit: Tensor, bits: int) -> Tensor:
        return _rounded(tensor, limit, bits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


class WeightRounding:
    """How one matrix is rounded: its bits, and how many stretches of rows have a range of their own."""

    def __init__(self, config: QuantisationConfig, bits: int) -> None:
        self.config, self.bits = config, bits

    def limits(self, rows: Tensor) -> Tensor:
        """The range that every row of a matrix has: (rows, columns) -> (rows, 1)."""
        largest = rows.detach().abs().amax(1)
        stretches = {"matrix": 1, "row": len(rows), "group": min(self.config.groups, len(rows))}
        count = stretches[self.config.weight_ranges]
        index = torch.arange(len(rows), device=rows.device) * count // len(rows)
        shared = largest.new_zeros(count).scatter_reduce(0, index, largest, "amax")
        return shared[index][:, None]

    def __call__(self, rows: Tensor) -> Tensor:
        """The matrix as its codes have it."""
        return rounded(rows, self.limits(rows), self.bits)


class Ranges(nn.Module):
    """The largest |activation| at one place, as a moving average, and the rounding by it.

    Every count of kept units has a range of its own: a narrower sub-network has other activations. One that was never
    seen takes that of the whole layer; where that was never seen either, nothing is rounded. `uses` tells apart what
    comes to one layer by different ways, `parts` what lies side by side in one tensor. Ranges are learned in training
    mode; under `measuring` (models/quantise.py) they are means over the batches that pass.
    Shape: limits (uses, parts, units + 1), the last entry being the whole layer's.
    """

    limits: Tensor

    def __init__(self, uses: int, parts: int, units: int, bits: int, decay: float) -> None:
        super().__init__()
        self.bits, self.decay = bits, decay
        self.register_buffer("limits", torch.zeros(uses, parts, units + 1))
        self.counts: Tensor | None = None

    def forward(self, tensor: Tensor, use: int = 0, parts: slice | None = None, kept: int | None = None) -> Tensor:
        """The activations as their codes have them: (…, parts · channels)."""
        position = (use, slice(None) if parts is None else parts, -1 if kept is None else kept)
        count = self.limits[position].shape[0]
        by_part = tensor.unflatten(-1, (count, -1))  # (…, parts · channels) -> (…, parts, channels)
        if (self.training or self.counts is not None) and tensor.numel():
            self._observe(by_part, position)
        return rounded(by_part, self.known(use, kept)[position[1], None], self.bits).flatten(-2)

    def known(self, use: int = 0, kept: int | None = None) -> Tensor:
        """The ranges of all parts for so many kept units, (parts,)."""
        own = self.limits[use, :, -1 if kept is None else kept]
        return torch.where(own > 0, own, self.limits[use, :, -1])

    @torch.no_grad()
    def _observe(self, by_part: Tensor, position: tuple[int, slice, int]) -> None:
        largest = by_part.detach().abs().amax(-1).flatten(0, -2).amax(0).to(self.limits.dtype)  # (parts,)
        seen = self.limits[position]
        if self.counts is None:
            share = torch.where(seen > 0, torch.full_like(seen, 1 - self.decay), 1.0)
        else:
            self.counts[position] += 1
            share = 1 / self.counts[position]
        seen.add_(share * (largest - seen))

    @torch.no_grad()
    def extract(self, kept: int | None) -> "Ranges":
        """Ranges of its own for a layer that keeps so many units: its last entry is the range of that width."""
        uses, parts, entries = self.limits.shape
        units = entries - 1 if kept is None else kept
        small = Ranges(uses, parts, units, self.bits, self.decay)
        small.limits = self.limits[..., : units + 1].clone()
        small.limits[..., -1] = torch.stack([self.known(use, kept) for use in range(uses)])
        return small.train(self.training)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        before = self.limits
        super()._apply(fn, recurse)
        if self.limits.dtype.itemsize < 4:  # weights in half precision; the ranges stay as they were measured
            self.limits = before.to(self.limits.device)
        return self


class QuantisedLinear(ElasticLinear):
    """An elastic layer with rounded weights, what enters it rounded and, where they are asked for, what leaves it."""

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
        # whole calls, and those for some parts by the first of them: what enters may be another thing altogether
        uses, units = (1 if plain.parts == 1 else plain.parts + 1), plain.units_in or plain.units_out or 0
        has_ranges, by = config.rounds_activations, (units, config.activation_bits, config.decay)
        self.entering = Ranges(uses, 1, *by) if has_ranges else None
        self.leaving = Ranges(uses, plain.parts, *by) if has_ranges and rounds_outputs else None

    def forward(self, hidden: Tensor, used: WeightSlice = ALL_UNITS) -> Tensor:
        use, kept = (0 if used.parts is None else used.parts.start + 1), self._kept(used.keep_in, used.keep_out)
        if self.entering is not None:
            hidden = self.entering(hidden, use, kept=kept)
        output = super().forward(hidden, used)
        return output if self.leaving is None else self.leaving(output, use, used.parts, kept)

    def prefix(self, keep_in: int | None, keep_out: int | None) -> tuple[Tensor, Tensor | None]:
        """Weight, rounded as a layer of this size rounds it, and bias of the first units."""
        weight, bias = super().prefix(keep_in, keep_out)
        return self.rounding(weight), bias

    @torch.no_grad()
    def extract(self, *, keep_in: int | None = None, keep_out: int | None = None) -> "QuantisedLinear":
        plain, kept = super().extract(keep_in=keep_in, keep_out=keep_out), self._kept(keep_in, keep_out)
        rounding, leaving = self.rounding, self.leaving
        small = QuantisedLinear(plain, rounding.config, rounding.bits, rounds_outputs=leaving is not None)
        small.entering = None if self.entering is None else self.entering.extract(kept)
        small.leaving = None if leaving is None else leaving.extract(kept)
        return small

    def plain(self) -> ElasticLinear:
        """The layer without rounding, with a copy of its weights."""
        return super().extract()

    def _kept(self, keep_in: int | None, keep_out: int | None) -> int | None:
        return keep_out if self.units_in is None else keep_in


class QuantisedGroupedLinear(GroupedLinear):
    """The linear layer in groups with rounded weights, and what enters it rounded; a row is one output's weights.

    `units` is the count of inputs or outputs, whichever shrink.
    """

    def __init__(self, plain: GroupedLinear, config: QuantisationConfig, bits: int, *, units: int) -> None:
        super().__init__(plain.inputs, plain.outputs, plain.groups)
        self.weight, self.bias = plain.weight, plain.bias
        self.rounding = WeightRounding(config, bits)
        ranges = Ranges(1, 1, units, config.activation_bits, config.decay)
        self.entering = ranges if config.rounds_activations else None

    def forward(self, hidden: Tensor, used: WeightSlice = ALL_UNITS) -> Tensor:
        if self.entering is not None:
            hidden = self.entering(hidden, kept=used.keep_out if used.keep_in is None else used.keep_in)
        return super().forward(hidden, used)

    def prefix(self, keep_in: int | None, keep_out: int | None) -> tuple[Tensor, Tensor]:
        """Weight, rounded as a layer of this size rounds it, and bias of the first units of every group."""
        weight, bias = super().prefix(keep_in, keep_out)
        return grouped_columns(self.rounding(grouped_rows(weight)), self.groups), bias

    @torch.no_grad()
    def extract(self, *, keep_in: int | None = None, keep_out: int | None = None) -> "QuantisedGroupedLinear":
        plain, kept = self.plain().extract(keep_in=keep_in, keep_out=keep_out), keep_out if keep_in is None else keep_in
        rounding, units = self.rounding, kept or max(self.inputs, self.outputs)
        small = QuantisedGroupedLinear(plain, rounding.config, rounding.bits, units=units)
        small.entering = None if self.entering is None else self.entering.extract(kept)
        return small

    def plain(self) -> GroupedLinear:
        """The layer without rounding, with the same weights."""
        plain = GroupedLinear(self.inputs, self.outputs, self.groups)
        plain.weight, plain.bias = self.weight, self.bias
        return plain


def grouped_rows(weight: Tensor) -> Tensor:
    """The weights of every output in a row: (groups, inputs / groups, …) -> (outputs, inputs / groups)."""
    return weight.transpose(1, 2).flatten(0, 1)


def grouped_columns(rows: Tensor, groups: int) -> Tensor:
    """Rows of outputs as a grouped layer keeps them: (outputs, inputs / groups) -> (groups, …, outputs / groups)."""
    return rows.unflatten(0, (groups, -1)).transpose(1, 2)


class QuantisedRows(TokenRows):
    """Token vectors from a rounded table."""

    def __init__(self, rounding: WeightRounding) -> None:
        super().__init__()
        self.rounding = rounding

    def forward(self, tokens: Tensor, table: Tensor | None) -> Tensor:
        assert table is not None, "an embedding without a table of its own must be given one"
        # only what is looked up is rounded, by the ranges that the whole table has
        limits = embedding(tokens, self.rounding.limits(table))
        return rounded(embedding(tokens, table), limits, self.rounding.bits)

    def whole(self, table: Tensor | None) -> Tensor:
        return self.rounding(super().whole(table))

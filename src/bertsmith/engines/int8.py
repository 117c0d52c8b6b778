"""Models with 8-bit codes instead of matrices: quantise a trained model, write it, read it."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from bertsmith.checkpoint.files import copy_tensors, find_weights, read_tensors
from bertsmith.checkpoint.store import read_config, write_model
from bertsmith.engines.base import Inputs, Precision
from bertsmith.errors import InputError
from bertsmith.layers.embedding import Embedding, TokenRows
from bertsmith.layers.linear import ALL_UNITS, ElasticLinear, GroupedLinear, LinearLayer, WeightSlice
from bertsmith.layers.quantised import (
    QuantisationConfig,
    QuantisedGroupedLinear,
    QuantisedLinear,
    QuantisedRows,
    Ranges,
    WeightRounding,
    codes_of,
    grouped_rows,
    step_of,
)
from bertsmith.models.build import assemble
from bertsmith.models.model import Model
from bertsmith.models.quantise import is_kernel, measuring, quantised, swap
from bertsmith.text.tokenizer import Tokenizer

Activations = Literal["float", "token", "measured"]
"""Activations of a product: in floating point, quantised per token, or quantised with calibrated ranges."""

BY_ROW = WeightRounding(QuantisationConfig(weight_ranges="row"), 8)
"""Quantisation of weights of a model trained without quantisation."""
_BITS = 8


def quantise_rows(rows: Tensor, rounding: WeightRounding) -> tuple[Tensor, Tensor]:
    """Codes of a matrix, (rows, columns), and the step of every row, (rows,)."""
    steps = step_of(rounding.limits(rows), rounding.bits)
    return codes_of(rows.detach(), steps, rounding.bits).to(torch.int8), steps.flatten().float()


def int_product(codes: Tensor, weights: Tensor) -> Tensor:
    """Exact integer product of codes: (tokens, inputs), (outputs, inputs) -> (tokens, outputs), int32."""
    return torch._int_mm(codes, weights.t())


def products_are_exact() -> bool:
    """Whether this machine multiplies codes without overflow; some older processors saturate."""
    extreme = torch.full((32, 64), 127, dtype=torch.int8)
    return bool((int_product(extreme, -extreme) == -64 * 127**2).all())


class Int8Linear(LinearLayer):
    """A linear layer of fixed size on codes, with the interface of ElasticLinear."""

    codes: Tensor
    steps: Tensor
    bias: Tensor | None

    def __init__(self, layer: ElasticLinear, activations: Activations) -> None:
        super().__init__()
        plain = layer.plain() if isinstance(layer, QuantisedLinear) else layer
        weight, bias = plain.prefix(None, None)
        codes, steps = quantise_rows(weight, layer.rounding if isinstance(layer, QuantisedLinear) else BY_ROW)
        self.parts = layer.parts
        self.register_buffer("codes", codes.contiguous())
        self.register_buffer("steps", steps)
        self.register_buffer("bias", None if bias is None else bias.detach().clone())
        self.entering = ActivationProduct(activations, layer.entering if isinstance(layer, QuantisedLinear) else None)
        self.leaving: Ranges | None = None
        if activations == "measured" and isinstance(layer, QuantisedLinear):
            self.leaving = layer.leaving

    def forward(self, hidden: Tensor, used: WeightSlice = ALL_UNITS) -> Tensor:
        _refuse_cut(used)
        codes, steps, bias, parts, use = self.codes, self.steps, self.bias, used.parts, 0
        if parts is not None:
            codes = codes.unflatten(0, (self.parts, -1))[parts].flatten(0, 1)
            steps = steps.unflatten(0, (self.parts, -1))[parts].flatten()
            bias = None if bias is None else bias.unflatten(0, (self.parts, -1))[parts].flatten()
            use = parts.start + 1
        left = self.entering(hidden, codes, use).mul_(steps)  # in place: allocating costs as much as the product
        left = left if bias is None else left.add_(bias)
        return left if self.leaving is None else self.leaving(left, use, parts)


class Int8GroupedLinear(LinearLayer):
    """A grouped linear layer on codes: each block of inputs with the codes of its block of outputs."""

    codes: Tensor
    steps: Tensor
    bias: Tensor

    def __init__(self, layer: GroupedLinear, activations: Activations) -> None:
        super().__init__()
        rounding, ranges = BY_ROW, None
        if isinstance(layer, QuantisedGroupedLinear):
            rounding, ranges = layer.rounding, layer.entering
        codes, steps = quantise_rows(grouped_rows(layer.weight), rounding)
        self.groups = layer.groups
        self.register_buffer("codes", codes.contiguous())
        self.register_buffer("steps", steps)
        self.register_buffer("bias", layer.bias.detach().clone())
        self.entering = ActivationProduct(activations, ranges)

    def forward(self, hidden: Tensor, used: WeightSlice = ALL_UNITS) -> Tensor:
        _refuse_cut(used)
        blocks = zip(hidden.chunk(self.groups, dim=-1), self.codes.chunk(self.groups), strict=True)
        sums = torch.cat([self.entering(block, codes) for block, codes in blocks], dim=-1)
        return sums.mul_(self.steps).add_(self.bias)


class ActivationProduct(nn.Module):
    """The product of activations with codes of weights, before the steps of the weights are applied.

    Shape: limits of calibrated ranges (uses,).
    """

    limits: Tensor | None

    def __init__(self, activations: Activations, ranges: Ranges | None) -> None:
        super().__init__()
        self.activations, self.bits = activations, _BITS if ranges is None else ranges.bits
        is_measured = activations == "measured"
        if is_measured and ranges is None:
            raise InputError("precision is 'int8_static' and the model rounds no activations; allowed: int8_weights")
        if is_measured and self.bits > _BITS:
            raise InputError(f"quantisation.activation_bits is {self.bits}; allowed with int8_static: up to {_BITS}")
        uses = [] if ranges is None else [ranges.effective_limits(use) for use in range(ranges.limits.shape[0])]
        self.register_buffer("limits", torch.cat(uses).detach().float() if is_measured else None)

    def forward(self, hidden: Tensor, weights: Tensor, use: int = 0) -> Tensor:
        """Multiply: (…, inputs), (outputs, inputs) -> (…, outputs)."""
        if self.activations == "float":
            return linear(hidden, weights.to(hidden.dtype))
        flat = hidden.flatten(0, -2)
        limit = flat.abs().amax(-1, keepdim=True) if self.limits is None else self.limits[use]
        step = step_of(limit, self.bits)
        codes = codes_of(flat, step, self.bits).to(torch.int8)
        return (int_product(codes, weights) * step).view(*hidden.shape[:-1], -1)


class Int8Rows(TokenRows):
    """Token embeddings from codes, with one step per row."""

    codes: Tensor
    steps: Tensor

    def __init__(self, table: Tensor, rounding: WeightRounding) -> None:
        super().__init__()
        codes, steps = quantise_rows(table, rounding)
        self.register_buffer("codes", codes)
        self.register_buffer("steps", steps[:, None])

    def forward(self, tokens: Tensor, table: Tensor | None) -> Tensor:
        return embedding(tokens, self.codes) * embedding(tokens, self.steps)

    def whole(self, table: Tensor | None) -> Tensor:
        return self.codes * self.steps


def _refuse_cut(used: WeightSlice) -> None:
    if any(value is not None for value in (used.keep_in, used.keep_out, used.gate)):
        raise InputError("an int8 model has one size and no gates; extract a sub-network before it is written")


ACTIVATIONS: dict[Precision, Activations] = {"int8_weights": "float", "int8": "token", "int8_static": "measured"}
"""Treatment of activations by precision."""


@torch.no_grad()
def int8_model(model: Model, precision: Precision, samples: Sequence[Inputs] = ()) -> Model:
    """Return a copy on the CPU that computes with codes; a model trained with quantisation keeps its ranges.

    For int8_static, a model without ranges is calibrated on the samples.
    """
    if model.config.generator is not None or model.config.decoder is not None:
        raise InputError(f"precision is {precision!r} and the model has a generator or a decoder; allowed: float32")
    activations = ACTIVATIONS[precision]
    if activations == "measured" and model.config.quantisation is None:
        model = _calibrate(model, samples)
    small = copy.deepcopy(model).to("cpu", torch.float32)

    def make(name: str, parent: nn.Module, part: nn.Module) -> nn.Module:
        if isinstance(part, ElasticLinear) and not is_kernel(parent):
            return Int8Linear(part, activations)
        if isinstance(part, GroupedLinear):
            return Int8GroupedLinear(part, activations)
        if isinstance(part, TokenRows) and isinstance(parent, Embedding) and parent.token_table is not None:
            table, parent.token_table = parent.token_table, None
            return Int8Rows(table, part.rounding if isinstance(part, QuantisedRows) else BY_ROW)
        return part

    swap(small, make)
    return small.eval().requires_grad_(False)


def write_int8(model: Model, folder: Path, precision: Precision, samples: Sequence[Inputs] = ()) -> None:
    """Write codes, steps and the remaining floating-point tensors into an existing folder."""
    small = int8_model(model, precision, samples)
    for name, part in small.named_modules():
        if isinstance(part, ActivationProduct) and part.limits is not None and not part.limits.any():
            raise InputError(f"precision is {precision!r}, and what enters {name[:-9]} was never measured; train first")
    write_model(small, folder, weights="int8")


def open_int8(folder: Path, precision: Precision) -> Model:
    """Open a folder of codes; they are used as written."""
    if ACTIVATIONS[precision] != "float" and not products_are_exact():
        raise InputError(
            f"precision is {precision!r}, and this processor multiplies 8-bit numbers inexactly; allowed: int8_weights"
        )
    model, weights = int8_model(assemble(read_config(folder)).eval(), precision), find_weights(folder)
    copy_tensors(read_tensors(weights), model, str(weights))
    if (folder / "tokenizer.json").is_file():
        model.tokenizer = Tokenizer.load(folder)
    return model


def _calibrate(model: Model, samples: Sequence[Inputs]) -> Model:
    if not samples:
        raise InputError("precision is 'int8_static', which needs samples to measure activations with; give some")
    rounding = quantised(model, QuantisationConfig(weight_ranges="row")).cpu()  # samples are on the CPU
    with measuring(rounding):
        for sample in samples:
            rounding.outputs(sample.tokens, sample.layout, sample.types)
    return rounding

"""A model with 8-bit codes in the place of its matrices: made from a trained one, written, and read again."""

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
"""How activations enter a product: as they are; in codes by the largest one of each token; or by ranges that were
measured before."""

BY_ROW = WeightRounding(QuantisationConfig(weight_ranges="row"), 8)
"""How the weights of a model that never rounded are coded."""
_BITS = 8


def coded(rows: Tensor, rounding: WeightRounding) -> tuple[Tensor, Tensor]:
    """The codes of a matrix and the step of every row: (rows, columns) and (rows,)."""
    steps = step_of(rounding.limits(rows), rounding.bits)
    return codes_of(rows.detach(), steps, rounding.bits).to(torch.int8), steps.flatten().float()


def int_product(codes: Tensor, weights: Tensor) -> Tensor:
    """Exact sums of products of codes: (tokens, inputs), (outputs, inputs) -> (tokens, outputs), int32."""
    return torch._int_mm(codes, weights.t())


def products_are_exact() -> bool:
    """Whether this machine multiplies codes without overflow; some older processors saturate pairs of them."""
    extreme = torch.full((32, 64), 127, dtype=torch.int8)
    return bool((int_product(extreme, -extreme) == -64 * 127**2).all())


class Int8Linear(LinearLayer):
    """A linear layer of one size on codes; it stands where an elastic one stood and takes the same calls."""

    codes: Tensor
    steps: Tensor
    bias: Tensor | None

    def __init__(self, layer: ElasticLinear, activations: Activations) -> None:
        super().__init__()
        plain = layer.plain() if isinstance(layer, QuantisedLinear) else layer
        weight, bias = plain.prefix(None, None)
        codes, steps = coded(weight, layer.rounding if isinstance(layer, QuantisedLinear) else BY_ROW)
        self.parts = layer.parts
        self.register_buffer("codes", codes.contiguous())
        self.register_buffer("steps", steps)
        self.register_buffer("bias", None if bias is None else bias.detach().clone())
        self.entering = Entering(activations, layer.entering if isinstance(layer, QuantisedLinear) else None)
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
        left = self.entering(hidden, codes, use).mul_(steps)  # in place: fresh memory costs as much as the product
        left = left if bias is None else left.add_(bias)
        return left if self.leaving is None else self.leaving(left, use, parts)


class Int8GroupedLinear(LinearLayer):
    """The linear layer in groups on codes: each block of inputs by the codes of its own block of outputs."""

    codes: Tensor
    steps: Tensor
    bias: Tensor

    def __init__(self, layer: GroupedLinear, activations: Activations) -> None:
        super().__init__()
        rounding, ranges = BY_ROW, None
        if isinstance(layer, QuantisedGroupedLinear):
            rounding, ranges = layer.rounding, layer.entering
        codes, steps = coded(grouped_rows(layer.weight), rounding)
        self.groups = layer.groups
        self.register_buffer("codes", codes.contiguous())
        self.register_buffer("steps", steps)
        self.register_buffer("bias", layer.bias.detach().clone())
        self.entering = Entering(activations, ranges)

    def forward(self, hidden: Tensor, used: WeightSlice = ALL_UNITS) -> Tensor:
        _refuse_cut(used)
        blocks = zip(hidden.chunk(self.groups, dim=-1), self.codes.chunk(self.groups), strict=True)
        sums = torch.cat([self.entering(block, codes) for block, codes in blocks], dim=-1)
        return sums.mul_(self.steps).add_(self.bias)


class Entering(nn.Module):
    """The product of what enters a layer with codes of weights, before these have their steps.

    Shape: ranges' limits for calls of one size, (uses,).
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
        uses = [] if ranges is None else [ranges.known(use) for use in range(ranges.limits.shape[0])]
        self.register_buffer("limits", torch.cat(uses).detach().float() if is_measured else None)

    def forward(self, hidden: Tensor, weights: Tensor, use: int = 0) -> Tensor:
        """Sums over the inputs: (…, inputs), (outputs, inputs) -> (…, outputs)."""
        if self.activations == "float":
            return linear(hidden, weights.to(hidden.dtype))
        flat = hidden.flatten(0, -2)
        limit = flat.abs().amax(-1, keepdim=True) if self.limits is None else self.limits[use]
        step = step_of(limit, self.bits)
        codes = codes_of(flat, step, self.bits).to(torch.int8)
        return (int_product(codes, weights) * step).view(*hidden.shape[:-1], -1)


class Int8Rows(TokenRows):
    """Token vectors from codes, each row with a step of its own."""

    codes: Tensor
    steps: Tensor

    def __init__(self, table: Tensor, rounding: WeightRounding) -> None:
        super().__init__()
        codes, steps = coded(table, rounding)
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
"""The precisions there are, by how activations enter a product."""


@torch.no_grad()
def int8_model(model: Model, precision: Precision, samples: Sequence[Inputs] = ()) -> Model:
    """A copy of a model on the CPU that computes with codes; one that learned with rounding keeps its own ranges.

    For activations by ranges that were measured before, a model that has none is measured on the samples.
    """
    if model.config.generator is not None or model.config.decoder is not None:
        raise InputError(f"precision is {precision!r} and the model has a generator or a decoder; allowed: float32")
    activations = ACTIVATIONS[precision]
    if activations == "measured" and model.config.quantisation is None:
        model = _measured(model, samples)
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
    """Writes codes, steps and what stays in floating point into a folder that exists."""
    small = int8_model(model, precision, samples)
    for name, part in small.named_modules():
        if isinstance(part, Entering) and part.limits is not None and not part.limits.any():
            raise InputError(f"precision is {precision!r}, and what enters {name[:-9]} was never measured; train first")
    write_model(small, folder, weights="int8")


def open_int8(folder: Path, precision: Precision) -> Model:
    """The model in a folder of codes, which are used as they were written."""
    if ACTIVATIONS[precision] != "float" and not products_are_exact():
        raise InputError(
            f"precision is {precision!r}, and this processor multiplies 8-bit numbers inexactly; allowed: int8_weights"
        )
    model, weights = int8_model(assemble(read_config(folder)).eval(), precision), find_weights(folder)
    copy_tensors(read_tensors(weights), model, str(weights))
    if (folder / "tokenizer.json").is_file():
        model.tokenizer = Tokenizer.load(folder)
    return model


def _measured(model: Model, samples: Sequence[Inputs]) -> Model:
    if not samples:
        raise InputError("precision is 'int8_static', which needs samples to measure activations with; give some")
    rounding = quantised(model, QuantisationConfig(weight_ranges="row")).cpu()  # where samples are
    with measuring(rounding):
        for sample in samples:
            rounding.outputs(sample.tokens, sample.layout, sample.types)
    return rounding

"""8-bit models: quantise, write and open models whose matrices are int8 codes."""

import copy
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from bertsmith.checkpoint.files import copy_tensors, find_weights, read_tensors
from bertsmith.checkpoint.store import read_config, write_model
from bertsmith.data.pairs import PairBatch
from bertsmith.engines.base import Inputs, Precision, Sample
from bertsmith.errors import InputError
from bertsmith.layers.context import Memory
from bertsmith.layers.embedding import Embedding, TokenRows
from bertsmith.layers.linear import ALL_UNITS, ElasticLinear, GroupedLinear, LinearLayer, WeightSlice
from bertsmith.layers.quantised import (
    FLOAT,
    QuantisationConfig,
    QuantisedGroupedLinear,
    QuantisedLinear,
    QuantisedRows,
    RangeKind,
    Ranges,
    WeightRounding,
    codes_of,
    grouped_rows,
    step_of,
)
from bertsmith.models.build import assemble
from bertsmith.models.model import Model
from bertsmith.models.quantise import measuring, quantised
from bertsmith.models.seq2seq import Seq2Seq
from bertsmith.models.swapping import multiplies_no_states, swap
from bertsmith.ops.token_loss import Sampling, TokenLoss, from_scores
from bertsmith.text.tokenizer import Tokenizer

Activations = Literal["float", "token", "measured"]
"""Activations of a matrix product: in floating point, quantised per token, or quantised with calibrated ranges."""

BY_ROW = WeightRounding(QuantisationConfig(weight_ranges="row"), 8)
"""Weight quantisation of models that were trained without it."""
_BITS = 8
BEAM_SAMPLES = 32
"""Sentences of the samples that calibration translates by beam search."""


def quantise_rows(rows: Tensor, rounding: WeightRounding) -> tuple[Tensor, Tensor]:
    """Return the int8 codes of a matrix, (rows, columns), and the step of every row, (rows,)."""
    steps = step_of(rounding.limits(rows), rounding.bits)
    return codes_of(rows.detach(), steps, rounding.bits).to(torch.int8), steps.flatten().float()


def int_product(codes: Tensor, weights: Tensor) -> Tensor:
    """Integer product of codes: (tokens, inputs), (outputs, inputs) -> (tokens, outputs), int32."""
    return torch._int_mm(codes, weights.t())


def products_are_exact() -> bool:
    """Whether this machine multiplies codes without overflow; some older processors saturate."""
    extreme = torch.full((32, 64), 127, dtype=torch.int8)
    return bool((int_product(extreme, -extreme) == -64 * 127**2).all())


class Int8Linear(LinearLayer):
    """A linear layer with int8 weights and fixed size, with the interface of ElasticLinear."""

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
        _require_whole(used)
        codes, steps, bias, parts, use = self.codes, self.steps, self.bias, used.parts, 0
        if parts is not None:
            codes = codes.unflatten(0, (self.parts, -1))[parts].flatten(0, 1)
            steps = steps.unflatten(0, (self.parts, -1))[parts].flatten()
            bias = None if bias is None else bias.unflatten(0, (self.parts, -1))[parts].flatten()
            use = parts.start + 1
        outputs = self.entering(hidden, codes, use).mul_(steps)  # in place: allocating costs as much as the product
        outputs = outputs if bias is None else outputs.add_(bias)
        return outputs if self.leaving is None else self.leaving(outputs, use, parts)

    def new_zeros(self, *shape: int) -> Tensor:
        return self.steps.new_zeros(shape)


class Int8GroupedLinear(LinearLayer):
    """A grouped linear layer with int8 weights: block-diagonal, one block per group."""

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
        _require_whole(used)
        blocks = zip(hidden.chunk(self.groups, dim=-1), self.codes.chunk(self.groups), strict=True)
        sums = torch.cat([self.entering(block, codes) for block, codes in blocks], dim=-1)
        return sums.mul_(self.steps).add_(self.bias)


class ActivationProduct(nn.Module):
    """Product of activations and weight codes, before scaling by the weight steps.

    Shape: limits of calibrated ranges (uses,).
    """

    limits: Tensor | None

    def __init__(self, activations: Activations, ranges: Ranges | None) -> None:
        super().__init__()
        self.activations, self.bits = activations, _BITS if ranges is None else ranges.bits
        is_measured = activations == "measured"
        if is_measured and ranges is None:
            raise InputError(
                "precision is 'int8_static', but the model does not quantise activations; allowed: int8_weights"
            )
        if is_measured and self.bits > _BITS:
            raise InputError(f"quantisation.activation_bits is {self.bits}; allowed with int8_static: up to {_BITS}")
        uses = [] if ranges is None else [ranges.effective_limits(use) for use in range(ranges.limits.shape[0])]
        self.register_buffer("limits", torch.cat(uses).detach().float() if is_measured else None)

    def forward(self, hidden: Tensor, weights: Tensor, use: int = 0) -> Tensor:
        """Multiply: (…, inputs), (outputs, inputs) -> (…, outputs)."""
        if self.activations == "float":
            return linear(hidden, weights.to(hidden.dtype))
        if self.limits is not None and self.limits[use] == FLOAT:
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

    def __init__(self, table: Tensor, rounding: WeightRounding, product: "ActivationProduct | None" = None) -> None:
        super().__init__()
        codes, steps = quantise_rows(table, rounding)
        self.register_buffer("codes", codes)
        self.register_buffer("steps", steps[:, None])
        self.entering = product

    def forward(self, tokens: Tensor, table: Tensor | None) -> Tensor:
        return embedding(tokens, self.codes) * embedding(tokens, self.steps)

    def whole(self, table: Tensor | None) -> Tensor:
        return self.codes * self.steps

    def scores(self, hidden: Tensor, table: Tensor | None, bias: Tensor | None = None) -> Tensor:
        """Multiply the codes, where hidden states have some: widening the table in every step would cost more."""
        if self.entering is None:
            return super().scores(hidden, table, bias)
        scores = self.entering(hidden, self.codes).mul_(self.steps[:, 0])
        return scores if bias is None else scores.add_(bias)

    def loss(
        self,
        hidden: Tensor,
        table: Tensor | None,
        bias: Tensor | None,
        targets: Tensor,
        *,
        smoothing: float = 0.0,
        sampling: Sampling | None = None,
    ) -> TokenLoss:
        return from_scores(self.scores(hidden, table, bias), targets, smoothing, sampling)


def _require_whole(used: WeightSlice) -> None:
    if any(value is not None for value in (used.keep_in, used.keep_out, used.gate)):
        raise InputError("an int8 model has one size and no gates; extract a sub-network before writing it as int8")


ACTIVATIONS: dict[Precision, Activations] = {"int8_weights": "float", "int8": "token", "int8_static": "measured"}
"""Activations by precision."""


@torch.no_grad()
def int8_model(model: Model, precision: Precision, samples: Sequence[Sample] = ()) -> Model:
    """Return an int8 copy of a model on the CPU; a model trained with quantisation keeps its ranges.

    For int8_static, a model without ranges is calibrated on the samples.
    """
    if model.config.generator is not None:
        raise InputError(f"precision is {precision!r}, but the model has a generator; allowed: float32")
    if model.config.quantisation is not None and model.config.quantisation.form == "affine":
        raise InputError(
            f"precision is {precision!r}, whose codes are symmetric, but the model has quantisation.form = 'affine'; "
            "use its folder itself, or train with form = 'symmetric'"
        )
    activations = ACTIVATIONS[precision]
    if activations == "measured" and model.config.quantisation is None:
        model = calibrate(model, samples)
    small = copy.deepcopy(model).to("cpu", torch.float32)

    def quantise(name: str, parent: nn.Module, module: nn.Module) -> nn.Module:
        if isinstance(module, ElasticLinear) and not multiplies_no_states(parent, module):
            return Int8Linear(module, activations)
        if isinstance(module, GroupedLinear):
            return Int8GroupedLinear(module, activations)
        if isinstance(module, TokenRows) and isinstance(parent, Embedding) and parent.token_table is not None:
            table, parent.token_table = parent.token_table, None
            rounding, ranges = BY_ROW, None
            if isinstance(module, QuantisedRows):
                rounding, ranges = module.rounding, module.scored
            is_scored = name == model.config.scored_rows
            return Int8Rows(table, rounding, ActivationProduct(activations, ranges) if is_scored else None)
        return module

    swap(small, quantise)
    return small.eval().requires_grad_(False)


def write_int8(model: Model, folder: Path, precision: Precision, samples: Sequence[Sample] = ()) -> None:
    """Write codes, steps and the remaining floating-point tensors into an existing folder."""
    small = int8_model(model, precision, samples)
    for name, module in small.named_modules():
        if isinstance(module, ActivationProduct) and module.limits is not None and not module.limits.any():
            raise InputError(
                f"precision is {precision!r}, but the activation range of {name[:-9]} was never measured; train first"
            )
    write_model(small, folder, weights="int8")


def open_int8(folder: Path, precision: Precision) -> Model:
    """Open a folder written by `write_int8`."""
    if ACTIVATIONS[precision] != "float" and not products_are_exact():
        raise InputError(
            f"precision is {precision!r}, but int8 products overflow on this processor; allowed: int8_weights"
        )
    model, weights = int8_model(assemble(read_config(folder)).eval(), precision), find_weights(folder)
    copy_tensors(read_tensors(weights), model, str(weights))
    if (folder / "tokenizer.json").is_file():
        model.tokenizer = Tokenizer.load(folder)
    return model


@torch.no_grad()
def calibrate(model: Model, samples: Sequence[Sample], kind: RangeKind = "mean_max") -> Model:
    """Return a copy of a model on the CPU that rounds activations by ranges measured on samples (models/quantise.py).

    A translation model sees the pairs with the right target so far, then translates some of the sources by beam
    search: ranges of teacher forcing alone are too narrow for a beam that goes astray.
    """
    if not samples:
        raise InputError("precision is 'int8_static', which needs samples to calibrate activation ranges; pass samples")
    calibrated = quantised(model, QuantisationConfig(weight_ranges="row")).cpu()  # samples are on the CPU
    with measuring(calibrated, kind):
        for sample in samples:
            if isinstance(sample, Inputs):
                calibrated.outputs(sample.tokens, sample.layout, sample.types)
            else:
                _run_pairs(calibrated, sample)
        if isinstance(calibrated, Seq2Seq):
            pairs = [sample for sample in samples if isinstance(sample, PairBatch)]
            for source in islice(_sources(pairs), BEAM_SAMPLES):
                calibrated.generate(source[None])  # alone: no padding enters the ranges
    return calibrated


def _run_pairs(model: Model, batch: PairBatch) -> None:
    if not isinstance(model, Seq2Seq):
        raise InputError("samples are pairs of texts, but the model has no decoder; pass inputs of the encoder")
    if not (batch.source_layout.is_packed and batch.target_layout.is_packed):
        raise InputError("samples are padded, and padding would widen activation ranges; pass packed pairs")
    memory = Memory(model.encoder(batch.source, batch.source_layout), batch.source_layout)
    model.scores(model.decode(batch.target, batch.target_layout, memory))


def _sources(pairs: Sequence[PairBatch]) -> Iterator[Tensor]:
    for batch in pairs:
        yield from batch.source.split(batch.source_layout.lengths().tolist())


def float_inputs(model: Model) -> list[str]:
    """Return the names of linear layers whose inputs stay in floating point, because their values are too sparse."""
    return sorted(
        name.rpartition(".")[0]
        for name, module in model.named_modules()
        if isinstance(module, Ranges) and not name.endswith(".leaving") and bool((module.limits == FLOAT).any())
    )

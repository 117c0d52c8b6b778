"""A model with 8-bit codes in the place of its matrices: made from a trained one, written, and read again."""

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from bertsmith.checkpoint.files import copy_tensors, find_weights, read_tensors
from bertsmith.checkpoint.store import read_config, write_model
from bertsmith.engines.base import Inputs, Precision
from bertsmith.engines.int8_layers import (
    BY_ROW,
    Activations,
    Entering,
    Int8GroupedLinear,
    Int8Linear,
    Int8Rows,
    products_are_exact,
)
from bertsmith.errors import InputError
from bertsmith.layers.elastic import ElasticLinear
from bertsmith.layers.embedding import Embedding, TokenRows
from bertsmith.layers.grouped import GroupedLinear
from bertsmith.layers.quantised import QuantisationConfig, QuantisedRows
from bertsmith.models.build import assemble
from bertsmith.models.model import Model
from bertsmith.models.quantise import is_kernel, measuring, quantised, swap
from bertsmith.text.tokenizer import Tokenizer

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

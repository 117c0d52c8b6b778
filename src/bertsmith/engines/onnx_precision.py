"""ONNX graphs with 8-bit weights and products, by ONNX Runtime's own tools."""

import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bertsmith.engines.base import Inputs
from bertsmith.engines.onnx_graph import quiet

if TYPE_CHECKING:
    import numpy as np

_OPERATIONS = {"MatMul": 1, "Gather": 0}
"""What is quantised, and which of its inputs the weights are."""


def reduces_range() -> bool:
    """Whether weights should have 7 bits on this machine: older x86 adds two products up in 16 bits, which overflow."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
    return is_x86 and not torch.cpu._is_vnni_supported()


def quantise_dynamic(graph: Path, path: Path) -> None:
    """Writes a graph with 8-bit weights; the ranges of what they are multiplied with are measured batch by batch."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with quiet():
        quantize_dynamic(
            str(graph),
            str(path),
            nodes_to_quantize=_with_weights(graph),
            per_channel=True,
            reduce_range=reduces_range(),
            weight_type=QuantType.QInt8,
        )


def quantise_static(graph: Path, path: Path, names: Sequence[str], samples: Sequence[Inputs]) -> None:
    """Writes a graph with 8-bit weights and activations, whose ranges are those of the samples."""
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

    options = {
        # the products' results stay float32: rounded twice, an output loses most of what 8 bits cost
        "OpTypesToExcludeOutputQuantization": list(_OPERATIONS),
        # the mean of the batches' ranges: the widest of all is that of an outlier
        "CalibMovingAverage": True,
    }
    with quiet():
        quantize_static(
            str(graph),
            str(path),
            _Samples(names, samples),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=list(_OPERATIONS),
            nodes_to_quantize=_with_weights(graph),
            per_channel=True,
            reduce_range=reduces_range(),
            weight_type=QuantType.QInt8,
            activation_type=QuantType.QUInt8,
            extra_options=options,
        )


def _with_weights(graph: Path) -> list[str]:
    """The names of the operations that read matrices; products of two activations lose more than they gain.

    So do those with the tables of positions by head, which are scores: they are no matrices.
    """
    import onnx

    found = onnx.load(str(graph)).graph
    weights = {tensor.name for tensor in found.initializer if len(tensor.dims) == 2}
    place = _OPERATIONS
    return [node.name for node in found.node if node.op_type in place and node.input[place[node.op_type]] in weights]


def feed(inputs: Inputs, names: Sequence[str]) -> "dict[str, np.ndarray]":
    """A batch in padded rows as a session reads it."""
    rows, layout = inputs.layout.pad(inputs.tokens)
    types = None if inputs.types is None else inputs.layout.pad(inputs.types)[0]
    arrays = {
        "input_ids": rows,
        "attention_mask": torch.ones_like(rows) if layout.is_token is None else layout.is_token,
        "token_type_ids": torch.zeros_like(rows) if types is None else types,
    }
    return {name: arrays[name].long().numpy() for name in names}


class _Samples:
    """What ONNX Runtime reads samples from."""

    def __init__(self, names: Sequence[str], samples: Sequence[Inputs]) -> None:
        self.names, self.samples = names, samples
        self.rewind()

    def rewind(self) -> None:
        self.left: Iterator[Inputs] = iter(self.samples)

    def get_next(self) -> "dict[str, np.ndarray] | None":
        inputs = next(self.left, None)
        return None if inputs is None else feed(inputs, self.names)

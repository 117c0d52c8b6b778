"""Write a model as one ONNX graph of standard operations with dynamic batch and length, in float32 or 8 bits."""

import platform
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, cast, get_args

import numpy as np
import torch

from bertsmith.engines.base import Inputs
from bertsmith.engines.onnx_session import GraphHead, GraphMetadata
from bertsmith.engines.onnx_trace import input_names, max_input_length, quiet, trace_graph
from bertsmith.errors import InputError, nearest
from bertsmith.models.config import ModelConfig
from bertsmith.models.heads import TaskHeadConfig
from bertsmith.models.masks import has_masks, unmasked
from bertsmith.models.model import Model

MAX_BYTES = 2 * 1024**3 - 64 * 1024**2
"""Maximum bytes of weights: a file is one protobuf message of at most 2 GiB, which also holds the graph."""


HeadChoice = Literal["auto", "masked_tokens"]
"""Output of a graph: the task head, or without one the last hidden states ("auto"), or the masked-token logits."""


def has_task_head(config: ModelConfig) -> bool:
    """Whether a model has a task head."""
    return graph_head(config) is not None


def graph_head(config: ModelConfig, choice: HeadChoice = "auto") -> GraphHead | None:
    """Return the output head of the graph; None for the last hidden states."""
    if choice not in get_args(HeadChoice):
        raise InputError(f"head is {choice!r}; {nearest(choice, get_args(HeadChoice))}")
    if choice == "masked_tokens":
        kinds = [head.kind for head in config.heads]
        if "masked_tokens" not in kinds:
            have = ", ".join(kinds) or "none"
            raise InputError(
                f"head is 'masked_tokens', which this model does not have (its heads: {have}); allowed: auto"
            )
        return choice
    kind = next((head.kind for head in config.heads if isinstance(head, TaskHeadConfig)), None)
    return cast(GraphHead | None, kind)


def graph_metadata(config: ModelConfig, head: GraphHead | None) -> GraphMetadata:
    """Return the inputs and limits of the graph of a model with this output head."""
    embedding, max_length = config.encoder.embedding, max_input_length(config, head)
    whole = config.text_length if head == "embedder" else embedding.max_length
    text_length = whole if max_length is None else min(whole, max_length)
    return GraphMetadata(input_names(config), head, config.encoder.vocabulary, max_length, text_length, embedding.types)


def check_graph(model: Model) -> None:
    """Raise InputError if a model cannot be written as one ONNX graph."""
    if model.config.decoder is not None:
        raise InputError("this model has a decoder, which ONNX export does not support; allowed: encoders")
    quantisation = model.config.quantisation
    if quantisation is not None and quantisation.places == "all":
        raise InputError(
            "this model rounds all tensors (quantisation.places = 'all'), which ONNX export does not support; use its "
            "folder itself, or train with places = 'linear'"
        )
    for head in model.config.heads:
        if isinstance(head, TaskHeadConfig) and head.recurrent is not None:
            raise InputError(
                "this model's head has a BiLSTM (head.recurrent), which ONNX export does not support; "
                "allowed: heads without one"
            )
    size = sum(parameter.numel() for parameter in model.parameters()) * 4
    if size > MAX_BYTES:
        raise InputError(f"this model has {size / 1024**3:.1f} GiB of weights; allowed in one ONNX file: up to 2 GiB")


def write_graph(model: Model, path: Path, head: GraphHead | None) -> None:
    """Write a model (in eval mode, float32, on the CPU) as an ONNX file with this output head."""
    import onnx_ir

    check_graph(model)
    graph = trace_graph(unmasked(model) if has_masks(model) else model, head)
    with TemporaryDirectory(dir=path.parent, prefix=".graph-") as folder:
        traced = Path(folder) / "traced.onnx"
        onnx_ir.save(graph, traced)
        _simplify(traced, path)


def _simplify(traced: Path, path: Path) -> None:
    """Fold constants and remove metadata.

    This merges shared weights into one constant and makes every product with weights quantisable.
    """
    import onnx
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC  # only standard operators
    options.optimized_model_filepath = str(traced.with_name("simple.onnx"))
    options.log_severity_level = 3
    onnxruntime.InferenceSession(str(traced), options, providers=["CPUExecutionProvider"])
    model = onnx.load(options.optimized_model_filepath)
    domains = {node.domain for node in model.graph.node}
    opsets = [opset for opset in model.opset_import if opset.domain in domains]
    del model.opset_import[:]
    model.opset_import.extend(opsets)
    # without intermediate shapes ONNX Runtime does not fuse sums and norms; its fused kernel is slower on a CPU (1.31:
    # 5 % of a BERT, more in 8 bits), and shapes of weights transposed for 8 bits would be wrong
    del model.graph.value_info[:]
    for item in (*model.graph.node, *model.graph.initializer, model.graph):
        item.doc_string = ""
        del item.metadata_props[:]
    model.graph.name = "bertsmith"
    del model.metadata_props[:]
    onnx.save(model, str(path))


_OPERATIONS = {"MatMul": 1, "Gather": 0}
"""Quantised operators, and the index of their weight input."""


def reduces_range() -> bool:
    """Whether weights need 7 bits here: x86 without VNNI sums pairs of products in 16 bits, which overflow."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
    return is_x86 and not torch.cpu._is_vnni_supported()


def halve(graph: Path, path: Path) -> None:
    """Write a float32 graph with weights and products in float16; inputs and outputs stay float32."""
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one for every weight that rounds to zero
        onnx.save(convert_float_to_float16(onnx.load(str(graph)), keep_io_types=True), str(path))


def quantise_dynamic(graph: Path, path: Path) -> None:
    """Quantise weights to 8 bits; activation ranges are measured per batch at run time."""
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
    """Quantise weights and activations to 8 bits, with activation ranges calibrated on samples."""
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

    options = {
        # outputs of products stay float32: quantising them causes most of the loss of accuracy
        "OpTypesToExcludeOutputQuantization": list(_OPERATIONS),
        # mean range over batches, because the maximum is set by outliers
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
    """Return the names of the operators with weight matrices.

    Quantising products of two activations, or with position tables, costs more accuracy than it gains speed.
    """
    import onnx

    loaded = onnx.load(str(graph)).graph
    weights = {tensor.name for tensor in loaded.initializer if len(tensor.dims) == 2}
    nodes = [node for node in loaded.node if node.op_type in _OPERATIONS]
    return [node.name for node in nodes if node.input[_OPERATIONS[node.op_type]] in weights]


def feed(inputs: Inputs, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return a batch as the inputs of a session."""
    rows, layout = inputs.layout.pad(inputs.tokens)
    types = None if inputs.types is None else inputs.layout.pad(inputs.types)[0]
    arrays = {
        "input_ids": rows,
        "attention_mask": torch.ones_like(rows) if layout.is_token is None else layout.is_token,
        "token_type_ids": torch.zeros_like(rows) if types is None else types,
    }
    return {name: arrays[name].long().numpy() for name in names}


class _Samples:
    """Calibration data reader for ONNX Runtime."""

    def __init__(self, names: Sequence[str], samples: Sequence[Inputs]) -> None:
        self.names, self.samples = names, samples
        self.rewind()

    def rewind(self) -> None:
        self.remaining: Iterator[Inputs] = iter(self.samples)

    def get_next(self) -> dict[str, np.ndarray] | None:
        inputs = next(self.remaining, None)
        return None if inputs is None else feed(inputs, self.names)

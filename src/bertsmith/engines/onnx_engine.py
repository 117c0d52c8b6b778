"""ONNX Runtime as an engine: the model is one file, model.onnx, and runs without PyTorch's kernels."""

import copy
import platform
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from bertsmith.checkpoint.files import read_json, write_json
from bertsmith.checkpoint.hf.wrapped import FORMAT
from bertsmith.checkpoint.store import read_config
from bertsmith.data.layout import SequenceLayout
from bertsmith.engines.base import Engine, Inputs, Precision
from bertsmith.engines.onnx_graph import (
    OPSET,
    AskedHead,
    check_graph,
    graph_head,
    graph_notes,
    input_names,
    quiet,
    write_graph,
)
from bertsmith.engines.onnx_probes import Difference, compared, probes
from bertsmith.engines.onnx_session import GRAPH_FILE, NOTES_FILE, Graph, GraphHead, open_session
from bertsmith.errors import InputError
from bertsmith.models.config import ModelConfig
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.model import Model
from bertsmith.text.tokenizer import Tokenizer

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


TOLERANCE = 1e-4
"""The largest difference from the model that a float32 graph may have; where outputs are above 1, as a share of the
largest."""


class OnnxEngine(Engine):
    """Writes the model as an ONNX graph, compares the two, and runs it with ONNX Runtime."""

    name = "onnxruntime"
    precisions: ClassVar[tuple[Precision, ...]] = ("float32", "int8", "int8_static")

    def missing(self) -> str | None:
        return _lacking("onnxruntime")

    def write(
        self,
        model: Model,
        folder: Path,
        precision: Precision,
        samples: Sequence[Inputs] = (),
        *,
        head: AskedHead = "auto",
    ) -> None:
        """Puts the graph and what belongs to it into a folder; `head` is what the graph ends with."""
        lacking = _lacking("onnxruntime", "onnx", "onnxscript")
        if lacking is not None:
            raise InputError(f"engine is {self.name!r}, which {lacking}")
        if precision == "int8_static" and not samples:
            raise InputError("precision is 'int8_static' and there are no samples to measure ranges on; give samples")
        check_graph(model)
        ends_with = graph_head(model.config, head)
        with TemporaryDirectory(dir=folder, prefix=".onnx-") as place, torch.no_grad():
            new = Path(place)
            self._write(_plain(model), new, precision, samples, ends_with)
            for path in sorted(new.iterdir()):
                path.replace(folder / path.name)

    def open(self, folder: Path, precision: Precision, *, threads: int | None = None) -> "OnnxRunner":
        config = read_config(folder)
        notes = read_json(folder / NOTES_FILE) if (folder / NOTES_FILE).is_file() else {}
        head = notes.get("head", graph_head(config))
        tokenizer = Tokenizer.load(folder) if (folder / "tokenizer.json").exists() else None
        return OnnxRunner(open_session(folder / GRAPH_FILE, threads), config, tokenizer, head)

    def _write(
        self, model: Model, folder: Path, precision: Precision, samples: Sequence[Inputs], head: GraphHead | None
    ) -> None:
        write_json(folder / "config.json", {"bertsmith": FORMAT, "model": model.config.plain()})
        if model.tokenizer is not None:
            model.tokenizer.save(folder)
        path, names = folder / GRAPH_FILE, input_names(model.config)
        if precision == "float32":
            write_graph(model, path, head)
        else:
            with TemporaryDirectory(dir=folder, prefix=".float32-") as place:
                graph = Path(place) / GRAPH_FILE
                write_graph(model, graph, head)
                if precision == "int8":
                    quantise_dynamic(graph, path)
                else:
                    quantise_static(graph, path, names, samples)
        runner = OnnxRunner(open_session(path, None), model.config, model.tokenizer, head)
        found = _difference(model, runner, samples)
        if precision == "float32" and not found.absolute <= TOLERANCE * max(1.0, found.largest_output):
            raise InputError(
                f"the ONNX graph of this model differs from it by {found.absolute:.1e} where the largest output is "
                f"{found.largest_output:.1e}; allowed: up to {TOLERANCE:.0e} of it, or {TOLERANCE:.0e} if it is below 1"
            )
        notes = {**asdict(graph_notes(model.config, head)), "outputs": ["outputs"]}
        notes |= {"opset": OPSET, "precision": precision}
        notes |= {"largest_difference": found.relative, "largest_absolute_difference": found.absolute}
        notes |= {"largest_output": found.largest_output, "compared_on": found.inputs}
        notes |= {"compared_sequences": found.sequences, "compared_lengths": [found.shortest, found.longest]}
        if precision != "float32":
            notes["weights_have_7_bits"] = reduces_range()
        write_json(folder / NOTES_FILE, notes)


class OnnxRunner:
    """An ONNX file that answers batches as its model did."""

    def __init__(self, session: Any, config: ModelConfig, tokenizer: Tokenizer | None, head: GraphHead | None) -> None:
        self.session, self.config, self.tokenizer, self.head = session, config, tokenizer, head
        self.graph = Graph(session, graph_notes(config, head))
        self.is_for_tokens = self.graph.is_for_tokens

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InputError("this ONNX folder has no tokenizer.json; export a model that has a tokenizer")
        return self.tokenizer

    def evaluating(self) -> AbstractContextManager[None]:
        return nullcontext()

    def outputs(self, tokens: Tensor, layout: SequenceLayout, types: Tensor | None = None) -> Tensor:
        """What the task's head says of every sequence or token, or the last states; packed batches are padded for it.

        Shape: tokens and types (batch, length) or (tokens,).
        """
        rows, padded = layout.pad(tokens)
        kinds = None if types is None else layout.pad(types)[0].long().numpy()
        is_token = torch.ones_like(rows) if padded.is_token is None else padded.is_token
        found = torch.from_numpy(self.graph.rows(rows.long().numpy(), is_token.numpy(), kinds))
        return layout.unpad(found, tokens) if self.is_for_tokens else found


def _lacking(*packages: str) -> str | None:
    """Half a sentence on the packages that are not installed; None if all are."""
    missing = [package for package in packages if find_spec(package) is None]
    return f"needs {' and '.join(missing)}: pip install 'bertsmith[onnx]'" if missing else None


def _plain(model: Model) -> Model:
    """The model in eval mode, in float32 and on the CPU; a copy if it is not so already."""
    is_plain = all(p.device.type == "cpu" and p.dtype == torch.float32 for p in model.parameters())
    return model if is_plain and not model.training else copy.deepcopy(model).to("cpu", torch.float32).eval()


def _difference(model: Model, runner: OnnxRunner, samples: Sequence[Inputs]) -> Difference:
    """The largest difference between a graph and its model at real tokens."""

    def real(outputs: Tensor, batch: Inputs) -> Tensor:
        return outputs[batch.layout.is_token] if runner.is_for_tokens and batch.layout.is_token is not None else outputs

    def wants(batch: Inputs) -> Tensor:
        if runner.head == "masked_tokens":
            # by the way that training takes, with the places of all real tokens
            is_token = torch.ones_like(batch.tokens) if batch.layout.is_token is None else batch.layout.is_token
            positions = is_token.flatten().nonzero().squeeze(-1)
            output = model.run(EncoderInputs(*batch), Want(masked_positions=positions))
            scores: Tensor = model.heads["masked_tokens"](output.masked_states, model.token_table)
            return scores
        if runner.head is None:
            return real(model.run(EncoderInputs(*batch)).last, batch)
        return real(model.outputs(*batch), batch)

    def finds(batch: Inputs) -> Tensor:
        found = real(runner.outputs(*batch), batch)
        return found.flatten(0, 1) if runner.head == "masked_tokens" and found.dim() == 3 else found

    batches, said = probes(model, runner.head, samples)
    return compared(batches, said, wants, finds)

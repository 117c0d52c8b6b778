"""ONNX Runtime as an engine: the model is one file, model.onnx, and runs without PyTorch's kernels."""

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch
from torch import Tensor

from bertsmith.batches.layout import SequenceLayout
from bertsmith.checkpoint.files import read_json, write_json
from bertsmith.checkpoint.store import FORMAT, read_config
from bertsmith.engines.base import Engine, Inputs, Precision
from bertsmith.engines.onnx_graph import (
    OPSET,
    AskedHead,
    check_graph,
    graph_head,
    graph_notes,
    input_names,
    write_graph,
)
from bertsmith.engines.onnx_precision import quantise_dynamic, quantise_static, reduces_range
from bertsmith.engines.onnx_probes import Difference, compared, probes
from bertsmith.errors import InputError
from bertsmith.models.config import ModelConfig
from bertsmith.models.model import Model
from bertsmith.runtime.graph import GRAPH_FILE, NOTES_FILE, Graph, GraphHead, open_session
from bertsmith.text.tokenizer import Tokenizer

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
            states, _ = model.masked_states(*batch, is_token.flatten().nonzero().squeeze(-1))
            scores: Tensor = model.heads["masked_tokens"](states, model.token_table)
            return scores
        if runner.head is None:
            return real(model.encoder(*batch, table=model.given_table), batch)
        return real(model.outputs(*batch), batch)

    def finds(batch: Inputs) -> Tensor:
        found = real(runner.outputs(*batch), batch)
        return found.flatten(0, 1) if runner.head == "masked_tokens" and found.dim() == 3 else found

    batches, said = probes(model, runner.head, samples)
    return compared(batches, said, wants, finds)

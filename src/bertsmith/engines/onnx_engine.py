"""ONNX Runtime engine: writes model.onnx and compares it with the PyTorch model."""

import copy
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bertsmith.answers.chart import WEIGHTS_FILE, SpanWeights
from bertsmith.checkpoint.hf.wrapped import FORMAT
from bertsmith.checkpoint.store import read_config
from bertsmith.data.layout import SequenceLayout
from bertsmith.engines.base import Engine, Inputs, Precision, Sample
from bertsmith.engines.onnx_graph import (
    HeadChoice,
    check_graph,
    graph_head,
    graph_metadata,
    halve,
    quantise_dynamic,
    quantise_static,
    reduces_range,
    write_graph,
)
from bertsmith.engines.onnx_session import GRAPH_FILE, METADATA_FILE, Graph, GraphHead, Session, open_session
from bertsmith.engines.onnx_trace import OPSET, input_names, max_input_length
from bertsmith.errors import InputError
from bertsmith.files import read_json, write_json
from bertsmith.layers.subnet import Subnet
from bertsmith.models.config import ModelConfig
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.model import Model
from bertsmith.text.support_desk import messages
from bertsmith.text.tokenizer import Tokenizer

TOLERANCES: dict[Precision, float] = {"float32": 1e-4, "float16": 2e-2}
"""Maximum difference between a graph and its model, relative to max(1, largest output); 8 bits have no limit."""


class OnnxEngine(Engine):
    """Write a model as an ONNX graph, compare the two, and run it with ONNX Runtime."""

    name = "onnxruntime"
    precisions: ClassVar[tuple[Precision, ...]] = ("float32", "float16", "int8", "int8_static")

    def missing(self, *, to_write: bool = False) -> str | None:
        return missing_packages("onnxruntime", *(("onnx", "onnxscript") if to_write else ()))

    def write(
        self,
        model: Model,
        folder: Path,
        precision: Precision,
        samples: Sequence[Sample] = (),
        *,
        head: HeadChoice = "auto",
    ) -> None:
        """Write the graph and its files into a folder; `head` selects the output of the graph."""
        missing = self.missing(to_write=True)
        if missing is not None:
            raise InputError(f"engine is {self.name!r}, which {missing}")
        if precision == "int8_static" and not samples:
            raise InputError(
                "precision is 'int8_static', which needs samples to calibrate activation ranges; pass samples"
            )
        check_graph(model)
        output_head = graph_head(model.config, head)
        with TemporaryDirectory(dir=folder, prefix=".onnx-") as name, torch.no_grad():
            new = Path(name)
            inputs = [sample for sample in samples if isinstance(sample, Inputs)]
            self._write(_as_float32(model), new, precision, inputs, output_head)
            for path in sorted(new.iterdir()):
                path.replace(folder / path.name)

    def open(self, folder: Path, precision: Precision, *, threads: int | None = None) -> "OnnxRunner":
        config = read_config(folder)
        metadata = read_json(folder / METADATA_FILE) if (folder / METADATA_FILE).is_file() else {}
        head = metadata.get("head", graph_head(config))
        tokenizer = Tokenizer.load(folder) if (folder / "tokenizer.json").exists() else None
        weights = SpanWeights.load(folder / WEIGHTS_FILE) if head == "chart" else None
        return OnnxRunner(open_session(folder / GRAPH_FILE, threads), config, tokenizer, head, weights)

    def _write(
        self, model: Model, folder: Path, precision: Precision, samples: Sequence[Inputs], head: GraphHead | None
    ) -> None:
        write_json(folder / "config.json", {"bertsmith": FORMAT, "model": model.config.plain()})
        if model.tokenizer is not None:
            model.tokenizer.save(folder)
        weights = model.span_weights if head == "chart" else None
        if weights is not None:
            weights.save(folder / WEIGHTS_FILE)
        path, names = folder / GRAPH_FILE, input_names(model.config)
        if precision == "float32":
            write_graph(model, path, head)
        else:
            with TemporaryDirectory(dir=folder, prefix=".float32-") as name:
                graph = Path(name) / GRAPH_FILE
                write_graph(model, graph, head)
                if precision == "float16":
                    halve(graph, path)
                elif precision == "int8":
                    quantise_dynamic(graph, path)
                else:
                    quantise_static(graph, path, names, samples)
        runner = OnnxRunner(open_session(path, None), model.config, model.tokenizer, head)
        difference = measure_difference(model, runner, samples)
        if not math.isfinite(difference.absolute):
            raise InputError("the outputs of the ONNX graph are not finite; the model's weights are too large")
        tolerance = TOLERANCES.get(precision, math.inf)
        if not difference.absolute <= tolerance * max(1.0, difference.largest_output):
            raise InputError(
                f"the ONNX graph differs from the model by {difference.absolute:.1e} (largest output: "
                f"{difference.largest_output:.1e}); allowed: up to {tolerance:.0e} × max(1, largest "
                "output)"
            )
        metadata = {**asdict(graph_metadata(model.config, head)), "outputs": ["outputs"]}
        metadata |= {"opset": OPSET, "precision": precision}
        metadata |= {"largest_difference": difference.relative, "largest_absolute_difference": difference.absolute}
        metadata |= {"largest_output": difference.largest_output, "compared_on": difference.inputs}
        metadata |= {"compared_sequences": difference.sequences}
        metadata |= {"compared_lengths": [difference.min_length, difference.max_length]}
        if precision.startswith("int8"):
            metadata["weights_have_7_bits"] = reduces_range()
        write_json(folder / METADATA_FILE, metadata)


class OnnxRunner:
    """Run batches through an ONNX graph with one output (`head`)."""

    torch_model = None
    has_subnets = False
    has_early_exits = False
    mean_layers = None

    def __init__(
        self,
        session: Session,
        config: ModelConfig,
        tokenizer: Tokenizer | None,
        head: GraphHead | None,
        span_weights: SpanWeights | None = None,
    ) -> None:
        self.span_weights = span_weights
        self.session, self.config, self.tokenizer, self.head = session, config, tokenizer, head
        self.graph = Graph(session, graph_metadata(config, head))
        self.is_for_tokens = self.graph.is_for_tokens

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def can_embed(self) -> bool:
        return self.head in (None, "embedder")

    @property
    def can_fill_masks(self) -> bool:
        return self.head == "masked_tokens"

    def require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InputError("this ONNX folder has no tokenizer.json; export a model that has a tokenizer")
        return self.tokenizer

    def evaluating(self) -> AbstractContextManager[None]:
        return nullcontext()

    def outputs(
        self,
        tokens: Tensor,
        layout: SequenceLayout,
        types: Tensor | None = None,
        *,
        subnet: Subnet | None = None,
        sizes: Tensor | None = None,
    ) -> Tensor:
        """Return the outputs of the head or the last hidden states; packed batches are padded.

        Shape: tokens and types (batch, length) or (tokens,).
        """
        if subnet is not None:
            raise InputError("subnet is set, but an ONNX graph has one size; allowed: None")
        rows, padded = layout.pad(tokens)
        token_types = None if types is None else layout.pad(types)[0].long().numpy()
        is_token = torch.ones_like(rows) if padded.is_token is None else padded.is_token
        outputs = torch.from_numpy(self.graph.rows(rows.long().numpy(), is_token.numpy(), token_types))
        return layout.unpad(outputs, tokens) if self.is_for_tokens else outputs

    def vectors(self, inputs: EncoderInputs) -> Tensor:
        """Return the embedder's output, or the mean of the hidden states."""
        outputs = self.outputs(inputs.tokens, inputs.layout, inputs.types, subnet=inputs.subnet)
        return outputs if self.head == "embedder" else inputs.layout.means(outputs)

    def mask_probabilities(self, inputs: EncoderInputs, positions: Tensor) -> Tensor:
        """Return the probability of every vocabulary entry at some positions, (positions, vocabulary)."""
        scores = self.outputs(inputs.tokens, inputs.layout, inputs.types, subnet=inputs.subnet)
        scores = scores.flatten(0, -2)  # (tokens, vocabulary)
        return scores.index_select(0, positions).float().softmax(-1)


def missing_packages(*packages: str) -> str | None:
    """Return "needs …: pip install …" for packages that are not installed, or None."""
    missing = [package for package in packages if find_spec(package) is None]
    return f"needs {' and '.join(missing)}: pip install 'bertsmith[onnx]'" if missing else None


def _as_float32(model: Model) -> Model:
    """Return the model in eval mode, in float32 and on the CPU; copied if needed."""
    is_float32 = all(p.device.type == "cpu" and p.dtype == torch.float32 for p in model.parameters())
    return model if is_float32 and not model.training else copy.deepcopy(model).to("cpu", torch.float32).eval()


MAX_PROBE_LENGTH = 2048  # attention over longer sequences takes gigabytes
_RAGGED_LENGTH = 128  # maximum length in a batch of several sequences
_MESSAGES = 6
_SAMPLE_BATCHES = 4


class Difference(NamedTuple):
    """Largest difference between a graph and its model, and the inputs it was measured on."""

    absolute: float
    relative: float
    """Relative to the model's largest output in the batch."""
    largest_output: float
    sequences: int
    min_length: int
    max_length: int
    inputs: str
    """Description of the inputs."""


def measure_difference(model: Model, runner: OnnxRunner, samples: Sequence[Inputs]) -> Difference:
    """Compare a graph with its model on the real tokens of probe batches and samples."""
    batches, description = probe_batches(model, runner.head, samples)
    absolute, relative, largest = [], [], []
    lengths: list[int] = []
    for batch in batches:
        expected, actual = _model_outputs(model, runner, batch), _real_tokens(runner, runner.outputs(*batch), batch)
        if runner.head == "masked_tokens" and actual.dim() == 3:
            actual = actual.flatten(0, 1)
        difference, size = float((actual - expected).abs().max()), float(expected.abs().max())
        absolute.append(difference)
        relative.append(difference / max(size, 1e-12))
        largest.append(size)
        lengths += batch.layout.lengths().tolist()

    def worst(differences: list[float]) -> float:
        return max(differences, key=lambda value: float("inf") if value != value else value)  # NaN counts as worst

    return Difference(
        worst(absolute), worst(relative), max(largest), len(lengths), min(lengths), max(lengths), description
    )


def _real_tokens(runner: OnnxRunner, outputs: Tensor, batch: Inputs) -> Tensor:
    return outputs[batch.layout.is_token] if runner.is_for_tokens and batch.layout.is_token is not None else outputs


def _model_outputs(model: Model, runner: OnnxRunner, batch: Inputs) -> Tensor:
    """Return the outputs of the PyTorch model at real tokens, (…, outputs)."""
    if runner.head == "masked_tokens":
        # as in training, with all real tokens as masked positions
        is_token = torch.ones_like(batch.tokens) if batch.layout.is_token is None else batch.layout.is_token
        positions = is_token.flatten().nonzero().squeeze(-1)
        output = model.run(EncoderInputs(*batch), Want(masked_positions=positions))
        scores: Tensor = model.heads["masked_tokens"](output.masked_states, model.token_table)
        return scores
    if runner.head is None:
        return _real_tokens(runner, model.run(EncoderInputs(*batch)).last, batch)
    return _real_tokens(runner, model.outputs(*batch), batch)


def probe_batches(model: Model, head: GraphHead | None, samples: Sequence[Inputs]) -> tuple[list[Inputs], str]:
    """Return padded batches from one token up to the maximum length plus some samples, and their description."""
    limit = min(max_input_length(model.config, head) or model.config.encoder.embedding.max_length, MAX_PROBE_LENGTH)
    generator = np.random.default_rng(0)
    tokenizer, vocabulary = model.tokenizer, model.config.encoder.vocabulary
    stream = generator.integers(0, vocabulary, limit) if tokenizer is None else _message_tokens(tokenizer, limit)

    def sequence(length: int) -> np.ndarray:
        """First tokens of the stream, between the tokenizer's special tokens."""
        if tokenizer is None:
            return stream[:length]
        ends = [tokenizer.start], [tokenizer.separator]
        return np.concatenate([ends[0], stream[: max(0, length - 2)], ends[1]])[:length]

    ragged = min(limit, _RAGGED_LENGTH)
    batch_lengths = ((1,), (2, 1), (ragged, 1, (ragged + 1) // 2), (limit,))
    batches = [[sequence(length) for length in lengths] for lengths in batch_lengths]
    if tokenizer is not None:
        texts = list(islice(messages(), 0, 40 * _MESSAGES, 40))  # of different lengths
        batches.append([row[:limit] for row in tokenizer.encode(texts, padding=False)["input_ids"]])
    description = "random token ids, as the model has no tokenizer" if tokenizer is None else "English messages"
    if samples:
        description += " and rows of the task's data"
    types = model.config.encoder.embedding.types
    return [*(_padded_rows(rows, types) for rows in batches), *samples[:_SAMPLE_BATCHES]], description


def _message_tokens(tokenizer: Tokenizer, count: int) -> np.ndarray:
    """Return `count` tokens of concatenated messages."""
    tokens: list[int] = []
    texts = list(messages())
    for begin in range(0, len(texts), 64):
        for ids in tokenizer.encode_plain(texts[begin : begin + 64]):
            tokens += ids
        if len(tokens) >= count:
            break
    return np.resize(np.array(tokens or [tokenizer.unknown]), count)


def _padded_rows(rows: Sequence[np.ndarray], types: int) -> Inputs:
    """Pad sequences to rows; if the model has token types, the second half of each row has type 1."""
    lengths = torch.tensor([len(row) for row in rows])
    position = torch.arange(int(lengths.max()))
    is_token = position < lengths[:, None]
    tokens = torch.zeros(is_token.shape, dtype=torch.long)
    tokens[is_token] = torch.from_numpy(np.concatenate(rows).astype(np.int64))
    token_types = ((position >= (lengths / 2)[:, None]) & is_token).long() if types > 1 else None
    return Inputs(tokens, SequenceLayout.padded(is_token), token_types)

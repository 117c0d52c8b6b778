"""ONNX Runtime as an engine: the model is one file, model.onnx, and runs without PyTorch's kernels."""

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch
from torch import Tensor

from bertsmith.batches.layout import SequenceLayout
from bertsmith.checkpoint.files import write_json
from bertsmith.checkpoint.store import FORMAT, read_config
from bertsmith.engines.base import Engine, Inputs, Precision
from bertsmith.engines.onnx_graph import OPSET, check_graph, has_task_head, input_names, longest_input, write_graph
from bertsmith.engines.onnx_precision import feed, quantise_dynamic, quantise_static, reduces_range
from bertsmith.errors import InputError
from bertsmith.models.config import ModelConfig
from bertsmith.models.model import Model
from bertsmith.text.tokenizer import Tokenizer

GRAPH_FILE = "model.onnx"
NOTES_FILE = "onnx.json"
TOLERANCE = 1e-4
"""The largest difference from the model, as a share of its largest output, that a float32 graph may have."""
_PROBES = ((1,), (7,), (33, 12, 1), (128, 90, 127, 5))
"""The lengths of the batches on which a graph is compared with its model."""


class OnnxEngine(Engine):
    """Writes the model as an ONNX graph, compares the two, and runs it with ONNX Runtime."""

    name = "onnxruntime"
    precisions: ClassVar[tuple[Precision, ...]] = ("float32", "int8", "int8_static")

    def missing(self) -> str | None:
        return _lacking("onnxruntime")

    def write(self, model: Model, folder: Path, precision: Precision, samples: Sequence[Inputs] = ()) -> None:
        lacking = _lacking("onnxruntime", "onnx", "onnxscript")
        if lacking is not None:
            raise InputError(f"engine is {self.name!r}, which {lacking}")
        if precision == "int8_static" and not samples:
            raise InputError("precision is 'int8_static' and there are no samples to measure ranges on; give samples")
        check_graph(model)
        with TemporaryDirectory(dir=folder, prefix=".onnx-") as place, torch.no_grad():
            new = Path(place)
            self._write(_plain(model), new, precision, samples)
            for path in sorted(new.iterdir()):
                path.replace(folder / path.name)

    def open(self, folder: Path, precision: Precision, *, threads: int | None = None) -> "OnnxRunner":
        config = read_config(folder)
        tokenizer = Tokenizer.load(folder) if (folder / "tokenizer.json").exists() else None
        return OnnxRunner(_session(folder / GRAPH_FILE, threads), config, tokenizer)

    def _write(self, model: Model, folder: Path, precision: Precision, samples: Sequence[Inputs]) -> None:
        write_json(folder / "config.json", {"bertsmith": FORMAT, "model": model.config.plain()})
        if model.tokenizer is not None:
            model.tokenizer.save(folder)
        path, names = folder / GRAPH_FILE, input_names(model.config)
        if precision == "float32":
            write_graph(model, path)
        else:
            with TemporaryDirectory(dir=folder, prefix=".float32-") as place:
                graph = Path(place) / GRAPH_FILE
                write_graph(model, graph)
                if precision == "int8":
                    quantise_dynamic(graph, path)
                else:
                    quantise_static(graph, path, names, samples)
        difference = _difference(model, self.open(folder, precision), [*_probes(model), *samples[:4]])
        if precision == "float32" and not difference <= TOLERANCE:
            raise InputError(
                f"the ONNX graph of this model differs from it by {difference:.1e} of its largest output; "
                f"allowed: up to {TOLERANCE:.0e}"
            )
        notes: dict[str, Any] = {"opset": OPSET, "inputs": list(names), "outputs": ["outputs"]}
        notes |= {"precision": precision, "largest_difference": difference}
        if precision != "float32":
            notes["weights_have_7_bits"] = reduces_range()
        write_json(folder / NOTES_FILE, notes)


class OnnxRunner:
    """An ONNX file that answers batches as its model did."""

    def __init__(self, session: Any, config: ModelConfig, tokenizer: Tokenizer | None) -> None:
        self.session, self.config, self.tokenizer = session, config, tokenizer
        self.is_for_tokens: bool = len(session.get_outputs()[0].shape) == 3
        """Whether it speaks of every token: (batch, length, outputs)."""
        self._names = input_names(config)
        self._longest = longest_input(config)

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
        if self._longest is not None and layout.longest > self._longest:
            raise InputError(f"a sequence may have {layout.longest} tokens; this model takes at most {self._longest}")
        (array,) = self.session.run(None, feed(Inputs(tokens, layout, types), self._names))
        found = torch.from_numpy(array)
        return layout.unpad(found, tokens) if self.is_for_tokens else found


def _lacking(*packages: str) -> str | None:
    """Half a sentence on the packages that are not installed; None if all are."""
    missing = [package for package in packages if find_spec(package) is None]
    return f"needs {' and '.join(missing)}: pip install 'bertsmith[onnx]'" if missing else None


def _session(path: Path, threads: int | None) -> Any:
    import onnxruntime

    if not path.is_file():
        raise InputError(f"{str(path)!r} does not exist")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0  # 0: as many as there are cores
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its own classes, of no common base that is public
        raise InputError(f"{str(path)!r} is not an ONNX file that this ONNX Runtime reads: {error}") from None


def _plain(model: Model) -> Model:
    """The model in eval mode, in float32 and on the CPU; a copy if it is not so already."""
    is_plain = all(p.device.type == "cpu" and p.dtype == torch.float32 for p in model.parameters())
    return model if is_plain and not model.training else copy.deepcopy(model).to("cpu", torch.float32).eval()


def _probes(model: Model) -> list[Inputs]:
    """Batches of several shapes that look like texts: random pieces between the marks of the tokenizer."""
    encoder, tokenizer, longest = model.config.encoder, model.tokenizer, longest_input(model.config)
    generator, probes = torch.Generator().manual_seed(0), []
    for asked in _PROBES:
        lengths = torch.tensor([min(length, longest or length) for length in asked])
        is_token = torch.arange(int(lengths.max())) < lengths[:, None]
        tokens = torch.randint(0, encoder.vocabulary, is_token.shape, generator=generator)
        if tokenizer is not None:
            tokens[:, 0] = tokenizer.start
            tokens[torch.arange(len(lengths)), lengths - 1] = tokenizer.separator
            tokens = tokens.where(is_token, tokenizer.pad)
        types = None
        if encoder.embedding.types:
            types = torch.randint(0, encoder.embedding.types, tokens.shape, generator=generator).sort().values
        probes.append(Inputs(tokens, SequenceLayout.padded(is_token), types))
    return probes


def _difference(model: Model, runner: OnnxRunner, batches: Sequence[Inputs]) -> float:
    """The largest difference between a graph and its model at real tokens, as a share of the model's largest output."""
    differences = []
    for batch in batches:
        if has_task_head(model.config):
            wanted = model.outputs(*batch)
        else:
            wanted = model.encoder(*batch, table=model.given_table)
        found = runner.outputs(*batch)
        if runner.is_for_tokens and batch.layout.is_token is not None:
            wanted, found = wanted[batch.layout.is_token], found[batch.layout.is_token]
        differences.append(float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12)))
    return max(differences)

"""Run the graph of an ONNX folder with ONNX Runtime; imports no PyTorch, so that `bertsmith.runtime` can use it."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Protocol, get_args

import numpy as np

from bertsmith.answers.sequences import length_batches
from bertsmith.errors import InputError
from bertsmith.files import read_json, verify_file

GRAPH_FILE = "model.onnx"
METADATA_FILE = "onnx.json"

GraphHead = Literal["classifier", "tagger", "spans", "chart", "embedder", "masked_tokens"]
"""Head whose output a graph returns; a graph without one returns the last hidden states."""


INPUTS = ("input_ids", "attention_mask", "token_type_ids")
"""Names of the inputs that a graph may have."""


class _Output(Protocol):
    shape: Sequence[int | str]


class _Input(Protocol):
    name: str


class Session(Protocol):
    """The methods of onnxruntime.InferenceSession that are used here."""

    def get_inputs(self) -> Sequence[_Input]: ...

    def get_outputs(self) -> Sequence[_Output]: ...

    def run(self, names: None, inputs: dict[str, np.ndarray]) -> list[np.ndarray]: ...


@dataclass(frozen=True)
class GraphMetadata:
    """Inputs and limits of a graph; part of onnx.json."""

    inputs: tuple[str, ...]
    head: GraphHead | None
    vocabulary: int
    """Number of token ids."""
    max_length: int | None
    """Maximum length of a sequence; None if there is no limit."""
    text_length: int
    """Length to which `encode` and `fill_mask` truncate texts."""
    types: int
    """Number of token types."""

    @classmethod
    def read(cls, folder: Path) -> "GraphMetadata":
        """Read the onnx.json of a folder."""
        metadata = read_json(folder / METADATA_FILE)
        missing = [name for name in cls.__dataclass_fields__ if name not in metadata]
        if missing:
            raise InputError(
                f"{str(folder / METADATA_FILE)!r} has no {', '.join(missing)}; export the model again with this "
                "version of Bertsmith"
            )
        values = {name: metadata[name] for name in cls.__dataclass_fields__}
        is_valid = {
            "inputs": isinstance(values["inputs"], list) and all(name in INPUTS for name in values["inputs"]),
            "head": values["head"] is None or values["head"] in get_args(GraphHead),
            "max_length": values["max_length"] is None or _is_count(values["max_length"]),
            **{name: _is_count(values[name]) for name in ("vocabulary", "text_length", "types")},
        }
        wrong = next((name for name, valid in is_valid.items() if not valid), None)
        if wrong is not None:
            raise InputError(
                f"{str(folder / METADATA_FILE)!r}: {wrong} is {values[wrong]!r}, which is not valid; export the model "
                "again"
            )
        return cls(**{**values, "inputs": tuple(values["inputs"])})


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


class Graph:
    """A loaded ONNX graph; thread-safe."""

    def __init__(self, session: Session, metadata: GraphMetadata) -> None:
        self.session, self.metadata = session, metadata
        names = {one.name for one in session.get_inputs()}
        if names != set(metadata.inputs):
            raise InputError(
                f"{METADATA_FILE} names the inputs {', '.join(metadata.inputs)}, but the graph has "
                f"{', '.join(sorted(names))}; export the model again"
            )
        self.is_for_tokens: bool = len(session.get_outputs()[0].shape) == 3
        """Whether it has an output per token: (batch, length, outputs)."""

    def rows(self, tokens: np.ndarray, is_token: np.ndarray, types: np.ndarray | None = None) -> np.ndarray:
        """Run one batch of padded rows; `types` default to 0.

        Shape: (batch, length) each, int64 -> (batch, outputs) or (batch, length, outputs), float32.
        """
        max_length = self.metadata.max_length
        if max_length is not None and tokens.shape[1] > max_length:
            raise InputError(
                f"the sequences have up to {tokens.shape[1]} tokens; this model takes at most {max_length}"
            )
        arrays = {
            "input_ids": tokens,
            "attention_mask": is_token.astype(np.int64),
            "token_type_ids": np.zeros_like(tokens) if types is None else types,
        }
        (outputs,) = self.session.run(None, {name: arrays[name] for name in self.metadata.inputs})
        return outputs

    def sequences(
        self,
        sequences: Sequence[Sequence[int] | np.ndarray],
        types: Sequence[Sequence[int] | np.ndarray] | None = None,
        *,
        batch_tokens: int,
    ) -> list[np.ndarray]:
        """Run sequences in batches of similar lengths.

        Shape: (tokens,) each -> (outputs,) or (tokens, outputs) each. A batch has at most `batch_tokens`, padding
        included, or one sequence.
        """
        tokens = [self._checked(index, sequence) for index, sequence in enumerate(sequences)]
        token_types = None if types is None else [self._checked_types(i, row, tokens) for i, row in enumerate(types)]
        if token_types is not None and len(token_types) != len(tokens):
            raise InputError(f"types has {len(token_types)} rows for {len(tokens)} sequences; give one per sequence")
        results: list[np.ndarray] = [np.empty(0)] * len(tokens)
        for indices in length_batches(np.array([len(sequence) for sequence in tokens]), batch_tokens):
            batch = indices.tolist()
            outputs = self._batch(
                [tokens[i] for i in batch], None if token_types is None else [token_types[i] for i in batch]
            )
            for index, row in zip(batch, outputs, strict=True):
                results[index] = row[: len(tokens[index])] if self.is_for_tokens else row
        return results

    def _batch(self, tokens: list[np.ndarray], types: list[np.ndarray] | None) -> np.ndarray:
        lengths = np.array([len(sequence) for sequence in tokens])
        is_token = np.arange(lengths.max()) < lengths[:, None]

        def pad(sequences: list[np.ndarray]) -> np.ndarray:
            rows = np.zeros(is_token.shape, dtype=np.int64)
            rows[is_token] = np.concatenate(sequences)
            return rows

        return self.rows(pad(tokens), is_token, None if types is None else pad(types))

    def _checked(self, index: int, sequence: Sequence[int] | np.ndarray) -> np.ndarray:
        tokens = np.asarray(sequence)
        if tokens.ndim != 1 or not len(tokens) or tokens.dtype.kind not in "iu":
            raise InputError(f"sequence {index} is not a non-empty list of token ids")
        if tokens.min() < 0 or tokens.max() >= self.metadata.vocabulary:
            raise InputError(
                f"sequence {index} has a token id outside the vocabulary: 0 to {self.metadata.vocabulary - 1}"
            )
        return tokens.astype(np.int64)

    def _checked_types(self, index: int, row: Sequence[int] | np.ndarray, tokens: Sequence[np.ndarray]) -> np.ndarray:
        types = np.asarray(row)
        if index < len(tokens) and types.shape != tokens[index].shape:
            raise InputError(f"sequence {index} has {len(tokens[index])} tokens and {len(types)} types")
        if len(types) and (types.min() < 0 or types.max() >= max(1, self.metadata.types)):
            raise InputError(f"sequence {index} has a type outside 0 to {max(1, self.metadata.types) - 1}")
        return types.astype(np.int64)


def open_session(path: Path, threads: int | None) -> Session:
    """Open an ONNX file with ONNX Runtime; `threads` None for one per core."""
    if find_spec("onnxruntime") is None:
        raise InputError("running an ONNX folder needs onnxruntime: pip install onnxruntime")
    import onnxruntime

    verify_file(path)
    if threads is not None and threads < 1:
        raise InputError(f"threads is {threads}; allowed: 1 or more, or None for one per core")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0
    options.log_severity_level = 3
    try:
        session: Session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its classes have no common public base
        raise InputError(f"{str(path)!r} is not an ONNX file that this ONNX Runtime reads: {error}") from None
    return session

"""The graph of an ONNX folder: token sequences of any lengths in, arrays out."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bertsmith.errors import InputError

GRAPH_FILE = "model.onnx"
NOTES_FILE = "onnx.json"

GraphHead = Literal["classifier", "tagger", "spans", "embedder", "masked_tokens"]
"""What a graph ends with; one without any of these gives the last states."""


@dataclass(frozen=True)
class GraphNotes:
    """What must be known of a graph to feed it; part of onnx.json."""

    inputs: tuple[str, ...]
    head: GraphHead | None
    vocabulary: int
    """Token ids are below this."""
    longest: int | None
    """The most tokens of a sequence; None where any length goes."""
    text_length: int
    """The tokens to which `encode` and `fill_mask` cut a text."""
    types: int
    """How many kinds of segments the model tells apart."""

    @classmethod
    def read(cls, folder: Path) -> "GraphNotes":
        """What onnx.json in a folder says."""
        notes = read_object(folder / NOTES_FILE)
        missing = [name for name in cls.__dataclass_fields__ if name not in notes]
        if missing:
            raise InputError(
                f"{str(folder / NOTES_FILE)!r} does not say {', '.join(missing)}; export the model again with this "
                "version of Bertsmith"
            )
        found = {name: notes[name] for name in cls.__dataclass_fields__}
        return cls(**{**found, "inputs": tuple(found["inputs"])})


class Graph:
    """An ONNX file as a function; may be shared between threads."""

    def __init__(self, session: Any, notes: GraphNotes) -> None:
        self.session, self.notes = session, notes
        self.is_for_tokens: bool = len(session.get_outputs()[0].shape) == 3
        """Whether it speaks of every token: (batch, length, outputs)."""

    def rows(self, tokens: np.ndarray, is_token: np.ndarray, types: np.ndarray | None = None) -> np.ndarray:
        """What the graph says of one batch of padded rows; without types all tokens have type 0.

        Shape: (batch, length) each, int64 -> (batch, outputs) or (batch, length, outputs), float32.
        """
        longest = self.notes.longest
        if longest is not None and tokens.shape[1] > longest:
            raise InputError(f"a sequence may have {tokens.shape[1]} tokens; this model takes at most {longest}")
        arrays = {
            "input_ids": tokens,
            "attention_mask": is_token.astype(np.int64),
            "token_type_ids": np.zeros_like(tokens) if types is None else types,
        }
        (found,) = self.session.run(None, {name: arrays[name] for name in self.notes.inputs})
        array: np.ndarray = found
        return array

    def sequences(
        self,
        sequences: Sequence[Sequence[int] | np.ndarray],
        types: Sequence[Sequence[int] | np.ndarray] | None = None,
        *,
        batch_tokens: int,
    ) -> list[np.ndarray]:
        """What the graph says of each sequence; such as are about as long are run together.

        Shape: (tokens,) each -> (outputs,) or (tokens, outputs) each. A batch has at most `batch_tokens`, pads counted
        in, or one sequence.
        """
        tokens = [self._checked(index, sequence) for index, sequence in enumerate(sequences)]
        kinds = None if types is None else [self._checked_types(i, own, tokens) for i, own in enumerate(types)]
        if kinds is not None and len(kinds) != len(tokens):
            raise InputError(f"there are {len(tokens)} sequences and types of {len(kinds)}; they must be as many")
        found: list[np.ndarray] = [np.empty(0)] * len(tokens)
        order = sorted(range(len(tokens)), key=lambda index: -len(tokens[index]))
        begin = 0
        while begin < len(order):
            # the longest comes first, so the batch is that wide
            some = order[begin : begin + max(1, batch_tokens // len(tokens[order[begin]]))]
            said = self._batch([tokens[i] for i in some], None if kinds is None else [kinds[i] for i in some])
            for index, own in zip(some, said, strict=True):
                found[index] = own[: len(tokens[index])] if self.is_for_tokens else own
            begin += len(some)
        return found

    def _batch(self, tokens: list[np.ndarray], types: list[np.ndarray] | None) -> np.ndarray:
        lengths = np.array([len(sequence) for sequence in tokens])
        is_token = np.arange(lengths.max()) < lengths[:, None]

        def laid(parts: list[np.ndarray]) -> np.ndarray:
            rows = np.zeros(is_token.shape, dtype=np.int64)  # what stands at pads means nothing
            rows[is_token] = np.concatenate(parts)
            return rows

        return self.rows(laid(tokens), is_token, None if types is None else laid(types))

    def _checked(self, index: int, sequence: Sequence[int] | np.ndarray) -> np.ndarray:
        tokens = np.asarray(sequence)
        if tokens.ndim != 1 or not len(tokens) or tokens.dtype.kind not in "iu":
            raise InputError(f"sequence {index} is no list of token ids with at least one of them")
        if tokens.min() < 0 or tokens.max() >= self.notes.vocabulary:
            raise InputError(
                f"sequence {index} has a token id outside the vocabulary: 0 to {self.notes.vocabulary - 1}"
            )
        return tokens.astype(np.int64)

    def _checked_types(self, index: int, given: Sequence[int] | np.ndarray, tokens: Sequence[np.ndarray]) -> np.ndarray:
        types = np.asarray(given)
        if index < len(tokens) and types.shape != tokens[index].shape:
            raise InputError(f"sequence {index} has {len(tokens[index])} tokens and {len(types)} types")
        if len(types) and (types.min() < 0 or types.max() >= max(1, self.notes.types)):
            raise InputError(f"sequence {index} has a type outside 0 to {max(1, self.notes.types) - 1}")
        return types.astype(np.int64)


def open_session(path: Path, threads: int | None) -> Any:
    """ONNX Runtime's session of a file; `threads` for its products, None for as many as there are cores."""
    if find_spec("onnxruntime") is None:
        raise InputError("running an ONNX folder needs onnxruntime: pip install onnxruntime")
    import onnxruntime

    if not path.is_file():
        raise InputError(f"{str(path)!r} does not exist")
    if threads is not None and threads < 1:
        raise InputError(f"threads is {threads}; allowed: 1 or more, or None for as many as there are cores")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its own classes, of no common base that is public
        raise InputError(f"{str(path)!r} is not an ONNX file that this ONNX Runtime reads: {error}") from None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{str(path)!r} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{str(path)!r} must hold one JSON object")
    return content

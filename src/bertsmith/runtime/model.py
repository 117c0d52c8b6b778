"""Load and run an exported ONNX model; its predictions equal those of `bertsmith.tasks`."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias, overload

import numpy as np

from bertsmith.answers.chart import WEIGHTS_FILE, SpanWeights, span_tables
from bertsmith.answers.sequences import Answer, Features, TextEncoding, check_finite
from bertsmith.answers.texts import softmax
from bertsmith.engines.onnx_session import GRAPH_FILE, METADATA_FILE, Graph, GraphMetadata, open_session
from bertsmith.errors import InputError
from bertsmith.files import read_json
from bertsmith.runtime.tasks import ExportedTask, read_task
from bertsmith.text.rows import table_of
from bertsmith.text.tokenizer import Tokenizer

TASK_FILE = "task.json"
Filled: TypeAlias = list[list[tuple[str, float]]]
"""The most probable tokens of every mask of a text, with their probabilities."""
_BATCH_TOKENS = 512  # larger batches are no faster on a CPU, and much slower once they exceed its caches


def load(folder: str | Path, *, threads: int | None = None, batch_tokens: int = _BATCH_TOKENS) -> "OnnxModel":
    """Load a folder written by `bertsmith export --to onnx`.

    `threads`: threads of ONNX Runtime, None for one per core. `batch_tokens`: tokens of a batch, padding included.
    """
    folder = Path(folder)
    if not (folder / METADATA_FILE).is_file():
        problem = "has no " + METADATA_FILE if folder.is_dir() else "does not exist"
        raise InputError(f"{str(folder)!r} {problem}; give a folder that bertsmith export --to onnx wrote")
    if batch_tokens < 1:
        raise InputError(f"batch_tokens is {batch_tokens}; allowed: 1 or more")
    graph = Graph(open_session(folder / GRAPH_FILE, threads), GraphMetadata.read(folder))
    tokenizer = Tokenizer.load(folder) if (folder / "tokenizer.json").is_file() else None
    task = read_json(folder / TASK_FILE) if (folder / TASK_FILE).is_file() else None
    weights = SpanWeights.load(folder / WEIGHTS_FILE) if graph.metadata.head == "chart" else None
    return OnnxModel(graph, tokenizer, task, batch_tokens, weights)


class OnnxModel:
    """An exported model; thread-safe."""

    def __init__(
        self,
        graph: Graph,
        tokenizer: Tokenizer | None,
        content: dict[str, Any] | None,
        batch_tokens: int,
        span_weights: SpanWeights | None = None,
    ) -> None:
        self.span_weights = span_weights
        self.graph, self.tokenizer, self.batch_tokens = graph, tokenizer, batch_tokens
        self.task: ExportedTask[Any] | None = None if content is None else read_task(content)
        """None if the folder has no task.json."""
        outputs = graph.session.get_outputs()[0].shape[-1]
        has_labels = hasattr(self.task, "labels") and graph.metadata.head in ("classifier", "tagger")
        if has_labels and isinstance(outputs, int) and outputs != len(self.labels):
            raise InputError(
                f"{TASK_FILE} has {len(self.labels)} labels and the graph {outputs} outputs; export the model again"
            )
        sequences = (content or {}).get("sequences")
        self._length = sequences.get("length") if isinstance(sequences, dict) else None

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the task in the order of the outputs; empty for tasks without labels."""
        return tuple(getattr(self.task, "labels", ()))

    def predict(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the answer for each input: a label, a number, tags or a text, depending on the task.

        An input is a text, a tuple if the task reads several columns, or a mapping with these columns.
        """
        return [details["answer"] for details in self.details(inputs)]

    def details(self, inputs: Sequence[Any]) -> Sequence[Answer]:
        """Return the answer for each input with scores and other details."""
        if isinstance(inputs, str):
            raise InputError("predict takes a list of inputs, not a string; put it in a list")
        if self.task is None:
            raise InputError(f"this folder has no {TASK_FILE}, so it has no task to predict; use encode or outputs")
        encoding = self._encoding()
        table = table_of([self.task.row(one) for one in inputs], "inputs")
        if not len(table):
            return []
        examples = self.task.examples(table)
        features = self.task.features(examples, encoding)
        outputs = self._items(features)
        check_finite(outputs)
        return self.task.answers(examples, features, outputs)

    def encode(self, texts: str | Iterable[str]) -> np.ndarray:
        """Return one vector per text: the output of the embedder head, or else the mean of the hidden states.

        Shape: (texts, width), float32; (width,) for a single string.
        """
        if isinstance(texts, str):
            vector: np.ndarray = self.encode([texts])[0]
            return vector
        if self.graph.metadata.head not in ("embedder", None):
            raise InputError(
                f"this graph ends with a {self.graph.metadata.head} head, which returns no text embeddings; export the "
                "model before fine-tuning, or one fine-tuned for embedding"
            )
        vectors = self._texts(list(texts))
        check_finite(vectors)
        if self.graph.metadata.head is None:
            vectors = [states.mean(0) for states in vectors]
        width = int(self.graph.session.get_outputs()[0].shape[-1])
        return np.stack(vectors) if vectors else np.empty((0, width), dtype=np.float32)

    @overload
    def fill_mask(  # type: ignore[overload-overlap]  # a string is an iterable of strings, too
        self, text: str, *, top_k: int = ...
    ) -> Filled: ...
    @overload
    def fill_mask(self, text: Iterable[str], *, top_k: int = ...) -> list[Filled]: ...
    def fill_mask(self, text: str | Iterable[str], *, top_k: int = 5) -> Filled | list[Filled]:
        """Return the most probable tokens with their probabilities for every mask of the text; a list for a list."""
        if self.graph.metadata.head != "masked_tokens":
            raise InputError("this graph does not fill masks; export the model with --head masked_tokens")
        if not isinstance(text, str):
            return [self.fill_mask(one, top_k=top_k) for one in text]
        tokenizer = self._tokenizer()
        tokens = tokenizer.encode([text], None, self.graph.metadata.text_length)["input_ids"][0]
        is_mask = tokens == tokenizer.mask
        if not is_mask.any():
            mask = tokenizer.tokens([tokenizer.mask])[0]
            raise InputError(f"the text {text!r} has no {mask} to fill")
        (scores,) = self.outputs([tokens])
        probabilities = softmax(scores[is_mask])  # (masks, vocabulary)
        best = np.argsort(-probabilities, axis=-1, kind="stable")[:, :top_k]
        return [
            list(zip(tokenizer.tokens(ids), row[ids].tolist(), strict=True))
            for ids, row in zip(best, probabilities, strict=True)
        ]

    def outputs(
        self, sequences: Sequence[Sequence[int] | np.ndarray], types: Sequence[Sequence[int] | np.ndarray] | None = None
    ) -> list[np.ndarray]:
        """Return the outputs for each sequence of token ids, special tokens included.

        Shape: (tokens,) each -> (outputs,) from sequence heads, else (tokens, outputs), float32.
        """
        return self.graph.sequences(sequences, types, batch_tokens=self.batch_tokens)

    def _texts(self, texts: list[str]) -> list[np.ndarray]:
        encoded = self._tokenizer().encode(texts, None, self.graph.metadata.text_length, padding=False)
        return self.outputs(encoded["input_ids"], encoded["token_type_ids"] if self.graph.metadata.types else None)

    def _items(self, features: Features) -> list[np.ndarray]:
        """Return the outputs of every item, stacked for items with several sequences."""
        tokens, types = features.tokens, features.types
        count = len(tokens)
        outputs = self.outputs(
            [tokens[index] for index in range(count)],
            None if types is None else [types[index] for index in range(count)],
        )
        bounds = features.items.tolist()
        groups = (outputs[begin:end] for begin, end in pairwise(bounds))
        grouped = [group[0] if len(group) == 1 else np.stack(group) for group in groups]
        return grouped if self.span_weights is None else span_tables(features, grouped, self.span_weights)

    def _encoding(self) -> TextEncoding:
        length, max_length = self._length, self.graph.metadata.max_length
        if not isinstance(length, int):
            raise InputError(f"{TASK_FILE} has no sequences.length; export the model again")
        if max_length is not None and length > max_length:
            raise InputError(f"sequences.length is {length}; the model takes at most {max_length}")
        return TextEncoding(self._tokenizer(), length, self.graph.metadata.types > 1)

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InputError("this ONNX folder has no tokenizer.json; export a model that has a tokenizer")
        return self.tokenizer

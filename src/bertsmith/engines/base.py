"""Interfaces of engines, which write and open artefacts, and of runners, which run batches."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from bertsmith.answers.chart import SpanWeights
from bertsmith.data.layout import SequenceLayout
from bertsmith.data.pairs import PairBatch
from bertsmith.layers.subnet import Subnet
from bertsmith.models.config import ModelConfig
from bertsmith.models.encoder import EncoderInputs
from bertsmith.models.model import Model
from bertsmith.settings import Record
from bertsmith.text.tokenizer import Tokenizer

Precision = Literal["float32", "bfloat16", "float16", "int8", "int8_static", "int8_weights"]
"""float32, bfloat16, or one of three 8-bit modes: dynamic quantisation (int8), static quantisation with calibrated
activation ranges (int8_static), or 8-bit weights multiplied in float32 (int8_weights)."""


class Runner(Protocol):
    """Interface of everything that runs batches: a PyTorch model, a model with early exits, an ONNX graph.

    Shape: tokens and types (batch, length) or (tokens,).
    """

    config: ModelConfig
    tokenizer: Tokenizer | None

    @property
    def device(self) -> torch.device: ...

    @property
    def torch_model(self) -> Model | None:
        """The PyTorch model, for sub-networks and attention maps; None for an ONNX graph."""

    @property
    def is_for_tokens(self) -> bool:
        """Whether `outputs` has one row per token, not per sequence."""

    @property
    def span_weights(self) -> SpanWeights | None:
        """The weights that turn outputs of tokens into scores of spans; None without a chart head."""

    @property
    def has_subnets(self) -> bool:
        """Whether `outputs` accepts a `subnet`."""

    @property
    def has_early_exits(self) -> bool:
        """Whether sequences may exit before the last layer."""

    @property
    def mean_layers(self) -> float | None:
        """Mean number of layers per sequence since `evaluating` was entered; None without early exits."""

    @property
    def can_embed(self) -> bool: ...

    @property
    def can_fill_masks(self) -> bool: ...

    def require_tokenizer(self) -> Tokenizer: ...

    def evaluating(self) -> AbstractContextManager[None]:
        """Context manager for evaluation mode; entering the outermost one resets the early-exit counters."""

    def outputs(
        self,
        tokens: Tensor,
        layout: SequenceLayout,
        types: Tensor | None = None,
        *,
        subnet: Subnet | None = None,
        sizes: Tensor | None = None,
    ) -> Tensor:
        """Return the outputs of the task head: (sequences, outputs), or one row per token.

        `sizes` (items,) counts the sequences of each item, which exit together; without early exits it has no effect.
        """

    def vectors(self, inputs: EncoderInputs) -> Tensor:
        """Return one vector per sequence: the embedder's output, or the mean of the hidden states."""

    def mask_probabilities(self, inputs: EncoderInputs, positions: Tensor) -> Tensor:
        """Return the probability of every vocabulary entry at some positions of the flattened tokens.

        Shape: positions (positions,) -> (positions, vocabulary).
        """


class Inputs(NamedTuple):
    """A batch of inputs, for calibration and comparison.

    Shape: tokens and types (batch, length).
    """

    tokens: Tensor
    layout: SequenceLayout
    types: Tensor | None = None


Sample = Inputs | PairBatch
"""A batch that calibrates activation ranges; pairs of texts for translation models."""


class Engine(ABC):
    """A program that runs models; `ENGINES` in engines/artefact.py lists them."""

    name: ClassVar[str]
    precisions: ClassVar[tuple[Precision, ...]]

    def missing(self, *, to_write: bool = False) -> str | None:
        """Return why the engine cannot run, or write, models here ("needs …: pip install …"), or None if it can."""
        return None

    @abstractmethod
    def write(self, model: Model, folder: Path, precision: Precision, samples: Sequence[Sample] = ()) -> None:
        """Write the model into an existing folder; `samples` calibrate activations."""

    @abstractmethod
    def open(self, folder: Path, precision: Precision, *, threads: int | None = None) -> Runner:
        """Open a folder that `write` wrote; `threads` None for one per core."""


class Artefact(Record):
    """Content of artefact.json: engine and precision of the model in a folder."""

    engine: Literal["torch", "compiled", "onnxruntime"]
    precision: Precision = "float32"

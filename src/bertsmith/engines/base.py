"""The contract of an engine: it writes a model into a folder in one of its precisions, and runs it from there."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from bertsmith.data.layout import SequenceLayout
from bertsmith.models.config import ModelConfig
from bertsmith.models.model import Model
from bertsmith.settings import Record
from bertsmith.text.tokenizer import Tokenizer

Precision = Literal["float32", "bfloat16", "int8", "int8_static", "int8_weights"]
"""Of weights and products: as trained; half as wide; 8 bits with ranges of activations that are measured batch by batch
(int8) or were measured before (int8_static); 8 bits for the weights alone, which are stored so and widened to multiply.
"""


class Runner(Protocol):
    """What answers batches: a model, or a file that another program runs."""

    config: ModelConfig
    tokenizer: Tokenizer | None

    @property
    def device(self) -> torch.device: ...

    @property
    def is_for_tokens(self) -> bool:
        """Whether its head speaks of every token, not of whole sequences."""

    def require_tokenizer(self) -> Tokenizer: ...

    def evaluating(self) -> AbstractContextManager[None]: ...

    def outputs(self, tokens: Tensor, layout: SequenceLayout, types: Tensor | None = None) -> Tensor:
        """What the task's head says of every sequence or token.

        Shape: tokens and types (batch, length) or (tokens,).
        """


class Inputs(NamedTuple):
    """A batch as a model reads it, to measure ranges of activations with.

    Shape: tokens and types (batch, length).
    """

    tokens: Tensor
    layout: SequenceLayout
    types: Tensor | None = None


class Engine(ABC):
    """One way to run models; the table is in engines/artefact.py."""

    name: ClassVar[str]
    precisions: ClassVar[tuple[Precision, ...]]

    def missing(self) -> str | None:
        """What keeps the engine from running on this machine, as half a sentence; None if nothing does."""
        return None

    @abstractmethod
    def write(self, model: Model, folder: Path, precision: Precision, samples: Sequence[Inputs] = ()) -> None:
        """Puts the model's files into a folder that exists; `samples` are for precisions that measure activations."""

    @abstractmethod
    def open(self, folder: Path, precision: Precision, *, threads: int | None = None) -> Runner:
        """What was written, ready to answer; `threads` for its products, None for what the machine has."""


class Artefact(Record):
    """What artefact.json in a folder says: how the model in it is run."""

    engine: Literal["torch", "compiled", "onnxruntime"]
    precision: Precision = "float32"

"""The base of heads: their settings, and the combination of hidden states that task heads read."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.settings import Record


class HeadConfig(Record, ABC):
    """The settings of one kind of head."""

    kind: str

    @abstractmethod
    def build(self, width: int, embedding_width: int, vocabulary: int) -> nn.Module: ...


class FeaturesConfig(Record):
    """Hidden states of the encoder that a head reads (Devlin et al. 2019, section 5.3)."""

    layers: int = Field(default=1, ge=0)
    """Number of layers, counted from the last; 0 for the embedding alone."""
    skip: int = Field(default=0, ge=0)
    """Number of last layers to skip: 1 with layers = 1 is the second to last."""
    combine: Literal["sum", "weighted", "concatenate"] = "sum"
    """Sum of the layers, sum with learned softmax weights and scale, or concatenation."""

    @model_validator(mode="after")
    def _check_skip(self) -> "FeaturesConfig":
        if self.skip and not self.layers:
            raise ValueError(f"skip is {self.skip}, but layers is 0, the embedding alone; allowed: skip = 0")
        return self

    def check_depth(self, depth: int) -> None:
        """Raise InputError if an encoder with `depth` layers has too few."""
        if self.layers + self.skip > depth:
            raise InputError(
                f"head.features.layers is {self.layers} and head.features.skip {self.skip}; their sum may be at most "
                f"{depth}, the encoder's number of layers"
            )


class RecurrentConfig(Record):
    """A BiLSTM over the hidden states of every sequence."""

    layers: int = Field(default=2, gt=0)
    width: int = Field(default=768, gt=1, multiple_of=2)
    """Output width, both directions together."""


class LayerFeatures(nn.Module):
    """Combines the hidden states of some layers into one vector per token, of width `width`."""

    def __init__(self, width: int, config: FeaturesConfig, recurrent: RecurrentConfig | None) -> None:
        super().__init__()
        self.combine, self.skip = config.combine, config.skip
        self.layers = config.layers + config.skip if config.layers else 0
        """Number of last layers whose hidden states `forward` expects; 0 for the embedding's."""
        is_weighted = config.combine == "weighted" and config.layers > 1
        self.layer_weights = nn.Parameter(torch.zeros(config.layers)) if is_weighted else None
        self.scale = nn.Parameter(torch.ones(())) if is_weighted else None
        self.width = width * max(1, config.layers) if config.combine == "concatenate" else width
        self.recurrent = None
        if recurrent is not None:
            half = recurrent.width // 2
            self.recurrent = nn.LSTM(
                self.width, half, recurrent.layers, batch_first=True, bidirectional=True, dropout=0.0
            )
            self.width = 2 * half

    def forward(self, hidden_states: Sequence[Tensor], layout: SequenceLayout) -> Tensor:
        """Return one vector per token, in the layout of the hidden states.

        Shape: hidden_states (batch, length, width) or (tokens, width) each, the last layer's at the end.
        """
        combined = self._combine(hidden_states)
        if self.recurrent is None:
            return combined
        rows, padded = layout.pad(combined)
        # a packed batch may end in empty sequences, which LSTMs do not support; their outputs are dropped
        lengths = padded.lengths(rows.device).clamp(min=1).cpu()
        packed = pack_padded_sequence(rows, lengths, batch_first=True, enforce_sorted=False)
        outputs, _ = pad_packed_sequence(self.recurrent(packed)[0], batch_first=True, total_length=layout.max_length)
        return layout.unpad(outputs, combined)

    def _combine(self, hidden_states: Sequence[Tensor]) -> Tensor:
        hidden_states = hidden_states[: len(hidden_states) - self.skip]
        if len(hidden_states) == 1:
            return hidden_states[0]
        if self.combine == "concatenate":
            return torch.cat(list(hidden_states), dim=-1)
        stacked = torch.stack(list(hidden_states))  # (…, width) each -> (layers, …, width)
        if self.layer_weights is None or self.scale is None:
            return stacked.sum(0)
        return self.scale * torch.tensordot(self.layer_weights.softmax(0), stacked, dims=1)

    @torch.no_grad()
    def initialise(self, init_std: float, generator: torch.Generator | None) -> None:
        """Initialise the BiLSTM as PyTorch does, and layer weights equal with scale 1."""
        if self.scale is not None:
            self.scale.fill_(1.0)
        if self.recurrent is not None:
            limit = self.recurrent.hidden_size**-0.5
            for parameter in self.recurrent.parameters():
                parameter.uniform_(-limit, limit, generator=generator)

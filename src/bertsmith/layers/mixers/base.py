"""The contract of a mixer: the one place where the families of encoders differ."""

from abc import ABC, abstractmethod
from typing import Self

from torch import Tensor, nn

from bertsmith.layers.call import ForwardPass
from bertsmith.layers.subnet import LayerCut
from bertsmith.settings import Record


class Mixer(nn.Module, ABC):
    """Lets the positions of each sequence exchange what they know. The contract tests run over every kind."""

    heads: int

    @abstractmethod
    def forward(self, hidden: Tensor, call: ForwardPass) -> Tensor:
        """The mixed states, in the shape of `hidden`."""

    @abstractmethod
    def maps(self, hidden: Tensor, call: ForwardPass) -> Tensor:
        """How much each position takes from each other one: (batch, heads, longest, longest), rows are receivers."""

    @abstractmethod
    def reorder(self, heads: Tensor) -> None:
        """Puts the heads in the given order, most important first; the output does not change."""

    @abstractmethod
    def extract(self, cut: LayerCut) -> "Mixer":
        """A part of its own with the first heads only."""


class MixerConfig(Record, ABC):
    """The settings of one kind of mixer; `kind` is its name in the table."""

    heads: int

    @abstractmethod
    def check(self, width: int) -> None:
        """Raises ValueError if the mixer cannot stand in an encoder of this width."""

    @abstractmethod
    def build(self, width: int) -> Mixer: ...

    @abstractmethod
    def cut(self, cut: LayerCut, width: int) -> Self:
        """The config of the extracted part."""

    @abstractmethod
    def flops(self, width: int, length: int) -> int:
        """Floating-point operations of one token's forward pass in a sequence of `length` tokens."""

"""What one call of the encoder shares with all its parts."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from bertsmith.data.layout import SequenceLayout
from bertsmith.layers.elementwise import LayerGates
from bertsmith.layers.positions import Rotary, Turns
from bertsmith.layers.subnet import LayerCut
from bertsmith.ops.disentangled.positions import RelativePositions


@dataclass(frozen=True)
class Memory:
    """States that are looked at from outside: an encoder's output, or the states below an enhanced mask decoder.

    Shape: states (batch, length, width) or (tokens, width).
    """

    states: Tensor
    layout: SequenceLayout


@dataclass(frozen=True)
class ForwardPass:
    """The record of one call: nothing is written to a module while it runs."""

    layout: SequenceLayout
    """How the states that come in, the queries, lie."""
    cut: LayerCut | None = None
    """The units the present layer keeps; None for all."""
    gates: LayerGates | None = None
    """What the units of the present layer are multiplied by; None for nothing."""
    backend: str = "auto"
    """The form that was asked for; ops that have none of this name run "auto" (ops/dispatch.py)."""
    relative_positions: RelativePositions | None = None
    """The encoder's relative table and its indices, for mixers that read it."""
    turns: Mapping[Rotary, Turns] = field(default_factory=dict)
    """How far every token is turned, for mixers with rotary positions."""
    memory: Memory | None = None
    """What the queries look at; None for their own sequence."""
    is_causal: bool = False
    """Makes every mixer causal, whatever its config says."""

    @property
    def keep_heads(self) -> int | None:
        """How many heads the present layer keeps; None for all."""
        return None if self.cut is None else self.cut.heads

    @property
    def keep_neurons(self) -> int | None:
        """How many neurons the present layer keeps; None for all."""
        return None if self.cut is None else self.cut.neurons

    @property
    def head_gate(self) -> Tensor | None:
        """What the heads of the present layer are multiplied by; None for nothing."""
        return None if self.gates is None else self.gates.heads

    @property
    def key_layout(self) -> SequenceLayout | None:
        """How the memory lies; None where the queries look at their own sequence."""
        return None if self.memory is None else self.memory.layout

    def with_cut(self, cut: LayerCut | None) -> "ForwardPass":
        """The same call for a layer that keeps only these units; the call itself for None."""
        return self if cut is None else replace(self, cut=cut)

    def with_gates(self, gates: LayerGates | None) -> "ForwardPass":
        """The same call for a layer whose units are multiplied by these; the call itself for None."""
        return self if gates is None else replace(self, gates=gates)

    def with_memory(self, memory: Memory | None) -> "ForwardPass":
        """The same call for a part that looks at something else."""
        return replace(self, memory=memory)

"""The record that one forward pass of an encoder shares with all its layers."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from bertsmith.data.layout import SequenceLayout
from bertsmith.layers.elementwise import LayerGates
from bertsmith.layers.positions import Rotary, Rotation
from bertsmith.layers.subnet import LayerCut
from bertsmith.ops.disentangled.positions import RelativePositions


@dataclass(frozen=True)
class Memory:
    """Hidden states outside the queries' sequence: an encoder's output, or the keys of an enhanced mask decoder.

    Shape: hidden_states (batch, length, width) or (tokens, width).
    """

    hidden_states: Tensor
    layout: SequenceLayout


@dataclass(frozen=True)
class ForwardContext:
    """Inputs of a forward pass besides the hidden states; modules are never written to while it runs."""

    layout: SequenceLayout
    """Layout of the hidden states, that is, of the queries."""
    cut: LayerCut | None = None
    """Units that the current layer keeps; None for all."""
    gates: LayerGates | None = None
    """Factors of the current layer's units; None for no gates."""
    backend: str = "auto"
    """Requested implementation; ops without one of this name use "auto" (ops/dispatch.py)."""
    relative_positions: RelativePositions | None = None
    """The encoder's relative position table and its indices, for mixers that read it."""
    rotations: Mapping[Rotary, Rotation] = field(default_factory=dict)
    """Rotary embedding of every token, for mixers that use one."""
    memory: Memory | None = None
    """Keys and values that the queries attend to; None for their own sequence."""
    is_causal: bool = False
    """Make every mixer causal, even if its config is not."""

    @property
    def keep_heads(self) -> int | None:
        """Number of heads that the current layer keeps; None for all."""
        return None if self.cut is None else self.cut.heads

    @property
    def keep_neurons(self) -> int | None:
        """Number of neurons that the current layer keeps; None for all."""
        return None if self.cut is None else self.cut.neurons

    @property
    def head_gate(self) -> Tensor | None:
        """Factors of the current layer's heads; None for no gate."""
        return None if self.gates is None else self.gates.heads

    @property
    def key_layout(self) -> SequenceLayout | None:
        """Layout of the memory; None where the queries attend to their own sequence."""
        return None if self.memory is None else self.memory.layout

    def with_cut(self, cut: LayerCut | None) -> "ForwardContext":
        """Return the context of a layer that keeps only these units; the context itself for None."""
        return self if cut is None else replace(self, cut=cut)

    def with_gates(self, gates: LayerGates | None) -> "ForwardContext":
        """Return the context of a layer with these gates; the context itself for None."""
        return self if gates is None else replace(self, gates=gates)

    def with_memory(self, memory: Memory | None) -> "ForwardContext":
        """Return the context of a mixer that attends to another memory."""
        return replace(self, memory=memory)

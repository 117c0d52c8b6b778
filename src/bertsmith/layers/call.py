"""What one call of the encoder shares with all its parts."""

from dataclasses import dataclass

from bertsmith.batches.layout import SequenceLayout
from bertsmith.layers.subnet import LayerCut


@dataclass(frozen=True)
class ForwardPass:
    """The record of one call: nothing is written to a module while it runs."""

    layout: SequenceLayout
    cut: LayerCut | None = None
    """The units the present layer keeps; None for all."""
    backend: str = "auto"
    """The form of the ops across positions."""

    def with_cut(self, cut: LayerCut) -> "ForwardPass":
        """The same call for a layer that keeps only these units."""
        return ForwardPass(self.layout, cut, self.backend)

"""The one encoder all families share: embedding → blocks → states."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bertsmith.batches.layout import SequenceLayout
from bertsmith.layers.block import Block
from bertsmith.layers.call import ForwardPass
from bertsmith.layers.embedding import Embedding
from bertsmith.layers.norm import Norm
from bertsmith.layers.subnet import LayerCut, Subnet


class Encoder(nn.Module):
    """Token ids → states, whole or as one of its sub-networks."""

    def __init__(self, embedding: Embedding, blocks: Sequence[Block], final_norm: Norm | None) -> None:
        super().__init__()
        self.embedding = embedding
        self.blocks = nn.ModuleList(blocks)
        self.final_norm = final_norm if final_norm is not None else nn.Identity()

    def forward(
        self,
        tokens: Tensor,
        layout: SequenceLayout,
        types: Tensor | None = None,
        *,
        subnet: Subnet | None = None,
        backend: str = "auto",
    ) -> Tensor:
        """The last states.

        Shape: tokens and types (batch, length), or (tokens,) when packed; the result has one more axis, the width.
        """
        call = ForwardPass(layout, backend=backend)
        hidden = self.embedding(tokens, layout, types)
        for block, cut in self._kept(subnet):
            hidden = block(hidden, call if cut is None else call.with_cut(cut))
        return self.final_norm(hidden)

    def layer_states(
        self, tokens: Tensor, layout: SequenceLayout, types: Tensor | None = None, *, subnet: Subnet | None = None
    ) -> list[Tensor]:
        """The states after the embedding and after every kept block, without the final norm."""
        call = ForwardPass(layout)
        states = [self.embedding(tokens, layout, types)]
        for block, cut in self._kept(subnet):
            states.append(block(states[-1], call if cut is None else call.with_cut(cut)))
        return states

    def attention_maps(self, tokens: Tensor, layout: SequenceLayout, types: Tensor | None = None) -> list[Tensor]:
        """The maps of every block, each (batch, heads, longest, longest): computed here only, never in training."""
        call = ForwardPass(layout)
        states = self.layer_states(tokens, layout, types)
        return [block.maps(hidden, call) for block, hidden in zip(self._blocks(), states, strict=False)]

    @property
    def units(self) -> tuple[LayerCut, ...]:
        """The heads and neurons of every layer."""
        return tuple(block.units for block in self._blocks())

    def reorder(self, heads: Sequence[Tensor], neurons: Sequence[Tensor]) -> None:
        """Puts the heads and neurons of every layer in the given orders; the full encoder's output does not change."""
        for block, head_order, neuron_order in zip(self._blocks(), heads, neurons, strict=True):
            block.mixer.reorder(head_order)
            block.feedforward.reorder(neuron_order)

    @torch.no_grad()
    def extract(self, subnet: Subnet) -> "Encoder":
        """An ordinary, smaller encoder that computes what this one does with `subnet`."""
        blocks = [self._blocks()[index].extract(cut) for index, cut in subnet.cuts(self.units)]
        final_norm = copy.deepcopy(self.final_norm)
        return Encoder(copy.deepcopy(self.embedding), blocks, final_norm if isinstance(final_norm, Norm) else None)

    def _kept(self, subnet: Subnet | None) -> list[tuple[Block, LayerCut | None]]:
        blocks = self._blocks()
        if subnet is None:
            return [(block, None) for block in blocks]
        return [(blocks[index], cut) for index, cut in subnet.cuts(self.units)]

    def _blocks(self) -> list[Block]:
        return list(self.blocks)  # type: ignore[arg-type]

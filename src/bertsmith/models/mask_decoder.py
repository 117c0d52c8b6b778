"""The enhanced mask decoder of DeBERTa: the last layer, asked again by queries that know their absolute place."""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.layers.block import Block
from bertsmith.layers.context import ForwardContext, Memory


class MaskDecoder(nn.Module):
    """A table of absolute positions; the layer it works with is the encoder's own, handed in by the caller.

    As in the released code: I = H + P[position], then `steps` times I = layer(queries I, keys and values H), where H is
    what enters the last layer (He et al. 2021, section 3.2, has I = P[position] alone).
    """

    def __init__(self, longest: int, width: int, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.table = nn.Parameter(torch.empty(longest, width))

    def forward(self, below: Tensor, block: Block, context: ForwardContext, places: Tensor) -> Tensor:
        """The states at some places only, (places, width), in any order.

        On the CPU a place may be asked for several times. On a GPU and in a compiled step each may be asked for once,
        as training and `fill_mask` do: how many queries the fullest sequence has is not read there, but bounded.
        Shape: below (batch, length, width) or (tokens, width); places (places,) index its flattened tokens.
        """
        layout, longest = context.layout, self.table.shape[0]
        if layout.longest > longest:
            raise InputError(f"a sequence may have {layout.longest} tokens; this mask decoder takes at most {longest}")
        sorted_places, order = places.sort()
        positions = layout.positions(below[..., 0]).flatten()[sorted_places]
        queries = below.flatten(0, -2).index_select(0, sorted_places) + embedding(positions, self.table)
        sequence = layout.sequence_index(below[..., 0]).flatten()[sorted_places]
        relative = context.relative_positions
        if relative is not None:
            is_asked_once = below.is_cuda or torch.compiler.is_compiling()
            relative = replace(relative, query_positions=positions, are_distinct=is_asked_once)
        context = replace(
            context,
            layout=_query_layout(sequence, layout),
            memory=Memory(below, layout),
            relative_positions=relative,
        )
        for _ in range(self.steps):
            queries = block(queries, context)
        return queries.index_select(0, order.argsort())

    def everywhere(self, below: Tensor, block: Block, context: ForwardContext) -> Tensor:
        """The states at every place of padded rows, (batch, length, width), as `forward` has them."""
        queries = below + embedding(context.layout.positions(below[..., 0]), self.table)
        context = replace(context, memory=Memory(below, context.layout))
        for _ in range(self.steps):
            queries = block(queries, context)
        return queries


def _query_layout(sequence: Tensor, layout: SequenceLayout) -> SequenceLayout:
    """How sorted queries lie, from the sequence each belongs to, (queries,)."""
    bounds = torch.arange(layout.batch + 1, device=sequence.device)
    starts = torch.searchsorted(sequence, bounds)
    if not (sequence.is_cuda or torch.compiler.is_compiling()):
        return SequenceLayout.packed(starts.int(), max(1, int(starts.diff().max())))
    # reading it would make the host wait, and a compiled step has one shape: as many queries as a sequence has tokens
    longest = min(layout.longest, sequence.shape[0])
    torch._assert_async((starts.diff() <= longest).all(), "a place is asked for more often than once")
    return SequenceLayout.packed(starts.int(), longest)

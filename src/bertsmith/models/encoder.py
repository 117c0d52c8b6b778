"""The one stack all families share: embedding → blocks → states. With cross mixers in its blocks it is a decoder."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.layers.block import Block
from bertsmith.layers.context import ForwardContext, Memory
from bertsmith.layers.elementwise import LayerGates
from bertsmith.layers.embedding import Disturbance, Embedding
from bertsmith.layers.feedforward import FeedForward
from bertsmith.layers.halting import Pondering
from bertsmith.layers.mixers import Mixer
from bertsmith.layers.positions import RelativeTable, turns_by_place
from bertsmith.layers.subnet import LayerCut, Subnet, is_even
from bertsmith.ops.dispatch import check_backend


@dataclass(frozen=True)
class Encoded:
    """The last states, and how long each position took to get there where positions halt (models/universal.py)."""

    states: Tensor
    pondering: Pondering | None = None
    below: tuple[Tensor, ...] = ()
    """The states of the layers below the last one that were asked for, in their order."""
    trail: tuple[Tensor, ...] = ()
    """What entered every kept block and what left the last one, before the final norm, where it was asked for."""
    passed: tuple[tuple[Block, ForwardContext], ...] = ()
    """The blocks on that way, each with the call that was meant for it."""
    norm: Callable[[Tensor], Tensor] | None = None
    """The final norm, which what is on the way has not passed."""

    def read(self, number: int) -> Tensor:
        """A state on the way as a head would read it: with norms first, raw states grow from layer to layer, and only
        the final norm makes them comparable."""
        assert self.norm is not None, "a trail was asked for"
        return self.norm(self.trail[number])

    def projected(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of a block on the way, each (…, heads, head width), as the states lie."""
        block, context = self.passed[index]
        return block.projected(self.trail[index], context)

    def scores(self, index: int) -> Tensor:
        """The scores of attention of a block on the way, (batch, heads, longest, longest), -inf where none counts."""
        block, context = self.passed[index]
        return block.scores(self.trail[index], context)


class Encoder(nn.Module):
    """Token ids → states, whole or as one of its sub-networks."""

    def __init__(
        self,
        embedding: Embedding,
        blocks: Sequence[Block],
        final_norm: nn.Module,
        relative: RelativeTable | None = None,
        *,
        layer_drop: float = 0.0,
    ) -> None:
        super().__init__()
        self.layer_drop = layer_drop
        self.embedding = embedding
        self.relative = relative
        self.blocks = nn.ModuleList(blocks)
        self.final_norm = final_norm

    def forward(
        self,
        tokens: Tensor,
        layout: SequenceLayout,
        types: Tensor | None = None,
        *,
        subnet: Subnet | None = None,
        backend: str = "auto",
        memory: Memory | None = None,
        table: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """The last states; a decoder looks at a memory, and may be given the encoder's table of token vectors.

        With `is_causal` no token sees one that follows it, whatever the mixers' configs say.

        Shape: tokens and types (batch, length), or (tokens,) when packed; the result has one more axis, the width.
        """
        context = self.context(tokens, layout, backend, memory, is_causal=is_causal)
        hidden = self.embedding(tokens, layout, types, table)
        hidden, _ = self._through(self.kept(context, subnet), hidden)
        return self.final_norm(hidden)

    def run(
        self,
        tokens: Tensor,
        layout: SequenceLayout,
        types: Tensor | None = None,
        *,
        subnet: Subnet | None = None,
        backend: str = "auto",
        table: Tensor | None = None,
        is_causal: bool = False,
        disturb: Disturbance | None = None,
        gates: Sequence[LayerGates] | None = None,
        layers: int = 1,
        with_trail: bool = False,
    ) -> Encoded:
        """The last states with what else there is to know of the way to them, for objectives.

        `disturb` changes the vectors that enter; `gates`, one for each layer, kept or not, what its units say; with
        `layers` the states of so many last layers are kept as well; with 0 the embedding's are all there is.
        """
        hidden = self.embedding(tokens, layout, types, table, disturb)
        if layers == 0:
            return Encoded(self.final_norm(hidden))
        context = self.context(tokens, layout, backend, is_causal=is_causal)
        states: list[Tensor] | None = [] if layers > 1 or with_trail else None
        kept = self.kept(context, subnet, gates)
        hidden, pondering = self._through(kept, hidden, states)
        last = self.final_norm(hidden)
        if states is None:
            return Encoded(last, pondering)
        if len(states) <= layers and layers > 1:
            raise InputError(f"the states of {layers} layers are asked for; this encoder has {len(states) - 1}")
        below = tuple(self.final_norm(state) for state in states[-layers:-1])
        if not with_trail:
            return Encoded(last, pondering, below)
        return Encoded(last, pondering, below, tuple(states), tuple(kept), self.final_norm)

    def before_last(
        self,
        tokens: Tensor,
        layout: SequenceLayout,
        types: Tensor | None = None,
        *,
        subnet: Subnet | None = None,
        backend: str = "auto",
        table: Tensor | None = None,
        is_causal: bool = False,
    ) -> tuple[Tensor, Block, ForwardContext]:
        """The states that enter the last kept block, that block, and the call that is meant for it."""
        *before, last = self.kept(self.context(tokens, layout, backend, is_causal=is_causal), subnet)
        hidden, _ = self._through(before, self.embedding(tokens, layout, types, table))
        return hidden, *last

    def layer_states(
        self, tokens: Tensor, layout: SequenceLayout, types: Tensor | None = None, *, subnet: Subnet | None = None
    ) -> list[Tensor]:
        """What enters every kept block, and what leaves the last one, before the final norm."""
        states: list[Tensor] = []
        self._through(self.kept(self.context(tokens, layout), subnet), self.embedding(tokens, layout, types), states)
        return states

    def attention_maps(
        self,
        tokens: Tensor,
        layout: SequenceLayout,
        types: Tensor | None = None,
        *,
        memory: Memory | None = None,
        table: Tensor | None = None,
        subnet: Subnet | None = None,
    ) -> list[dict[str, Tensor]]:
        """The maps of every block that is kept by name, each (batch, heads, longest, longest): computed here only.

        A decoder's cross mixers add maps whose names begin with "cross_" and whose last axis is the memory's length.
        """
        context = self.context(tokens, layout, memory=memory)
        kept = self.kept(context, subnet)
        states: list[Tensor] = []
        self._through(kept, self.embedding(tokens, layout, types, table), states)
        return [block.maps(hidden, own) for (block, own), hidden in zip(kept, states, strict=False)]

    def context(
        self,
        tokens: Tensor,
        layout: SequenceLayout,
        backend: str = "auto",
        memory: Memory | None = None,
        *,
        is_causal: bool = False,
    ) -> ForwardContext:
        """The record of one call of this encoder's blocks; a backend that none of their ops has is refused.

        `tokens` is any tensor that lies in the layout.
        """
        mixers = [mixer for block in self._blocks() for mixer in (block.mixer, block.cross) if mixer is not None]
        check_backend((forms for mixer in mixers for forms in mixer.forms), backend)
        relative = None if self.relative is None else self.relative()
        turns = turns_by_place((mixer.rotary for mixer in mixers), tokens, layout)
        return ForwardContext(
            layout, backend=backend, relative_positions=relative, turns=turns, memory=memory, is_causal=is_causal
        )

    def kept(
        self, context: ForwardContext, subnet: Subnet | None = None, gates: Sequence[LayerGates] | None = None
    ) -> list[tuple[Block, ForwardContext]]:
        """The blocks a sub-network keeps, each with the call that is meant for it."""
        blocks = self._blocks()
        contexts = [context] * len(blocks) if gates is None else [context.with_gates(own) for own in gates]
        if subnet is None:
            return list(zip(blocks, contexts, strict=True))
        return [(blocks[index], contexts[index].with_cut(cut)) for index, cut in subnet.cuts(self.units)]

    @property
    def units(self) -> tuple[LayerCut, ...]:
        """The heads and neurons of every layer."""
        return tuple(block.units for block in self._blocks())

    def renew(self, step: int, seed: int) -> None:
        """The trainer's moment before a step: mixers that draw random features draw them anew when it is time."""
        renewed: set[Mixer] = set()
        for block in self._blocks():
            for mixer in (block.mixer, block.cross):
                if mixer is not None and mixer not in renewed:  # one that several layers share draws once
                    mixer.renew(step, seed, len(renewed))
                    renewed.add(mixer)

    def reorder(self, heads: Sequence[Tensor], neurons: Sequence[Tensor]) -> None:
        """Puts the heads and neurons of every layer in the given orders; the full encoder's output does not change.

        Layers that share a part must be given the same order for it.
        """
        orders: dict[Mixer | FeedForward, Tensor] = {}
        for layer, (block, *asked) in enumerate(zip(self._blocks(), heads, neurons, strict=True)):
            for part, order in block.orders(*asked).items():
                if not torch.equal(orders.setdefault(part, order), order):
                    name = type(part).__name__
                    raise InputError(f"layer {layer} shares its {name} with one before it; allowed: the same order")
        for part, order in orders.items():
            part.reorder(order)

    @torch.no_grad()
    def extract(self, subnet: Subnet) -> "Encoder":
        """An ordinary, smaller encoder that computes what this one does with `subnet`."""
        cuts = subnet.cuts(self.units)
        made: dict[nn.Module, nn.Module] = {}
        blocks = [self._blocks()[index].extract(cut, made if is_even(cuts) else {}) for index, cut in cuts]
        embedding, final_norm, relative = copy.deepcopy((self.embedding, self.final_norm, self.relative))
        return Encoder(embedding, blocks, final_norm, relative, layer_drop=self.layer_drop)

    def _through(
        self, kept: Sequence[tuple[Block, ForwardContext]], hidden: Tensor, states: list[Tensor] | None = None
    ) -> tuple[Tensor, Pondering | None]:
        """The states after some blocks, and how long positions took; `states` collects what enters each and leaves."""
        is_dropping = self.training and self.layer_drop > 0
        draws = torch.rand(len(kept), device=hidden.device) if is_dropping else None
        for place, (block, context) in enumerate(kept):
            if states is not None:
                states.append(hidden)
            left = block(hidden, context)
            # a dropped layer is computed and not used, so that its weights have a gradient, which is 0: processes
            # that drew other layers exchange gradients of all of them, and no draw is waited for
            hidden = left if draws is None else torch.where(draws[place] < self.layer_drop, hidden, left)
        if states is not None:
            states.append(hidden)
        return hidden, None

    def _blocks(self) -> list[Block]:
        return list(self.blocks)  # type: ignore[arg-type]

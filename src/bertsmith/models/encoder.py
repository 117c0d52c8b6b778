"""The stack that all families share: embedding → blocks → hidden states. With cross mixers it is a decoder.

`Encoder.run(inputs, want)` is the entry point: it takes `EncoderInputs` and a `Want`, which lists the outputs requested
besides the final hidden states, and returns an `EncoderOutput`. `Encoder.forward` is its short form.
"""

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
from bertsmith.layers.embedding import Embedding, Perturbation
from bertsmith.layers.feedforward import FeedForward
from bertsmith.layers.fixed_point import Convergence
from bertsmith.layers.halting import Pondering
from bertsmith.layers.mixers import Mixer
from bertsmith.layers.positions import RelativeTable, token_rotations
from bertsmith.layers.subnet import LayerCut, Subnet, is_even
from bertsmith.ops.dispatch import check_backend

BlockCall = tuple[Block, ForwardContext]
"""A block and the context it runs with."""


@dataclass(frozen=True)
class EncoderInputs:
    """One batch and the options of the forward pass.

    Shape: tokens and types (batch, length), or (tokens,) when packed.
    """

    tokens: Tensor
    layout: SequenceLayout
    types: Tensor | None = None
    subnet: Subnet | None = None
    """Sub-network to run; None for the whole encoder."""
    backend: str = "auto"
    """Implementation of the ops; "auto" takes the fastest that supports the inputs."""
    is_causal: bool = False
    """Mask all later tokens, even where the mixers' configs are not causal."""
    memory: Memory | None = None
    """Hidden states that a decoder's cross mixers attend to."""
    table: Tensor | None = None
    """Token vectors of another network, for an embedding that has none or holds the difference from them."""
    gates: Sequence[LayerGates] | None = None
    """Factors on the heads and neurons of every layer, including layers that the sub-network drops."""
    perturb: Perturbation | None = None
    """Function applied to the sum of token, position and type vectors before its norm."""


@dataclass(frozen=True)
class Want:
    """Requested outputs; by default the final hidden states alone."""

    layers: int = 1
    """Number of last layers whose hidden states are returned; 0 for the embedding's, which skips all layers."""
    all_hidden_states: bool = False
    """The input of every block and the output of the last, not normalised."""
    maps: bool = False
    """The attention or convolution maps of every block."""
    last_block: bool = True
    """False skips the last block: the result holds the block, its context and its input instead of hidden states."""
    task: bool = False
    """Outputs of the task head; models only."""
    masked_positions: Tensor | None = None
    """Flat positions, (positions,), whose hidden states the masked_tokens head reads; models only."""
    final: bool = False
    """Beside masked positions: the final hidden states as well, which a mask decoder does not need."""


FINAL_HIDDEN_STATES = Want()


@dataclass(frozen=True)
class EncoderOutput:
    """The requested outputs; reading one that was not requested raises.

    Shape: hidden states (batch, length, width), or (tokens, width) when packed.
    """

    norm: Callable[[Tensor], Tensor]
    """The encoder's final norm."""
    final: Tensor | None = None
    """The final hidden states; None where the last block was skipped."""
    hidden_states: tuple[Tensor, ...] = ()
    """Input of every block in `blocks` and output of the last, before the final norm, as far as they were requested."""
    blocks: tuple[BlockCall, ...] = ()
    """The blocks that belong to `hidden_states`."""
    maps: tuple[dict[str, Tensor], ...] = ()
    """Maps of every block by name, each (batch, heads, max_length, max_length). Names of cross-mixer maps begin with
    "cross_"; their last axis is the memory's length."""
    pondering: Pondering | None = None
    """Number of steps of every position, where positions halt (models/universal.py)."""
    convergence: Convergence | None = None
    """Residual and iterations of every sequence of an equilibrium encoder (models/equilibrium.py)."""
    task: Tensor | None = None
    masked: Tensor | None = None

    @property
    def last(self) -> Tensor:
        """The final hidden states."""
        return _requested(self.final, "final=True")

    @property
    def outputs(self) -> Tensor:
        """Outputs of the task head."""
        return _requested(self.task, "task=True")

    @property
    def masked_states(self) -> Tensor:
        """Hidden states at the masked positions, (positions, width)."""
        return _requested(self.masked, "masked_positions")

    def last_layers(self, count: int) -> tuple[Tensor, ...]:
        """Return the normalised hidden states of the last `count` layers, the final ones last."""
        return *(self.norm(hidden) for hidden in self.hidden_states[-count:-1]), self.last

    def normalised(self, index: int) -> Tensor:
        """Return one of `hidden_states` as a head reads it.

        In a pre-norm encoder raw hidden states grow from layer to layer; only the final norm makes them comparable.
        """
        return self.norm(self.hidden_states[index])

    def projections(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value of a block, each (…, heads, head width), in the layout of the hidden states."""
        block, context = self.blocks[index]
        return block.projections(self.hidden_states[index], context)

    def attention_scores(self, index: int) -> Tensor:
        """Return the attention scores of a block, (batch, heads, max_length, max_length), -inf at masked keys."""
        block, context = self.blocks[index]
        return block.scores(self.hidden_states[index], context)


def _requested(value: Tensor | None, request: str) -> Tensor:
    if value is None:
        raise InputError(f"this output was not requested; run the encoder with Want({request})")
    return value


class Encoder(nn.Module):
    """Token ids → hidden states, by the whole network or one of its sub-networks."""

    recomputes = False
    """Whether the backward pass evaluates layers again: not twice differentiable, and not for compiled training steps,
    sharded weights and observers of quantisation ranges."""

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
        """Return the final hidden states: `run` with fields of its inputs as arguments.

        Shape: tokens and types (batch, length), or (tokens,) when packed; the result has one more axis, the width.
        """
        return self.run(EncoderInputs(tokens, layout, types, subnet, backend, is_causal, memory, table)).last

    def run(self, inputs: EncoderInputs, want: Want = FINAL_HIDDEN_STATES) -> EncoderOutput:
        """Run the encoder on a batch and return the requested outputs."""
        hidden = self.embedding(inputs.tokens, inputs.layout, inputs.types, inputs.table, inputs.perturb)
        if want.layers == 0:
            return EncoderOutput(self.final_norm, self.final_norm(hidden))
        context = self.context(inputs.tokens, inputs.layout, inputs.backend, inputs.memory, is_causal=inputs.is_causal)
        blocks = self.active_blocks(context, inputs.subnet, inputs.gates)
        if not want.last_block:
            self._check_last_block()
            hidden, _ = self._through(blocks[:-1], hidden)
            return EncoderOutput(self.final_norm, hidden_states=(hidden,), blocks=(blocks[-1],))
        if want.layers > len(blocks):
            raise InputError(f"hidden states of {want.layers} layers are requested; this encoder has {len(blocks)}")
        collected: list[Tensor] | None = [] if want.layers > 1 or want.all_hidden_states or want.maps else None
        hidden, steps = self._through(blocks, hidden, collected)
        final = self.final_norm(hidden)
        pondering = steps if isinstance(steps, Pondering) else None
        convergence = steps if isinstance(steps, Convergence) else None
        if collected is None:
            return EncoderOutput(self.final_norm, final, pondering=pondering, convergence=convergence)
        calls = zip(blocks, collected, strict=False)  # not strict: `collected` ends with the output of the last block
        maps = tuple(block.maps(entering, own) for (block, own), entering in calls) if want.maps else ()
        return EncoderOutput(self.final_norm, final, tuple(collected), tuple(blocks), maps, pondering, convergence)

    def context(
        self,
        tokens: Tensor,
        layout: SequenceLayout,
        backend: str = "auto",
        memory: Memory | None = None,
        *,
        is_causal: bool = False,
    ) -> ForwardContext:
        """Return the context of this encoder's blocks; raise InputError for a backend that none of their ops has.

        `tokens` is any tensor in the layout.
        """
        mixers = [mixer for block in self._blocks() for mixer in (block.mixer, block.cross) if mixer is not None]
        check_backend((backends for mixer in mixers for backends in mixer.backends), backend)
        relative = None if self.relative is None else self.relative()
        rotations = token_rotations((mixer.rotary for mixer in mixers), tokens, layout)
        return ForwardContext(
            layout,
            backend=backend,
            relative_positions=relative,
            rotations=rotations,
            memory=memory,
            is_causal=is_causal,
        )

    def active_blocks(
        self, context: ForwardContext, subnet: Subnet | None = None, gates: Sequence[LayerGates] | None = None
    ) -> list[BlockCall]:
        """Return the blocks that a sub-network keeps, each with its own context."""
        blocks = self._blocks()
        contexts = [context] * len(blocks) if gates is None else [context.with_gates(own) for own in gates]
        if subnet is None:
            return list(zip(blocks, contexts, strict=True))
        return [(blocks[index], contexts[index].with_cut(cut)) for index, cut in subnet.cuts(self.units)]

    @property
    def units(self) -> tuple[LayerCut, ...]:
        """Number of heads and neurons of every layer."""
        return tuple(block.units for block in self._blocks())

    def redraw_features(self, step: int, seed: int) -> None:
        """Redraw the random features of mixers where it is time; the trainer calls it before every optimiser step."""
        redrawn: set[Mixer] = set()
        for block in self._blocks():
            for mixer in (block.mixer, block.cross):
                if mixer is not None and mixer not in redrawn:  # a shared mixer draws once
                    mixer.redraw_features(step, seed, len(redrawn))
                    redrawn.add(mixer)

    def reorder(self, heads: Sequence[Tensor], neurons: Sequence[Tensor]) -> None:
        """Reorder the heads and neurons of every layer; the output of the whole encoder does not change.

        Layers that share a module must be given the same order for it.
        """
        orders: dict[Mixer | FeedForward, Tensor] = {}
        for layer, (block, *layer_orders) in enumerate(zip(self._blocks(), heads, neurons, strict=True)):
            for part, order in block.orders(*layer_orders).items():
                if not torch.equal(orders.setdefault(part, order), order):
                    name = type(part).__name__
                    raise InputError(f"layer {layer} shares its {name} with an earlier layer; both need the same order")
        for part, order in orders.items():
            part.reorder(order)

    @torch.no_grad()
    def extract(self, subnet: Subnet) -> "Encoder":
        """Return a smaller encoder of its own that computes the same as this one with `subnet`."""
        cuts = subnet.cuts(self.units)
        made: dict[nn.Module, nn.Module] = {}
        blocks = [self._blocks()[index].extract(cut, made if is_even(cuts) else {}) for index, cut in cuts]
        embedding, final_norm, relative = copy.deepcopy((self.embedding, self.final_norm, self.relative))
        return Encoder(embedding, blocks, final_norm, relative, layer_drop=self.layer_drop)

    def _through(
        self, blocks: Sequence[BlockCall], hidden: Tensor, collected: list[Tensor] | None = None
    ) -> tuple[Tensor, Pondering | Convergence | None]:
        """Run some blocks; `collected` gets the input of each and the output of the last."""
        is_dropping = self.training and self.layer_drop > 0
        draws = torch.rand(len(blocks), device=hidden.device) if is_dropping else None
        for index, (block, context) in enumerate(blocks):
            if collected is not None:
                collected.append(hidden)
            output = block(hidden, context)
            # compute a dropped layer and discard its output: its gradients are then 0 instead of missing, which
            # distributed training needs, and the draw causes no synchronisation
            hidden = output if draws is None else torch.where(draws[index] < self.layer_drop, hidden, output)
        if collected is not None:
            collected.append(hidden)
        return hidden, None

    def _check_last_block(self) -> None:
        """Raise InputError if the encoder has no last block."""

    def _blocks(self) -> list[Block]:
        return list(self.blocks)  # type: ignore[arg-type]

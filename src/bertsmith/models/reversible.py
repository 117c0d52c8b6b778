"""Reversible layers (RevNet, Gomez et al. 2017; Reformer, Kitaev et al. 2020): training memory of one layer.

    x1 = x2 = embedding
    layer:    y1 = x1 + F(x2)     F = dropout(mixer(norm(·)))
              y2 = x2 + G(y1)     G = dropout(feed-forward(norm(·)))
    inverse:  x2 = y2 - G(y1)
              x1 = y1 - F(x2)
    result:   (y1 + y2) / 2, then the final norm

The backward pass recomputes the inputs of every layer from its outputs, so that only the outputs of the last layer are
kept. Both streams are at least float32, whatever the dtype of the layers: the inverse is exact up to the rounding of
two sums per layer, which bfloat16 streams would not survive. Weights of other pre-norm encoders do not carry over.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bertsmith.errors import InputError
from bertsmith.layers.context import ForwardContext
from bertsmith.layers.halting import Pondering
from bertsmith.layers.replay import GeneratorStates
from bertsmith.layers.subnet import Subnet
from bertsmith.models.encoder import BlockCall, Encoder

Streams = tuple[Tensor, Tensor]
"""x1 and x2, or y1 and y2, or their gradients."""


class ReversibleEncoder(Encoder):
    """An encoder of reversible layers.

    `all_hidden_states` are the streams that the mixers read, x2 of every layer, and the result of the last layer. When
    they or maps are requested, every layer keeps its activations, as in an ordinary encoder.
    """

    recomputes = True

    def _check_last_block(self) -> NoReturn:
        raise InputError("a reversible encoder has no separate last layer; use another encoder")

    @torch.no_grad()
    def extract(self, subnet: Subnet) -> "ReversibleEncoder":
        """Return a smaller encoder of its own that computes the same as this one with `subnet`."""
        plain = super().extract(subnet)
        return ReversibleEncoder(plain.embedding, plain._blocks(), plain.final_norm, plain.relative)

    def _through(
        self, blocks: Sequence[BlockCall], hidden: Tensor, collected: list[Tensor] | None = None
    ) -> tuple[Tensor, Pondering | None]:
        if blocks[0][1].memory is not None:
            raise InputError("a reversible stack cannot attend to a memory; use it as an encoder only")
        if torch.compiler.is_compiling() and self.training:
            raise InputError("a reversible encoder in training mode cannot be compiled; use run.compile = 'off'")
        stream = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        if torch.is_grad_enabled() and collected is None and not torch.compiler.is_compiling():
            stack = ReversibleStack.of(blocks, hidden, is_random=self.training)
            first, second = _Reversible.apply(stack, stream, *stack.tensors)
        else:
            first = second = stream
            for block, context in blocks:
                if collected is not None:
                    collected.append(second.to(hidden.dtype))
                first = first + block.mixer_output(second.to(hidden.dtype), context)
                second = second + block.feedforward_output(first.to(hidden.dtype), context)
        output = ((first + second) / 2).to(hidden.dtype)
        if collected is not None:
            collected.append(output)
        return output, None


Gradients = dict[int, Tensor]
"""Gradients of parameters and other tensors, by their id."""


class Part:
    """F or G of one layer: a function of one stream and of further tensors that get gradients."""

    def __init__(
        self,
        run: Callable[[Tensor, ForwardContext], Tensor],
        context: ForwardContext,
        tensors: Sequence[Tensor],
        dtype: torch.dtype,
    ) -> None:
        self.run, self.context, self.tensors, self.dtype = run, context, tensors, dtype
        self.states: GeneratorStates | None = None

    def first(self, stream: Tensor, *, is_random: bool) -> Tensor:
        """Return the output; if the part draws random numbers, remember the states of the generators before it."""
        states = GeneratorStates.capture(stream.device) if is_random else None
        output = self._compute(stream)[1].detach()
        self.states = states if states is not None and states.differ() else None
        return output

    def again(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        """Return input and output of another evaluation, which draws the same random numbers."""
        with nullcontext() if self.states is None else self.states.replayed():
            return self._compute(stream)

    def pull_back(self, leaf: Tensor, output: Tensor, gradient: Tensor, gradients: Gradients) -> Tensor:
        """Return the gradient of the stream, and add the gradients of the other tensors to `gradients`."""
        found = torch.autograd.grad(output, (leaf, *self.tensors), gradient.to(output.dtype), allow_unused=True)
        for tensor, own in zip(self.tensors, found[1:], strict=True):
            if own is not None:
                gradients[id(tensor)] = gradients[id(tensor)] + own if id(tensor) in gradients else own
        assert found[0] is not None
        return found[0].to(gradient.dtype)

    def _compute(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        """Return the part's input, a leaf of a new graph, and its output.

        Gradients are enabled in the forward pass, too: some ops choose their implementation by it, and another
        evaluation must repeat the first exactly.
        """
        with torch.enable_grad():
            leaf = stream.detach().to(self.dtype).requires_grad_()
            return leaf, self.run(leaf, self.context)


@dataclass(frozen=True)
class ReversibleStack:
    """The layers of one forward pass and the autocast state in which they run."""

    layers: list[tuple[Part, Part]]
    """F and G of every layer."""
    tensors: list[Tensor]
    """Distinct inputs of all parts beside the streams: parameters, gates and relative position vectors."""
    autocast: Callable[[], AbstractContextManager[Any]]
    is_random: bool
    """Whether layers may draw random numbers."""

    @classmethod
    def of(cls, blocks: Sequence[BlockCall], hidden: Tensor, *, is_random: bool) -> "ReversibleStack":
        """Return the stack of some blocks for hidden states of a dtype and device."""
        layers, tensors = [], dict[int, Tensor]()
        for block, context in blocks:
            shared = _context_tensors(context)
            mixing = [*block.mixer_norm.parameters(), *block.mixer.parameters(), *shared]
            feeding = [*block.feedforward_norm.parameters(), *block.feedforward.parameters(), *shared]
            mixing, feeding = ([tensor for tensor in own if tensor.requires_grad] for own in (mixing, feeding))
            mixer = Part(block.mixer_output, context, mixing, hidden.dtype)
            layers.append((mixer, Part(block.feedforward_output, context, feeding, hidden.dtype)))
            tensors |= {id(tensor): tensor for tensor in (*mixing, *feeding)}
        device = hidden.device.type
        # without the cache, which would keep weights that were cast without gradients
        autocast = partial(
            torch.autocast,
            device,
            dtype=torch.get_autocast_dtype(device),
            enabled=torch.is_autocast_enabled(device),
            cache_enabled=False,
        )
        return cls(layers, list(tensors.values()), autocast, is_random)

    def forward(self, streams: Streams) -> Streams:
        """Return the outputs of the last layer."""
        first, second = streams
        with self.autocast():
            for mixer, feedforward in self.layers:
                first = first + mixer.first(second, is_random=self.is_random)
                second = second + feedforward.first(first, is_random=self.is_random)
        return first, second

    def backward(self, outputs: Streams, output_gradients: Streams) -> tuple[Streams, Streams, Gradients]:
        """Return the recomputed inputs of the first layer, their gradients, and the gradients of the other tensors."""
        (first, second), (first_gradient, second_gradient) = outputs, output_gradients
        gradients: Gradients = {}
        for mixer, feedforward in reversed(self.layers):
            with self.autocast():
                leaf, output = feedforward.again(first)
            second = second - output.detach()
            first_gradient = first_gradient + feedforward.pull_back(leaf, output, second_gradient, gradients)
            with self.autocast():
                leaf, output = mixer.again(second)
            first = first - output.detach()
            second_gradient = second_gradient + mixer.pull_back(leaf, output, first_gradient, gradients)
        return (first, second), (first_gradient, second_gradient), gradients


class _Reversible(torch.autograd.Function):
    """A stack as one function of its input and of all its tensors, so that hooks on parameters work as usual."""

    @staticmethod
    def forward(ctx: Any, stack: ReversibleStack, stream: Tensor, *tensors: Tensor) -> Streams:
        outputs = stack.forward((stream, stream))
        ctx.stack = stack
        # the tensors, too: PyTorch then reports a change of weights between forward and backward pass
        ctx.save_for_backward(*outputs, *tensors)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *output_gradients: Tensor) -> tuple[Any, ...]:
        first, second, *_ = ctx.saved_tensors
        first_gradient, second_gradient = output_gradients
        _, (one, other), gradients = ctx.stack.backward((first, second), (first_gradient, second_gradient))
        return None, one + other, *(gradients.get(id(tensor)) for tensor in ctx.stack.tensors)


def _context_tensors(context: ForwardContext) -> list[Tensor]:
    """Return the tensors of a context that may need gradients."""
    tensors = [] if context.relative_positions is None else [context.relative_positions.vectors]
    if context.gates is not None:
        gates = (context.gates.heads, context.gates.neurons, context.gates.inner)
        tensors += [gate for gate in gates if gate is not None]
    return tensors

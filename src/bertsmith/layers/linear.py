"""Linear layers whose rows and columns are grouped into units (heads, neurons): the first units are a smaller layer."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from bertsmith.layers.elementwise import ACTIVATIONS, Activation, first_units
from bertsmith.layers.weight_cache import PackedWeight
from bertsmith.ops.activation import BACKENDS, biased_activation, is_faster
from bertsmith.ops.dispatch import resolve_backend


@dataclass(frozen=True)
class WeightSlice:
    """The units of a linear layer that one call uses; all by default."""

    keep_in: int | None = None
    """Number of first input units; None for all."""
    keep_out: int | None = None
    """Number of first output units; None for all."""
    parts: slice | None = None
    """The stacked projections to compute; None for all."""
    gate: Tensor | None = None
    """Factors of the input units, (units_in,); None for 1."""


ALL_UNITS = WeightSlice()


class LinearLayer(nn.Module):
    """Interface of all linear layers, int8 ones included (engines/int8.py)."""

    def forward(self, hidden: Tensor, used: WeightSlice = ALL_UNITS) -> Tensor:
        """Project the hidden states by the used units: (…, inputs) -> (…, outputs)."""
        raise NotImplementedError

    def new_zeros(self, *shape: int) -> Tensor:
        """Return zeros with the dtype and device of the layer's floating-point numbers."""
        raise NotImplementedError


class ElasticLinear(LinearLayer):
    """A linear layer that can compute with its first units only.

    `units_in` and `units_out` are the numbers of equal units of the input and the output; None for a side that never
    shrinks. `parts` stacks several projections of the same input, for example query, key and value, in one matrix; each
    part has all units. `parts_in` does the same for the input. `bias` is one flag, or one per part.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        units_in: int | None = None,
        units_out: int | None = None,
        parts: int = 1,
        parts_in: int = 1,
        bias: bool | tuple[bool, ...] = True,
    ) -> None:
        super().__init__()
        if inputs % ((units_in or 1) * parts_in) or outputs % ((units_out or 1) * parts):
            raise ValueError(
                f"{inputs} inputs and {outputs} outputs do not divide into {units_in} and {units_out} units"
            )
        self.inputs, self.outputs = inputs, outputs
        self.units_in, self.units_out = units_in, units_out
        self.parts, self.parts_in = parts, parts_in
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.biased = bias if isinstance(bias, tuple) else (bias,) * parts
        self.bias = nn.Parameter(torch.empty(outputs // parts * sum(self.biased))) if any(self.biased) else None
        self.packed = PackedWeight()

    def forward(self, hidden: Tensor, used: WeightSlice = ALL_UNITS) -> Tensor:
        parts = used.parts
        if used.gate is not None:
            gate = first_units(used.gate, used.keep_in).to(hidden.dtype)
            # (…, inputs) -> (…, parts, units, size) and back
            by_unit = hidden.unflatten(-1, (self.parts_in, len(gate), -1))
            hidden = (by_unit * gate[:, None]).flatten(-3)
        weight, bias = self.prefix(used.keep_in, used.keep_out)
        if parts is not None:
            first, last, _ = parts.indices(self.parts)
            size = len(weight) // self.parts
            rows = slice(first * size, last * size)
            weight, bias = weight[rows], None if bias is None else bias[rows]
        if weight is self.weight and self.packed.serves(hidden, weight):
            return self.packed.product(hidden, weight, bias)
        return linear(hidden, weight, bias)

    def new_zeros(self, *shape: int) -> Tensor:
        return self.weight.new_zeros(shape)

    def activated(
        self, hidden: Tensor, activation: Activation, *, keep_out: int | None = None, backend: str = "auto"
    ) -> Tensor:
        """Project by the first `keep_out` units and apply an activation, in one kernel where possible."""
        if type(self) is ElasticLinear:
            weight, bias = self.prefix(None, keep_out)
            if weight is self.weight and self.packed.serves(hidden, weight):
                return self.packed.product(hidden, weight, bias, activation)
            if bias is not None and is_faster(hidden, activation):
                backend = resolve_backend(BACKENDS, backend)
                return biased_activation(linear(hidden, weight), bias, activation, backend=backend)
        return ACTIVATIONS[activation](self(hidden, WeightSlice(keep_out=keep_out)))

    def prefix(self, keep_in: int | None, keep_out: int | None) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of the first units, as views where possible."""
        weight, bias = self._first(keep_in, keep_out)
        if bias is not None and not all(self.biased):
            biases = iter(bias.chunk(sum(self.biased)))
            zeros = bias.new_zeros(bias.shape[0] // sum(self.biased))
            bias = torch.cat([next(biases) if has_bias else zeros for has_bias in self.biased])
        return weight, bias

    def _first(self, keep_in: int | None, keep_out: int | None) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of the first units; the bias omits the parts that have no bias."""
        bias: Tensor | None = self.bias
        if bias is not None and keep_out is not None and keep_out != self.units_out:
            bias = self._by_unit_out(bias)[:, :keep_out].flatten()
        return self.first_of(self.weight, keep_in, keep_out), bias

    def first_of(self, matrix: Tensor, keep_in: int | None, keep_out: int | None) -> Tensor:
        """Return the first units of a tensor shaped like the weight, as a view where possible."""
        if keep_out is not None and keep_out != self.units_out:
            matrix = self._by_unit_out(matrix)[:, :keep_out].flatten(0, 2)
        if keep_in is not None and keep_in != self.units_in:
            matrix = self._by_unit_in(matrix)[:, :, :keep_in].flatten(1)
        return matrix

    @torch.no_grad()
    def reorder(self, *, units_in: Tensor | None = None, units_out: Tensor | None = None) -> None:
        """Permute the units in place, so that optimisers keep their parameters."""
        self.weight.copy_(self.permuted(self.weight, units_in, units_out))
        if units_out is not None and self.bias is not None:
            self.bias.copy_(self._by_unit_out(self.bias)[:, units_out].flatten())

    def permuted(self, matrix: Tensor, units_in: Tensor | None, units_out: Tensor | None) -> Tensor:
        """Return a tensor shaped like the weight with its units permuted."""
        if units_in is not None:
            matrix = self._by_unit_in(matrix)[:, :, units_in].flatten(1)
        if units_out is not None:
            matrix = self._by_unit_out(matrix)[:, units_out].flatten(0, 2)
        return matrix

    @torch.no_grad()
    def scale(self, factors: Tensor) -> None:
        """Multiply the weights of each input unit in place: the same as a gate in every call.

        Shape: factors (units_in,).
        """
        self.weight.copy_((self._by_unit_in(self.weight) * factors.to(self.weight)[:, None]).flatten(1))

    @torch.no_grad()
    def squares(self, side: Literal["in", "out"]) -> Tensor:
        """Return the sum of the squared weights of each unit of a side, (units,)."""
        if side == "out":
            return self._by_unit_out(self.weight).square().sum((0, 2, 3))
        return self._by_unit_in(self.weight).square().sum((0, 1, 3))

    @torch.no_grad()
    def extract(self, *, keep_in: int | None = None, keep_out: int | None = None) -> "ElasticLinear":
        """Return a new layer with the first units only."""
        weight, bias = self._first(keep_in, keep_out)
        small = ElasticLinear(
            weight.shape[1],
            weight.shape[0],
            units_in=self.units_in if keep_in is None else keep_in,
            units_out=self.units_out if keep_out is None else keep_out,
            parts=self.parts,
            parts_in=self.parts_in,
            bias=self.biased,
        ).to(weight)
        small.weight.copy_(weight)
        if bias is not None and small.bias is not None:
            small.bias.copy_(bias)
        return small

    def extra_repr(self) -> str:
        units = f"units_in={self.units_in}, units_out={self.units_out}, parts={self.parts}, parts_in={self.parts_in}"
        return f"inputs={self.inputs}, outputs={self.outputs}, {units}, bias={self.biased}"

    def _by_unit_out(self, tensor: Tensor) -> Tensor:
        assert self.units_out is not None, "the outputs of this layer have no units"
        size = self.outputs // (self.parts * self.units_out)
        return tensor.unflatten(0, (-1, self.units_out, size))  # (outputs, …) -> (parts, units, size, …)

    def _by_unit_in(self, weight: Tensor) -> Tensor:
        assert self.units_in is not None, "the inputs of this layer have no units"
        return weight.unflatten(1, (self.parts_in, self.units_in, -1))  # (outputs, inputs) -> (…, parts, units, size)


class GroupedLinear(LinearLayer):
    """A linear layer with a block-diagonal matrix: 1/groups of the weights and operations of a dense one.

    Each group maps one contiguous block of inputs to one block of outputs. Every input and output is a unit; the first
    n units are the first n / groups of each block.
    """

    def __init__(self, inputs: int, outputs: int, groups: int) -> None:
        super().__init__()
        if inputs % groups or outputs % groups:
            raise ValueError(f"{inputs} inputs and {outputs} outputs do not divide into {groups} groups")
        self.inputs, self.outputs, self.groups = inputs, outputs, groups
        self.weight = nn.Parameter(torch.empty(groups, inputs // groups, outputs // groups))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, hidden: Tensor, used: WeightSlice = ALL_UNITS) -> Tensor:
        if used.parts is not None or used.gate is not None:
            raise ValueError("a grouped linear layer supports neither stacked parts nor gates")
        weight, bias = self.prefix(used.keep_in, used.keep_out)
        blocks = hidden.unflatten(-1, (self.groups, -1))  # (…, inputs) -> (…, groups, inputs / groups)
        mixed = torch.einsum("...gi,gio->...go", blocks, weight)
        return mixed.flatten(-2) + bias.to(mixed.dtype)

    def prefix(self, keep_in: int | None, keep_out: int | None) -> tuple[Tensor, Tensor]:
        """Return weight and bias of the first units of every group."""
        columns = (self.outputs if keep_out is None else keep_out) // self.groups
        bias: Tensor = self.bias
        first = bias.unflatten(0, (self.groups, -1))[:, :columns].flatten()
        return self.first_of(self.weight, keep_in, keep_out), first

    def first_of(self, matrix: Tensor, keep_in: int | None, keep_out: int | None) -> Tensor:
        """Return the first units of every group of a tensor shaped like the weight, as a view."""
        rows = (self.inputs if keep_in is None else keep_in) // self.groups
        columns = (self.outputs if keep_out is None else keep_out) // self.groups
        return matrix[:, :rows, :columns]

    @torch.no_grad()
    def reorder(self, *, units_in: Tensor | None = None, units_out: Tensor | None = None) -> None:
        """Permute the units of each group in place, by their rank in the given order of all units."""
        self.weight.copy_(self.permuted(self.weight, units_in, units_out))
        if units_out is not None:
            index = self._within_groups(units_out)
            self.bias.copy_(self.bias.unflatten(0, (self.groups, -1)).take_along_dim(index, 1).flatten())

    def permuted(self, matrix: Tensor, units_in: Tensor | None, units_out: Tensor | None) -> Tensor:
        """Return a tensor shaped like the weight with the units of each group permuted."""
        if units_in is not None:
            matrix = matrix.take_along_dim(self._within_groups(units_in)[:, :, None], 1)
        if units_out is not None:
            matrix = matrix.take_along_dim(self._within_groups(units_out)[:, None, :], 2)
        return matrix

    @torch.no_grad()
    def scale(self, factors: Tensor) -> None:
        """Multiply the weights of each input in place: the same as a gate in every call. Shape: factors (inputs,)."""
        self.weight.mul_(factors.to(self.weight).unflatten(0, (self.groups, -1))[:, :, None])

    @torch.no_grad()
    def squares(self, side: Literal["in", "out"]) -> Tensor:
        """Return the sum of the squared weights of each unit of a side, (units,)."""
        return self.weight.square().sum(1 if side == "out" else 2).flatten()

    @torch.no_grad()
    def extract(self, *, keep_in: int | None = None, keep_out: int | None = None) -> "GroupedLinear":
        """Return a new layer with the first units of every group only."""
        weight, bias = self.prefix(keep_in, keep_out)
        small = GroupedLinear(weight.shape[1] * self.groups, weight.shape[2] * self.groups, self.groups).to(weight)
        small.weight.copy_(weight)
        small.bias.copy_(bias)
        return small

    def extra_repr(self) -> str:
        return f"inputs={self.inputs}, outputs={self.outputs}, groups={self.groups}"

    def _within_groups(self, order: Tensor) -> Tensor:
        """Split an order of all units into an order of each group's units: (groups, units / groups)."""
        size = len(order) // self.groups
        by_group = (order // size).argsort(stable=True)
        return (order[by_group] % size).unflatten(0, (self.groups, size))

"""The linear layer in groups: each block of inputs speaks only to its own block of outputs (Jiang et al. 2020)."""

from typing import Literal

import torch
from torch import Tensor, nn


class GroupedLinear(nn.Module):
    """`groups` linear layers side by side, which take a 1/groups of the weights and of the operations of one.

    Inputs and outputs fall into contiguous blocks, one of each for every group. Every input and output is a unit; a
    prefix of n units is the first n / groups of each block.
    """

    def __init__(self, inputs: int, outputs: int, groups: int) -> None:
        super().__init__()
        if inputs % groups or outputs % groups:
            raise ValueError(f"{inputs} inputs and {outputs} outputs do not divide into {groups} groups")
        self.inputs, self.outputs, self.groups = inputs, outputs, groups
        self.weight = nn.Parameter(torch.empty(groups, inputs // groups, outputs // groups))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, hidden: Tensor, *, keep_in: int | None = None, keep_out: int | None = None) -> Tensor:
        """The projection by the first `keep_out` outputs of the first `keep_in` inputs (None: all)."""
        weight, bias = self.prefix(keep_in, keep_out)
        blocks = hidden.unflatten(-1, (self.groups, -1))  # (…, inputs) -> (…, groups, inputs / groups)
        mixed = torch.einsum("...gi,gio->...go", blocks, weight)
        return mixed.flatten(-2) + bias.to(mixed.dtype)

    def prefix(self, keep_in: int | None, keep_out: int | None) -> tuple[Tensor, Tensor]:
        """Weight and bias of the first units of every group."""
        rows = (self.inputs if keep_in is None else keep_in) // self.groups
        columns = (self.outputs if keep_out is None else keep_out) // self.groups
        bias: Tensor = self.bias
        return self.weight[:, :rows, :columns], bias.unflatten(0, (self.groups, -1))[:, :columns].flatten()

    @torch.no_grad()
    def reorder(self, *, units_in: Tensor | None = None, units_out: Tensor | None = None) -> None:
        """Puts the units of each group in the order they have among the given ones, in place."""
        if units_in is not None:
            index = self._within_groups(units_in)
            self.weight.copy_(self.weight.take_along_dim(index[:, :, None], 1))
        if units_out is not None:
            index = self._within_groups(units_out)
            self.weight.copy_(self.weight.take_along_dim(index[:, None, :], 2))
            self.bias.copy_(self.bias.unflatten(0, (self.groups, -1)).take_along_dim(index, 1).flatten())

    @torch.no_grad()
    def scale(self, factors: Tensor) -> None:
        """Multiplies what each input brings, in place: the same as a gate in every call. Shape: factors (inputs,)."""
        self.weight.mul_(factors.to(self.weight).unflatten(0, (self.groups, -1))[:, :, None])

    @torch.no_grad()
    def squares(self, side: Literal["in", "out"]) -> Tensor:
        """The sums of the squares of the weights that belong to each unit of a side, (units,)."""
        return self.weight.square().sum(1 if side == "out" else 2).flatten()

    @torch.no_grad()
    def extract(self, *, keep_in: int | None = None, keep_out: int | None = None) -> "GroupedLinear":
        """A layer of its own with only the first units of every group."""
        weight, bias = self.prefix(keep_in, keep_out)
        small = GroupedLinear(weight.shape[1] * self.groups, weight.shape[2] * self.groups, self.groups).to(weight)
        small.weight.copy_(weight)
        small.bias.copy_(bias)
        return small

    def extra_repr(self) -> str:
        return f"inputs={self.inputs}, outputs={self.outputs}, groups={self.groups}"

    def _within_groups(self, order: Tensor) -> Tensor:
        """An order of all units as an order of the units of each group: (groups, units / groups)."""
        size = len(order) // self.groups
        by_group = (order // size).argsort(stable=True)
        return (order[by_group] % size).unflatten(0, (self.groups, size))

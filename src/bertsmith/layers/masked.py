"""Layers with masked weights, for magnitude pruning of single weights (Gordon et al. 2020).

A mask is True where a weight is kept. Pruned weights contribute 0 and get the gradient 0. The mask is no part of the
state dict: the dense weights, with zeros, are the model, and masks have a file of their own (checkpoint/masks.py).
"""

import torch
from torch import Tensor
from torch.nn.functional import embedding

from bertsmith.layers.embedding import TokenRows
from bertsmith.layers.linear import ElasticLinear, GroupedLinear


def masked(weight: Tensor, mask: Tensor) -> Tensor:
    """Return the weights with zeros where the mask is False; never -0, so that the result equals stored zeros."""
    return weight.masked_fill(~mask, 0.0)


class MaskedLinear(ElasticLinear):
    """An elastic layer with a mask over its matrix."""

    mask: Tensor

    def __init__(self, plain: ElasticLinear, mask: Tensor) -> None:
        super().__init__(
            plain.inputs,
            plain.outputs,
            units_in=plain.units_in,
            units_out=plain.units_out,
            parts=plain.parts,
            parts_in=plain.parts_in,
            bias=plain.biased,
        )
        self.weight, self.bias = plain.weight, plain.bias
        self.register_buffer("mask", mask, persistent=False)

    def prefix(self, keep_in: int | None, keep_out: int | None) -> tuple[Tensor, Tensor | None]:
        """Return the masked weight and the bias of the first units."""
        weight, bias = super().prefix(keep_in, keep_out)
        return masked(weight, self.first_of(self.mask, keep_in, keep_out)), bias

    @torch.no_grad()
    def reorder(self, *, units_in: Tensor | None = None, units_out: Tensor | None = None) -> None:
        super().reorder(units_in=units_in, units_out=units_out)
        self.mask.copy_(self.permuted(self.mask, units_in, units_out))

    @torch.no_grad()
    def extract(self, *, keep_in: int | None = None, keep_out: int | None = None) -> "MaskedLinear":
        plain = super().extract(keep_in=keep_in, keep_out=keep_out)
        return MaskedLinear(plain, self.first_of(self.mask, keep_in, keep_out).clone())

    def plain(self) -> ElasticLinear:
        """Return the layer without its mask, with a copy of its weights."""
        plain = super().extract()
        with torch.no_grad():
            plain.weight.copy_(masked(plain.weight, self.mask))
        return plain


class MaskedGroupedLinear(GroupedLinear):
    """A grouped linear layer with a mask over its block-diagonal matrix."""

    mask: Tensor

    def __init__(self, plain: GroupedLinear, mask: Tensor) -> None:
        super().__init__(plain.inputs, plain.outputs, plain.groups)
        self.weight, self.bias = plain.weight, plain.bias
        self.register_buffer("mask", mask, persistent=False)

    def prefix(self, keep_in: int | None, keep_out: int | None) -> tuple[Tensor, Tensor]:
        """Return the masked weight and the bias of the first units of every group."""
        weight, bias = super().prefix(keep_in, keep_out)
        return masked(weight, self.first_of(self.mask, keep_in, keep_out)), bias

    @torch.no_grad()
    def reorder(self, *, units_in: Tensor | None = None, units_out: Tensor | None = None) -> None:
        super().reorder(units_in=units_in, units_out=units_out)
        self.mask.copy_(self.permuted(self.mask, units_in, units_out))

    @torch.no_grad()
    def extract(self, *, keep_in: int | None = None, keep_out: int | None = None) -> "MaskedGroupedLinear":
        plain = self.plain().extract(keep_in=keep_in, keep_out=keep_out)
        return MaskedGroupedLinear(plain, self.first_of(self.mask, keep_in, keep_out).clone())

    @torch.no_grad()
    def plain(self) -> GroupedLinear:
        """Return the layer without its mask, with a copy of its weights."""
        plain = GroupedLinear(self.inputs, self.outputs, self.groups).to(self.weight)
        plain.weight.copy_(masked(self.weight, self.mask))
        plain.bias.copy_(self.bias)
        return plain


class MaskedRows(TokenRows):
    """Look-up of token vectors in a masked table; `whole` masks the same table for heads over the vocabulary."""

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: Tensor, table: Tensor | None) -> Tensor:
        assert table is not None, "an embedding without its own table needs the argument table"
        # mask the looked-up rows only
        return masked(embedding(tokens, table), self.mask[tokens])

    def whole(self, table: Tensor | None) -> Tensor:
        return masked(super().whole(table), self.mask)

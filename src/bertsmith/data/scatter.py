"""Tokens to places of their own in a larger run of rows and back: each is the other's backward pass, and both copy."""

from typing import Any

import torch
from torch import Tensor


def spread(tokens: Tensor, places: Tensor, rows: int) -> Tensor:
    """As many rows as asked for, each token at its place, 0 elsewhere.

    Shape: tokens (tokens, …), places (tokens,), int64, no two the same; (rows, …).
    """
    return _Spread.apply(tokens, places, rows)


def gathered(rows: Tensor, places: Tensor) -> Tensor:
    """The rows at some places, of which no two are the same: what `spread` put there.

    Shape: rows (rows, …), places (tokens,), int64; (tokens, …).
    """
    return _Gathered.apply(rows, places)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(tokens: Tensor, places: Tensor, rows: int) -> Tensor:
        return tokens.new_zeros(rows, *tokens.shape[1:]).index_copy(0, places, tokens)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return gathered(gradient, places), None, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(rows: Tensor, places: Tensor) -> Tensor:
        return rows.index_select(0, places)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        rows, places = inputs
        ctx.save_for_backward(places)
        ctx.rows = rows.shape[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return spread(gradient, places, ctx.rows), None

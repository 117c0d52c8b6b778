"""What every form of linear attention is given."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bertsmith.batches.layout import SequenceLayout
from bertsmith.ops.favor.features import widened
from bertsmith.ops.favor.kernels import KERNELS, Kernel


@dataclass(frozen=True)
class FavorInputs:
    """One call of linear attention.

    Shape: query, key, value (batch, length, heads, head_width), or (tokens, heads, head_width) when packed; projection
    (features, head_width).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    projection: Tensor
    layout: SequenceLayout
    key_layout: SequenceLayout
    kernel: str = "softmax"
    epsilon: float = 0.0
    is_causal: bool = False
    chunk: int = 128

    @property
    def rule(self) -> Kernel:
        return KERNELS[self.kernel]

    @property
    def rows(self) -> Tensor:
        """A row of the random matrix for every feature, in the precision of all that follows.

        That is float32, whatever autocast says, or float64 for float64 inputs.
        """
        precision = torch.float64 if self.query.dtype == torch.float64 else torch.float32
        return widened(self.projection.to(precision), self.rule)


def padded(inputs: FavorInputs) -> FavorInputs:
    """The same call with padded rows."""
    query, layout = inputs.layout.pad(inputs.query)
    key, key_layout = inputs.key_layout.pad(inputs.key)
    value, _ = inputs.key_layout.pad(inputs.value)
    return replace(inputs, query=query, key=key, value=value, layout=layout, key_layout=key_layout)


def through_padding(compute: Callable[[FavorInputs], Tensor], inputs: FavorInputs) -> Tensor:
    """What a form that knows only padded rows gives for packed inputs: pad → compute → unpad."""
    return inputs.layout.unpad(compute(padded(inputs)), inputs.query)

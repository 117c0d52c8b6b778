"""Matrices laid out for the products of inference on a CPU, once for as long as they stay what they were.

PyTorch's own products lay a matrix out in every call, which takes longer the fewer tokens there are. A layout is a
second copy of the matrix; nothing is prepared for training, for compiled code and for small matrices.
"""

from typing import Any

import torch
from torch import Tensor

from bertsmith.layers.activation import Activation
from bertsmith.layers.remember import Remembered

SMALLEST = 128 * 128
"""Entries of a matrix below which a product is no faster by it."""

_FUSED: dict[Activation | None, tuple[str, str]] = {
    None: ("none", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "relu": ("relu", ""),
    "silu": ("swish", ""),
    "tanh": ("tanh", ""),
}
"""The names that oneDNN has for what follows a product."""


class Prepared(Remembered[Tensor]):
    """One matrix, laid out for products in eval mode without gradients."""

    def serves(self, hidden: Tensor, weight: Tensor) -> bool:
        """Whether this product is one to lay the matrix out for."""
        return (
            not self.training
            and not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and hidden.dtype == weight.dtype == torch.float32
            and hidden.device.type == weight.device.type == "cpu"
            and weight.numel() >= SMALLEST
            and hidden.numel() > 0
            and not weight.is_inference()  # its writes are not counted
            and not torch.is_autocast_enabled("cpu")
            and bool(torch.backends.mkldnn.enabled)
            and torch.backends.mkldnn.is_available()
        )

    def product(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation | None = None
    ) -> Tensor:
        """hidden · weightᵀ + bias and what the activation makes of it: (…, inputs) -> (…, outputs)."""
        mkldnn: Any = torch.ops.mkldnn
        laid_out = self([weight], None, lambda: mkldnn._reorder_linear_weight(weight.detach(), None))
        kind, variant = _FUSED[activation]
        product: Tensor = mkldnn._linear_pointwise(hidden, laid_out, bias, kind, [], variant)
        return product

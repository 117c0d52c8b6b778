"""The activation of a matrix product plus a bias, whose gradients one kernel computes."""

import torch
from torch import Tensor

from bertsmith.ops.activation import fused, reference
from bertsmith.ops.activation.reference import FUNCTIONS, ActivationInputs
from bertsmith.ops.dispatch import Implementation, Implementations, choose

BACKENDS: Implementations[ActivationInputs, Tensor] = {
    "triton": Implementation(fused.biased_activation, fused.unsupported, fused.preferred),
    "reference": Implementation(reference.biased_activation, reference.unsupported),
}


def biased_activation(product: Tensor, bias: Tensor, activation: str, *, backend: str = "auto") -> Tensor:
    """Return activation(product + bias), in the shape and dtype of `product`.

    Shape: product (…, neurons), bias (neurons,).
    """
    inputs = ActivationInputs(product, bias, activation)
    return choose(BACKENDS, backend, inputs).compute(inputs)


def is_faster(hidden: Tensor, activation: str) -> bool:
    """Return whether the op should replace a product with bias and an activation: when training on a GPU."""
    return hidden.is_cuda and torch.is_grad_enabled() and activation in FUNCTIONS

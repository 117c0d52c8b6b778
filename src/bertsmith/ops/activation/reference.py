"""Inputs and reference of the activation of a product plus a bias."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.nn import functional

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,  # the exact, erf form
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}


@dataclass(frozen=True)
class ActivationInputs:
    """Inputs of the op. Shape: product (…, neurons), bias (neurons,)."""

    product: Tensor
    bias: Tensor
    activation: str


def unsupported(inputs: ActivationInputs) -> str | None:
    return None


def biased_activation(inputs: ActivationInputs) -> Tensor:
    """Return activation(product + bias)."""
    return FUNCTIONS[inputs.activation](inputs.product + inputs.bias.to(inputs.product.dtype))

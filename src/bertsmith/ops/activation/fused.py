"""Bias and activation by Triton kernels: one forward and one backward."""

from torch import Tensor

from bertsmith.ops import kernel_support as support
from bertsmith.ops.activation.reference import ActivationInputs


def unsupported(inputs: ActivationInputs) -> str | None:
    return support.unsupported(inputs.product)


def preferred(inputs: ActivationInputs) -> bool:
    return support.is_preferred(inputs.product)


def biased_activation(inputs: ActivationInputs) -> Tensor:
    """Return activation(product + bias)."""
    product = inputs.product
    rows = product.reshape(-1, product.shape[-1])  # (…, neurons) -> (rows, neurons)
    activated: Tensor = _activation(rows.contiguous(), inputs.bias.contiguous(), inputs.activation)
    return activated.view(product.shape)


def _forward(product: Tensor, bias: Tensor, activation: str) -> Tensor:
    from bertsmith.ops.activation import kernels

    return kernels.forward(product, bias, activation)


def _backward(upstream: Tensor, product: Tensor, bias: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    from bertsmith.ops.activation import kernels

    return kernels.backward(upstream.contiguous(), product, bias, activation)


def _fake_forward(product: Tensor, bias: Tensor, activation: str) -> Tensor:
    return product.new_empty(product.shape)


def _fake_backward(upstream: Tensor, product: Tensor, bias: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return product.new_empty(product.shape), bias.new_empty(bias.shape)


_activation = support.register_op(
    "biased_activation",
    forward=_forward,
    fake_forward=_fake_forward,
    backward=_backward,
    fake_backward=_fake_backward,
    saves_result=False,
)

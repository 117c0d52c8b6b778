"""Kernels of bias and activation against the reference in float64: output and both gradients."""

from functools import partial

import pytest
import torch
from cases import tiny_model
from helpers_kernels import DEVICE, assert_close_to_truth, needs_triton, results
from torch import Tensor

from bertsmith.ops.activation import FUNCTIONS, biased_activation

pytestmark = needs_triton
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # Triton's interpreter does not round to bfloat16


def op(product: Tensor, bias: Tensor, *, activation: str, backend: str) -> Tensor:
    return biased_activation(product, bias, activation, backend=backend)


def compare(activation: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    # a few standard deviations, so that both tails are reached
    product, bias = 3 * torch.randn(shape, dtype=torch.float64), torch.randn(shape[-1], dtype=torch.float64)
    assert_close_to_truth(partial(op, activation=activation), [product.to(DEVICE), bias.to(DEVICE)], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_outputs_and_gradients_equal_the_reference(activation: str, dtype: torch.dtype) -> None:
    compare(activation, (19, 40), dtype)
    compare(activation, (2, 3, 300), dtype)


def test_bias_keeps_its_own_dtype() -> None:
    product = torch.randn(9, 24, device=DEVICE, dtype=HALF, requires_grad=True)
    bias = torch.randn(24, device=DEVICE, requires_grad=True)
    activated = biased_activation(product, bias, "gelu", backend="triton")
    by_product, by_bias = torch.autograd.grad(activated.sum(), (product, bias))
    assert (activated.dtype, by_product.dtype, by_bias.dtype) == (HALF, HALF, torch.float32)
    # the sum is taken before rounding, so it is close to the sum of rounded numbers only
    torch.testing.assert_close(by_bias, by_product.float().sum(0), rtol=0.01, atol=0.05)


def test_no_rows() -> None:
    product = torch.empty(0, 24, device=DEVICE, requires_grad=True)
    bias = torch.ones(24, device=DEVICE, requires_grad=True)
    activated = biased_activation(product, bias, "gelu", backend="triton")
    assert activated.shape == (0, 24)
    assert torch.autograd.grad(activated.sum(), bias)[0].eq(0).all()


def test_op_compiles_without_graph_breaks() -> None:
    tensors = [torch.randn(9, 24, device=DEVICE), torch.randn(24, device=DEVICE)]
    call = partial(op, activation="gelu", backend="triton")
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors), call(*tensors))


def test_reference_backend_of_a_model_has_second_derivatives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bertsmith.layers.linear.is_faster", lambda *_: True)  # as in training on a GPU
    monkeypatch.setattr("bertsmith.ops.kernel_support.is_preferred", lambda tensor: True)
    model = tiny_model("bert-tiny").float().to(DEVICE)
    hidden = model(torch.randint(0, 50, (2, 5), device=DEVICE), backend="reference")
    weight = model.encoder.blocks[0].feedforward.expand.weight
    (gradient,) = torch.autograd.grad(hidden.square().sum(), weight, create_graph=True)
    assert torch.autograd.grad(gradient.square().sum(), weight)[0].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_all_sizes(activation: str, dtype: torch.dtype) -> None:
    for rows in (1, 63, 64, 65, 4099):
        for width in (96, 1024, 3072):
            compare(activation, (rows, width), dtype)


@pytest.mark.gpu
def test_repeated_runs_are_equal() -> None:
    tensors = [torch.randn(65536, 1024, device=DEVICE), torch.randn(1024, device=DEVICE)]
    runs = [results(partial(op, activation="gelu"), tensors, "triton", torch.bfloat16) for _ in range(3)]
    assert all(torch.equal(one, other) for run in runs[1:] for one, other in zip(runs[0], run, strict=True))

"""Speed and error of float8 matrix products in a feed-forward network, forward and backward, on a GPU.

    python benchmarks/float8.py                                  # widths of base, large and larger networks
    python benchmarks/float8.py --widths 768 --tokens 65536

Every row compares one feed-forward network (width → 4 × width → width, GELU) in bfloat16 with the same network in
float8: activations and weights in e4m3, gradients in e5m2, each tensor scaled by its largest absolute value in the same
step ("dynamic"), the products by torch._scaled_mm with bfloat16 outputs. Both are compiled, so that scaling and casting
are fused as far as the compiler can. "products" is what the six products alone would gain if scaling and casting were
free. The errors are relative to float64, ‖gradient − exact‖ / ‖exact‖ for the first matrix.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def scaled(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the tensor in float8 and the factor that restores its scale."""
    factor = (tensor.abs().amax().float() / torch.finfo(dtype).max).clamp(min=1e-12)
    return (tensor / factor).to(dtype), factor


def product(left: Tensor, left_factor: Tensor, right: Tensor, right_factor: Tensor) -> Tensor:
    """Return left · right in bfloat16; left must be stored by rows and right by columns."""
    return torch._scaled_mm(left, right, scale_a=left_factor, scale_b=right_factor, out_dtype=torch.bfloat16)


class Float8Product(torch.autograd.Function):
    """hidden · weightᵀ with all three products of forward and backward in float8."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor) -> Tensor:
        hidden8, hidden_factor = scaled(hidden, E4M3)
        weight8, weight_factor = scaled(weight, E4M3)
        ctx.save_for_backward(hidden8, hidden_factor, weight8, weight_factor)
        return product(hidden8, hidden_factor, weight8.t(), weight_factor)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        hidden8, hidden_factor, weight8, weight_factor = ctx.saved_tensors
        gradient8, factor = scaled(gradient, E5M2)
        by_columns = weight8.t().contiguous().t()
        to_hidden = product(gradient8, factor, by_columns, weight_factor)
        to_weight = product(gradient8.t().contiguous(), factor, hidden8.t().contiguous().t(), hidden_factor)
        return to_hidden, to_weight


def plain_network(hidden: Tensor, expand: Tensor, contract: Tensor) -> Tensor:
    return gelu(hidden @ expand.t()) @ contract.t()


def float8_network(hidden: Tensor, expand: Tensor, contract: Tensor) -> Tensor:
    return Float8Product.apply(gelu(Float8Product.apply(hidden, expand)), contract)


def network_step(network: Callable[..., Tensor], tensors: tuple[Tensor, ...], gradient: Tensor) -> Callable[[], None]:
    """Return a function that runs the network forward and backward."""
    compiled = torch.compile(network)

    def step() -> None:
        for tensor in tensors:
            tensor.grad = None
        compiled(*tensors).backward(gradient)

    return step


def products_step(tokens: int, width: int, dtype: torch.dtype) -> Callable[[], None]:
    """Return a function that runs the six products of a step without scaling and casting."""
    device, inner = "cuda", 4 * width
    one = torch.ones((), device=device)
    shapes = [(tokens, width, inner), (tokens, inner, width)]  # rows, summed axis, columns
    shapes += [(rows, columns, summed) for rows, summed, columns in shapes]  # gradient of the input
    shapes += [(columns, rows, summed) for rows, summed, columns in shapes[:2]]  # gradient of the weight
    pairs = [
        (
            torch.randn(rows, summed, device=device).to(dtype),
            torch.randn(columns, summed, device=device).to(dtype).t(),
        )
        for rows, summed, columns in shapes
    ]

    def step() -> None:
        for left, right in pairs:
            if dtype == torch.bfloat16:
                left @ right
            else:
                product(left, one, right, one)

    return step


def milliseconds(step: Callable[[], None], repeats: int) -> float:
    """Return the median device time of a call."""
    for _ in range(5):
        step()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def gradient_error(network: Callable[..., Tensor], tokens: int, width: int) -> float:
    """Return the relative error of the first matrix's gradient against float64."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda") * scale

    tensors = [
        draw(tokens, width),
        draw(4 * width, width, scale=width**-0.5),
        draw(width, 4 * width, scale=width**-0.5),
    ]
    gradient = draw(tokens, width)
    gradients = []
    for function, dtype in ((network, torch.bfloat16), (plain_network, torch.float64)):
        inputs = [nn.Parameter(tensor.to(dtype)) for tensor in tensors]
        function(*inputs).backward(gradient.to(dtype))
        assert inputs[1].grad is not None
        gradients.append(inputs[1].grad.double())
    return float((gradients[0] - gradients[1]).norm() / gradients[1].norm())


def main() -> None:
    options = _options()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.tokens:,} tokens, milliseconds")
    print(
        "| width | bfloat16 | float8 | ratio | products, bfloat16 | products, float8 | ratio "
        "| error, bfloat16 | error, float8 |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for width in options.widths:
        shapes = ((options.tokens, width), (4 * width, width), (width, 4 * width))
        tensors = tuple(nn.Parameter(torch.randn(shape, device="cuda").bfloat16() * 0.05) for shape in shapes)
        gradient = torch.randn(options.tokens, width, device="cuda").bfloat16()
        whole = [
            milliseconds(network_step(network, tensors, gradient), options.repeats)
            for network in (plain_network, float8_network)
        ]
        alone = [
            milliseconds(products_step(options.tokens, width, dtype), options.repeats)
            for dtype in (torch.bfloat16, E4M3)
        ]
        errors = [gradient_error(network, 4096, width) for network in (plain_network, float8_network)]
        cells = [f"{whole[0]:.2f}", f"{whole[1]:.2f}", f"**{whole[0] / whole[1]:.2f}**"]
        cells += [f"{alone[0]:.2f}", f"{alone[1]:.2f}", f"{alone[0] / alone[1]:.2f}"]
        cells += [f"{error:.1e}" for error in errors]
        print(f"| {width} | {' | '.join(cells)} |", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", nargs="+", type=int, default=[768, 1024, 2048])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=20)
    return parser.parse_args()


if __name__ == "__main__":
    main()

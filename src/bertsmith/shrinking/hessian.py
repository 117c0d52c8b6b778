"""Curvature of the loss along the weights of each layer, and bit widths by it (Q-BERT, Shen et al. 2020)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bertsmith.errors import InputError
from bertsmith.models.model import Model


@dataclass(frozen=True)
class Sharpness:
    """Largest eigenvalue of the Hessian of the loss over one layer's matrices, on every slice of the data."""

    eigenvalues: tuple[float, ...]

    @property
    def omega(self) -> float:
        """|mean| + standard deviation: sensitivity of the layer."""
        values = torch.tensor(self.eigenvalues, dtype=torch.float64)
        return float(values.mean().abs() + values.std(correction=0))


def top_eigenvalue(
    loss: Tensor, parameters: Sequence[Tensor], generator: torch.Generator, *, steps: int = 30, tolerance: float = 1e-3
) -> float:
    """Return the eigenvalue of largest magnitude of the Hessian, by power iteration on Hessian-vector products.

    It ends after `steps` products, or when the value changes by less than its share `tolerance`.
    """
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    vector = _normalised([torch.randn(p.shape, generator=generator, dtype=p.dtype).to(p) for p in parameters])
    value = 0.0
    for _ in range(steps):
        product = torch.autograd.grad(gradients, parameters, grad_outputs=vector, retain_graph=True)
        before, value = value, float(sum((a * b).sum() for a, b in zip(vector, product, strict=True)))
        if abs(value - before) <= tolerance * abs(value):
            break
        vector = _normalised(product)
    return value


def layer_sharpness(
    model: Model, losses: Iterable[Callable[[], Tensor]], *, seed: int = 0, steps: int = 30
) -> list[Sharpness]:
    """Return the sharpness of every layer of an encoder; each loss is the mean over one slice of the data.

    The losses must be computed with ops that can be differentiated twice: `backend="reference"`.
    """
    generator = torch.Generator().manual_seed(seed)
    found: list[list[float]] = [[] for _ in model.encoder.blocks]
    for loss in losses:
        for block, values in zip(model.encoder.blocks, found, strict=True):
            # a new graph for each layer: one shared graph would hold the memory of all layers
            values.append(top_eigenvalue(loss(), matrices(block), generator, steps=steps))
    return [Sharpness(tuple(values)) for values in found]


def matrices(block: nn.Module) -> list[Tensor]:
    """Return the matrices of a layer, which are quantised."""
    return [parameter for parameter in block.parameters() if parameter.dim() > 1]


def allotted_bits(
    omegas: Sequence[float], sizes: Sequence[int], choices: Sequence[int], average: float
) -> tuple[int, ...]:
    """Return bits for every layer, at most `average` per weight; the most sensitive layers get the most.

    Each in the order of its omega gets the most that leaves the lowest choice for all after it.
    """
    choices = sorted(choices)
    total = sum(sizes)
    if not choices or average < choices[0]:
        raise InputError(f"average bits are {average}; allowed: from the lowest choice up, of {list(choices)}")
    spare = (average - choices[0]) * total
    bits = [choices[0]] * len(sizes)
    for layer in sorted(range(len(sizes)), key=lambda index: -omegas[index]):
        affordable = [choice for choice in choices if (choice - choices[0]) * sizes[layer] <= spare + 1e-6 * total]
        bits[layer] = affordable[-1]
        spare -= (bits[layer] - choices[0]) * sizes[layer]
    return tuple(bits)


def _normalised(vectors: Sequence[Tensor]) -> list[Tensor]:
    norm = torch.stack([vector.square().sum() for vector in vectors]).sum().sqrt()
    return [vector / norm.clamp(min=torch.finfo(norm.dtype).tiny) for vector in vectors]

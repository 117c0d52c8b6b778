"""Hessian eigenvalues of each layer, and bit widths chosen by them (Q-BERT, Shen et al. 2020)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bertsmith.errors import InputError
from bertsmith.models.model import Model


@dataclass(frozen=True)
class Sharpness:
    """Top eigenvalue of the Hessian of the loss with respect to one layer's matrices, for every slice of the data."""

    eigenvalues: tuple[float, ...]

    @property
    def omega(self) -> float:
        """Sensitivity of the layer: |mean| + standard deviation."""
        values = torch.tensor(self.eigenvalues, dtype=torch.float64)
        return float(values.mean().abs() + values.std(correction=0))


def top_eigenvalue(
    loss: Tensor, parameters: Sequence[Tensor], generator: torch.Generator, *, steps: int = 30, tolerance: float = 1e-3
) -> float:
    """Return the eigenvalue of largest magnitude of the Hessian, by power iteration on Hessian-vector products.

    It stops after `steps` products, or when the relative change of the value is at most `tolerance`.
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

    The ops must be twice differentiable: compute the losses with `backend="reference"`.
    """
    if model.encoder.recomputes:
        raise InputError("a reversible or equilibrium encoder has no second derivatives; use another encoder")
    generator = torch.Generator().manual_seed(seed)
    eigenvalues: list[list[float]] = [[] for _ in model.encoder.blocks]
    for loss in losses:
        for block, values in zip(model.encoder.blocks, eigenvalues, strict=True):
            # a new graph for each layer: one shared graph would hold the memory of all layers
            values.append(top_eigenvalue(loss(), matrices(block), generator, steps=steps))
    return [Sharpness(tuple(values)) for values in eigenvalues]


def matrices(block: nn.Module) -> list[Tensor]:
    """Return the weight matrices of a layer (the tensors that are quantised)."""
    return [parameter for parameter in block.parameters() if parameter.dim() > 1]


def allotted_bits(
    omegas: Sequence[float], sizes: Sequence[int], choices: Sequence[int], average: float
) -> tuple[int, ...]:
    """Return bits per layer, at most `average` bits per weight over all layers; sensitive layers get more.

    Greedy in order of decreasing omega: each layer gets the most bits that leave the lowest choice for the rest.
    """
    choices = sorted(choices)
    total = sum(sizes)
    if not choices or average < choices[0]:
        raise InputError(f"average is {average} bits; allowed: at least the lowest of the choices {list(choices)}")
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

"""The random matrix: orthogonal blocks with the norms of normal vectors, a function of its seed alone."""

import torch
from torch import Tensor


def draw(
    features: int,
    head_width: int,
    generator: torch.Generator | None = None,
    *,
    is_orthogonal: bool = True,
    has_constant_norms: bool = False,
) -> Tensor:
    """A matrix (features, head_width) in float64 on the CPU, so that every process that draws it has the same one.

    Orthogonal: rows within each block of head_width rows are orthogonal, uniformly distributed directions. The norms
    are those of independent normal vectors, which keeps estimates unbiased, or all √head_width. 0 features stand for
    the identity: the feature map reads the coordinates of queries and keys themselves.
    """
    if features == 0:
        return torch.eye(head_width, dtype=torch.float64, device="cpu")
    normal = _normal(features, head_width, generator)
    if not is_orthogonal and not has_constant_norms:
        return normal
    directions = normal / normal.norm(dim=-1, keepdim=True)
    if is_orthogonal:
        blocks = -(-features // head_width)
        directions = torch.cat([_rotation(head_width, generator) for _ in range(blocks)])[:features]
    norms = head_width**0.5 if has_constant_norms else normal.norm(dim=-1, keepdim=True)
    return directions * norms


def _rotation(width: int, generator: torch.Generator | None) -> Tensor:
    """An orthogonal matrix from the uniform (Haar) distribution."""
    orthogonal, triangular = torch.linalg.qr(_normal(width, width, generator))
    # QR leaves the signs to the algorithm; without this the directions are not uniform
    return orthogonal * triangular.diagonal().sign()


def _normal(rows: int, columns: int, generator: torch.Generator | None) -> Tensor:
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64, device="cpu")

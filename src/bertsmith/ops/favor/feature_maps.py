"""Feature maps of linear attention, and the random matrix that projects queries and keys."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import elu, gelu

Curve = Callable[[Tensor], Tensor]
FeatureMapName = Literal[
    "softmax",
    "hyperbolic",
    "regularised",
    "trigonometric",
    "exp",
    "relu",
    "relu_squared",
    "elu",
    "gelu",
    "sigmoid",
    "abs",
    "tanh",
    "cos",
    "identity",
]


@dataclass(frozen=True)
class FeatureMap:
    """φ(x) = curve(u) · exp(norm · ‖x‖²) with u = Wx, or exp(u + norm · ‖x‖²) without a curve."""

    epsilon: float
    """Default of the ε that is added to every feature."""
    norm: float = 0.0
    """Factor of ‖x‖² in the exponent."""
    curve: Curve | None = None
    derivative: Curve | None = None
    copies: tuple[float, ...] = (1.0,)
    """Sign of each copy of W; every copy adds as many features as W has rows."""
    has_constant_norms: bool = False
    """All rows of W have the norm √head_width instead of the norms of normal vectors."""
    estimates_softmax: bool = False
    """The expectation of φ(x)ᵀφ(y) is exp(xᵀy), or a bound of it."""

    def width(self, rows: int) -> int:
        """Return the number of features for this many rows of W."""
        return rows * len(self.copies)

    def widened(self, random_matrix: Tensor) -> Tensor:
        """Return one row of the matrix per feature: (feature width, head_width)."""
        if len(self.copies) == 1:
            return random_matrix
        return torch.cat([sign * random_matrix for sign in self.copies])


def _sines(u: Tensor) -> Tensor:
    first, second = u.chunk(2, -1)
    return torch.cat([first.sin(), second.cos()], -1)


def _sines_derivative(u: Tensor) -> Tensor:
    first, second = u.chunk(2, -1)
    return torch.cat([first.cos(), -second.sin()], -1)


def _gelu_derivative(u: Tensor) -> Tensor:
    share = 0.5 * (1 + torch.erf(u * 0.5**0.5))
    return share + u * torch.exp(-0.5 * u * u) * (0.5 / torch.pi) ** 0.5


# Choromanski et al. 2021: Lemma 1 (softmax, hyperbolic), Theorem 2 (regularised), eq. 10 (trigonometric), and the
# generalised attention of appendix D.3. ε is 1e-6 for exponentials and 1e-3 for curves, which can be 0 everywhere.
# trigonometric, gelu, tanh, cos and identity, the paper's baselines, can be negative: their row sums can approach 0.
FEATURE_MAPS: dict[str, FeatureMap] = {
    "softmax": FeatureMap(1e-6, norm=-0.5, estimates_softmax=True),
    "hyperbolic": FeatureMap(1e-6, norm=-0.5, copies=(1.0, -1.0), estimates_softmax=True),
    "regularised": FeatureMap(1e-6, norm=-0.5, has_constant_norms=True, estimates_softmax=True),
    "trigonometric": FeatureMap(
        0.0,
        norm=0.5,
        curve=_sines,
        derivative=_sines_derivative,
        copies=(1.0, 1.0),
        estimates_softmax=True,
    ),
    "exp": FeatureMap(1e-6),
    "relu": FeatureMap(1e-3, curve=torch.relu, derivative=lambda u: (u > 0).to(u.dtype)),
    "relu_squared": FeatureMap(1e-3, curve=lambda u: u.relu().square(), derivative=lambda u: 2 * u.relu()),
    "elu": FeatureMap(1e-3, curve=lambda u: elu(u) + 1, derivative=lambda u: u.clamp(max=0).exp()),
    "gelu": FeatureMap(1e-3, curve=gelu, derivative=_gelu_derivative),
    "sigmoid": FeatureMap(1e-3, curve=torch.sigmoid, derivative=lambda u: u.sigmoid() * (1 - u.sigmoid())),
    "abs": FeatureMap(1e-3, curve=torch.abs, derivative=torch.sign),
    "tanh": FeatureMap(1e-3, curve=torch.tanh, derivative=lambda u: 1 - u.tanh().square()),
    "cos": FeatureMap(1e-3, curve=torch.cos, derivative=lambda u: -u.sin()),
    "identity": FeatureMap(1e-3, curve=lambda u: u, derivative=torch.ones_like),
}


def draw(
    features: int,
    head_width: int,
    generator: torch.Generator | None = None,
    *,
    is_orthogonal: bool = True,
    has_constant_norms: bool = False,
) -> Tensor:
    """Draw a matrix (features, head_width), in float64 on the CPU, so that all processes draw the same one.

    With `is_orthogonal`, the rows of each block of head_width rows are orthogonal with uniformly distributed
    directions. Their norms are the norms of independent normal vectors, which keeps estimates unbiased, or all
    √head_width. 0 features give the identity: the feature map is applied to queries and keys directly.
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
    """Draw an orthogonal matrix from the uniform (Haar) distribution."""
    orthogonal, triangular = torch.linalg.qr(_normal(width, width, generator))
    # the signs of a QR decomposition are arbitrary; without this the distribution is not uniform
    return orthogonal * triangular.diagonal().sign()


def _normal(rows: int, columns: int, generator: torch.Generator | None) -> Tensor:
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64, device="cpu")

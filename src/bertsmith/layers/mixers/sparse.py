"""The setting of sparse attention weights, and the learned α of each head (Correia et al. 2019)."""

import copy
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from bertsmith.layers.elementwise import first_units
from bertsmith.ops.sparse import SparseMap
from bertsmith.settings import Record

FIXED_ALPHA = {"sparsemax": 2.0, "entmax15": 1.5}


class SparseConfig(Record):
    """Attention weights that are exactly 0 for keys with low scores, in place of the softmax.

    The name of the kind alone is enough: `sparse = "entmax15"`.
    """

    kind: Literal["sparsemax", "entmax15", "entmax"] = "sparsemax"
    """Sparsemax (α = 2), the milder entmax15 (α = 1.5), or entmax with another or a learned α."""
    sparsity: float = Field(default=0.0, lt=1)
    """λ of SSAF (Cui et al. 2019), only with sparsemax: the weights are sparsemax(scores / (1 − λ)). Towards 1 a query
    attends to one key, at 0 it is sparsemax, and below 0 weights become dense; start from trained softmax weights with
    0 or less."""
    alpha: float | None = Field(default=None, gt=1, le=2)
    """α of entmax, from nearly softmax (1) to sparsemax (2); None learns one per head, starting from 1.5."""

    @classmethod
    def expand(cls, value: Any, path: str) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_kind(self) -> "SparseConfig":
        if self.sparsity and self.kind != "sparsemax":
            raise ValueError(f"sparsity is {self.sparsity} with kind {self.kind!r}; allowed: with kind 'sparsemax'")
        if self.alpha is not None and self.kind != "entmax":
            raise ValueError(f"alpha is {self.alpha} with kind {self.kind!r}; allowed: with kind 'entmax'")
        return self

    def build(self, heads: int) -> "SparseWeights":
        alpha = FIXED_ALPHA.get(self.kind, self.alpha)
        return SparseWeights(heads, alpha, 1 / (1 - self.sparsity))


class SparseWeights(nn.Module):
    """The function from scores to attention weights of every head; `alpha` None for a learned α = 1 + σ(logit)."""

    def __init__(self, heads: int, alpha: float | None, scale: float) -> None:
        super().__init__()
        self.alpha, self.scale = alpha, scale
        self.alpha_logits = nn.Parameter(torch.empty(heads)) if alpha is None else None

    def initialise(self, init_std: float, generator: torch.Generator | None) -> None:
        """Start with α = 1.5 in all heads."""
        if self.alpha_logits is not None:
            nn.init.zeros_(self.alpha_logits)

    def forward(self, keep_heads: int | None) -> SparseMap:
        """Return the function for the first heads; None for all."""
        if self.alpha_logits is None:
            assert self.alpha is not None
            return SparseMap(self.alpha, self.scale)
        return SparseMap(1 + first_units(self.alpha_logits, keep_heads).sigmoid(), self.scale)

    @torch.no_grad()
    def reorder(self, heads: Tensor) -> None:
        """Sort the heads in place by the given order."""
        if self.alpha_logits is not None:
            self.alpha_logits.copy_(self.alpha_logits[heads])

    def extract(self, heads: int) -> "SparseWeights":
        """Return a new module with the first heads only."""
        small = copy.deepcopy(self)
        if self.alpha_logits is not None:
            small.alpha_logits = nn.Parameter(self.alpha_logits.detach()[:heads].clone())
        return small

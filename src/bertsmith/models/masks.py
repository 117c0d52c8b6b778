"""Masks over the weights of a model: put them in, read them, choose them by magnitude, and remove them.

Every linear matrix of the encoder and the pooler can be pruned, and the token table on request. Position and type
tables, norms, biases, convolution kernels, the halting unit and the other heads stay dense.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from bertsmith.errors import InputError
from bertsmith.layers.embedding import Embedding, TokenRows
from bertsmith.layers.halting import Halting
from bertsmith.layers.linear import ElasticLinear, GroupedLinear
from bertsmith.layers.masked import MaskedGroupedLinear, MaskedLinear, MaskedRows
from bertsmith.models.model import Model
from bertsmith.models.swapping import multiplies_no_states, swap

Pattern = Literal["free", "2:4"]
Scope = Literal["matrix", "global"]
_MASKED = (MaskedLinear, MaskedGroupedLinear, MaskedRows)
_PRUNED_PREFIXES = ("encoder.", "heads.pooler.")


@dataclass(frozen=True)
class MaskedWeight:
    """A masked parameter and its mask, which are changed in place."""

    name: str
    """Name of the parameter in the model."""
    weight: nn.Parameter
    mask: Tensor
    parts: int = 1
    """Stacked projections, such as query, key and value, each of which counts as a matrix."""
    is_table: bool = False

    @torch.no_grad()
    def clear(self) -> None:
        """Set pruned weights to 0."""
        self.weight.masked_fill_(~self.mask, 0.0)

    @property
    def matrices(self) -> list["Matrix"]:
        """The matrices in this parameter, as views with the inputs on the last axis."""
        if self.mask.dim() == 3:  # groups of (inputs, outputs)
            return [Matrix(self.name, self.weight.detach().transpose(1, 2), self.mask.transpose(1, 2))]
        names = [self.name] if self.parts == 1 else [f"{self.name}[{part}]" for part in range(self.parts)]
        weights, masks = self.weight.detach().chunk(self.parts), self.mask.chunk(self.parts)
        return [Matrix(*one, self.is_table) for one in zip(names, weights, masks, strict=True)]


@dataclass(frozen=True)
class Matrix:
    """One matrix that is pruned by itself: views of weights and mask, (…, inputs)."""

    name: str
    weight: Tensor
    mask: Tensor
    is_table: bool = False

    @property
    def kept(self) -> int:
        """Number of weights that are not pruned."""
        return int(self.mask.sum())

    @property
    def magnitudes(self) -> Tensor:
        """Absolute weights; -1 where already pruned, and infinite at the largest weight of each row of a table.

        A token whose vector is 0 would vanish from the text.
        """
        scores = self.weight.abs().masked_fill(~self.mask, -1.0)
        return scores.scatter(1, scores.argmax(1, keepdim=True), torch.inf) if self.is_table else scores


def has_masks(model: nn.Module) -> bool:
    """Return whether any weights of a model are masked."""
    return any(isinstance(part, _MASKED) for part in model.modules())


def masked_weights(model: nn.Module) -> list[MaskedWeight]:
    """Return all masked parameters; a shared one once."""
    return list(_masked_weights(model))


def _masked_weights(model: nn.Module) -> Iterator[MaskedWeight]:
    for path, part in model.named_modules():
        if isinstance(part, MaskedLinear):
            yield MaskedWeight(f"{path}.weight", part.weight, part.mask, part.parts)
        elif isinstance(part, MaskedGroupedLinear):
            yield MaskedWeight(f"{path}.weight", part.weight, part.mask)
        elif isinstance(part, Embedding) and isinstance(part.rows, MaskedRows) and part.token_table is not None:
            yield MaskedWeight(f"{path}.token_table", part.token_table, part.rows.mask, is_table=True)


def masks_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the masks of a model by the names of their parameters."""
    return {masked.name: masked.mask for masked in masked_weights(model)}


def prunable_weights(model: Model, *, token_table: bool = False) -> dict[str, nn.Parameter]:
    """Return the parameters that can be masked, by name."""
    found: dict[str, nn.Parameter] = {}
    for path, part in model.named_modules():
        if not path.startswith(_PRUNED_PREFIXES):
            continue
        for name, layer in part.named_children():
            is_linear = isinstance(layer, ElasticLinear | GroupedLinear) and not multiplies_no_states(part, layer)
            if is_linear and not isinstance(part, Halting):
                found.setdefault(f"{path}.{name}.weight", layer.weight)
        if token_table and isinstance(part, Embedding) and part.token_table is not None:
            found[f"{path}.token_table"] = part.token_table
    first: dict[nn.Parameter, str] = {}
    for name, weight in found.items():
        first.setdefault(weight, name)  # a shared layer is masked once
    return {name: weight for weight, name in first.items()}


def put_masks(model: Model, masks: Mapping[str, Tensor]) -> None:
    """Mask parameters of a model in place and set its pruned weights to 0; other masks of the model stay."""
    left = dict(masks)

    def make(path: str, parent: nn.Module, part: nn.Module) -> nn.Module:
        name = f"{path}.weight"
        if isinstance(part, TokenRows) and isinstance(parent, Embedding):
            name = f"{path.rpartition('.')[0]}.token_table"
        mask = left.pop(name, None)
        if mask is None:
            return part
        weight = parent.token_table if isinstance(parent, Embedding) and isinstance(part, TokenRows) else part.weight
        assert isinstance(weight, nn.Parameter)
        if mask.shape != weight.shape:
            shapes = f"{tuple(mask.shape)}; the weights have {tuple(weight.shape)}"
            raise InputError(f"the mask of {name!r} has shape {shapes}")
        mask = mask.to(device=weight.device, copy=True)
        if isinstance(part, TokenRows):
            return MaskedRows(mask)
        if isinstance(part, GroupedLinear):
            return MaskedGroupedLinear(part, mask)
        assert isinstance(part, ElasticLinear)
        return MaskedLinear(part, mask)

    swap(model, make)
    if left:
        raise InputError(f"there is a mask for {next(iter(left))!r}, which this model does not have")
    for masked in masked_weights(model):
        masked.clear()
    model.train(model.training)


def unmasked(model: Model) -> Model:
    """Return a copy with plain layers: pruned weights are zeros that training may change."""
    copied = copy.deepcopy(model)
    for masked in masked_weights(copied):
        masked.clear()

    def make(_: str, __: nn.Module, part: nn.Module) -> nn.Module:
        if isinstance(part, MaskedRows):
            return TokenRows()
        return part.plain() if isinstance(part, MaskedLinear | MaskedGroupedLinear) else part

    swap(copied, make)
    return copied.train(model.training)


def refuse_masks(model: Model, what: str) -> None:
    """Raise InputError if a model has masks, which `what` does not keep."""
    if has_masks(model):
        raise InputError(
            f"the model has pruned weights (masks.safetensors), which {what} does not keep at 0; set "
            "model.keep_masks=false to start from its weights without the masks"
        )


def sparsity_of(matrices: Sequence[Matrix]) -> float:
    """Return the share of pruned weights."""
    total = sum(matrix.mask.numel() for matrix in matrices)
    return 1 - sum(matrix.kept for matrix in matrices) / max(1, total)


def kept_count(weights: int, sparsity: float) -> int:
    """Return ⌊(1 - sparsity) · weights⌋; a product that is an integer but for rounding counts as one."""
    return math.floor((1 - sparsity) * weights + 1e-6)


@torch.no_grad()
def prune_weights(model: Model, sparsity: float, *, pattern: Pattern = "free", scope: Scope = "matrix") -> None:
    """Prune the smallest weights of all masked matrices in place, until a share of them is pruned.

    The number is exact, in each matrix or over all of them; of equal magnitudes the first in memory is pruned first.
    Pruned weights stay pruned. With pattern "2:4", the two smallest of every four inputs are pruned.
    """
    weights = masked_weights(model)
    matrices = [matrix for masked in weights for matrix in masked.matrices]
    if pattern == "2:4":
        for matrix in matrices:
            _prune_fours(matrix)
    elif scope == "matrix":
        for matrix in matrices:
            _prune_smallest([matrix], sparsity)
    else:
        _prune_smallest(matrices, sparsity)
    for masked in weights:
        masked.clear()


def _prune_smallest(matrices: Sequence[Matrix], sparsity: float) -> None:
    """Prune the smallest weights of all the matrices together."""
    scores = torch.cat([matrix.magnitudes.flatten() for matrix in matrices])
    kept = min(kept_count(len(scores), sparsity), sum(matrix.kept for matrix in matrices))
    rows = sum(len(matrix.mask) for matrix in matrices if matrix.is_table)
    if kept < rows:
        raise InputError(
            f"sparsity {sparsity:g} keeps {kept:,} weights of {matrices[0].name}, which has {rows:,} rows; allowed: at "
            "least one weight of every token"
        )
    flat = torch.ones_like(scores, dtype=torch.bool)
    flat[scores.sort(stable=True).indices[: len(scores) - kept]] = False
    for matrix, mask in zip(matrices, flat.split([matrix.mask.numel() for matrix in matrices]), strict=True):
        matrix.mask.copy_(mask.view(matrix.mask.shape))


def _prune_fours(matrix: Matrix) -> None:
    """Prune the two smallest of every four inputs."""
    if matrix.mask.shape[-1] % 4:
        raise InputError(
            f"pattern is '2:4' and {matrix.name} has {matrix.mask.shape[-1]} inputs; allowed: a multiple of 4"
        )
    fours = matrix.magnitudes.unflatten(-1, (-1, 4))  # (…, inputs) -> (…, inputs / 4, 4)
    smallest = fours.sort(dim=-1, stable=True).indices[..., :2]
    kept = torch.ones_like(fours, dtype=torch.bool).scatter(-1, smallest, False)
    matrix.mask.logical_and_(kept.flatten(-2))

"""Reversible tables of tensor names, ours and Hugging Face's: one table serves reading and writing."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bertsmith.errors import InputError


@dataclass(frozen=True)
class Conversion:
    """Conversion between our tensor and theirs, in both directions."""

    to_ours: Callable[[list[Tensor]], Tensor]
    to_theirs: Callable[[Tensor, int], Sequence[Tensor]]
    """(our tensor, number of their tensors) → their tensors."""


STACKED = Conversion(
    to_ours=lambda parts: parts[0] if len(parts) == 1 else torch.cat(parts),
    to_theirs=lambda tensor, count: tensor.chunk(count),
)


def reshaped(to_ours: Callable[[Tensor], Tensor], to_theirs: Callable[[Tensor], Tensor]) -> Conversion:
    """A conversion of the axes of one tensor."""
    return Conversion(lambda parts: to_ours(parts[0]), lambda tensor, _: [to_theirs(tensor)])


@dataclass(frozen=True)
class Row:
    """One of our tensors and the tensor, or the stack of tensors, that it is in the other library.

    A row without any of theirs is a tensor of ours that has the same value in every file of theirs.
    """

    ours: str
    theirs: tuple[str, ...]
    conversion: Conversion = STACKED

    def at(self, mark: str, layer: int) -> "Row":
        theirs = tuple(name.replace(mark, str(layer)) for name in self.theirs)
        return Row(self.ours.replace(mark, str(layer)), theirs, self.conversion)


def row(ours: str, *theirs: str, conversion: Conversion = STACKED) -> Row:
    return Row(ours, theirs, conversion)


def linear(ours: str, *theirs: str) -> list[Row]:
    """Rows for the weight and the bias of a layer."""
    return [Row(f"{ours}.{part}", tuple(f"{name}.{part}" for name in theirs)) for part in ("weight", "bias")]


def expand(rows: Iterable[Row], layers: int, decoder_layers: int = 0) -> list[Row]:
    """Expand the rows for every layer: `{i}` is the index of an encoder layer, `{j}` of a decoder layer."""
    result: list[Row] = []
    for line in rows:
        if "{i}" in line.ours:
            result += [line.at("{i}", layer) for layer in range(layers)]
        elif "{j}" in line.ours:
            result += [line.at("{j}", layer) for layer in range(decoder_layers)]
        else:
            result.append(line)
    return result


def to_ours(rows: Iterable[Row], theirs: dict[str, Tensor], source: str) -> dict[str, Tensor]:
    """Convert their tensors to ours; raise if one is missing."""
    ours = {}
    for line in rows:
        missing = [name for name in line.theirs if name not in theirs]
        if missing:
            raise InputError(f"{source} lacks the tensor {missing[0]!r}")
        ours[line.ours] = line.conversion.to_ours([theirs[name] for name in line.theirs])
    return ours


def to_theirs(rows: Iterable[Row], ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert our tensors to theirs."""
    theirs: dict[str, Tensor] = {}
    for line in rows:
        parts = line.conversion.to_theirs(ours[line.ours], len(line.theirs))
        theirs.update(zip(line.theirs, parts, strict=True))
    return theirs

"""Reversible tables of tensor names: ours on the left, another library's on the right.

A row is data, so one table serves reading and writing.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bertsmith.errors import InputError


@dataclass(frozen=True)
class Change:
    """How tensors differ in form from one library to the other, both ways."""

    to_ours: Callable[[list[Tensor]], Tensor]
    to_theirs: Callable[[Tensor, int], Sequence[Tensor]]
    """(our tensor, how many tensors it is there) → their tensors."""


STACKED = Change(
    to_ours=lambda parts: parts[0] if len(parts) == 1 else torch.cat(parts),
    to_theirs=lambda tensor, count: tensor.chunk(count),
)


def shaped(to_ours: Callable[[Tensor], Tensor], to_theirs: Callable[[Tensor], Tensor]) -> Change:
    """The change of one tensor's axes."""
    return Change(lambda parts: to_ours(parts[0]), lambda tensor, _: [to_theirs(tensor)])


@dataclass(frozen=True)
class Row:
    """One of our tensors and the tensor, or the stack of tensors, it is elsewhere."""

    ours: str
    theirs: tuple[str, ...]
    change: Change = STACKED

    def at(self, mark: str, layer: int) -> "Row":
        theirs = tuple(name.replace(mark, str(layer)) for name in self.theirs)
        return Row(self.ours.replace(mark, str(layer)), theirs, self.change)


def row(ours: str, *theirs: str, change: Change = STACKED) -> Row:
    return Row(ours, theirs, change)


def linear(ours: str, *theirs: str) -> list[Row]:
    """The two rows of a layer with weight and bias."""
    return [Row(f"{ours}.{part}", tuple(f"{name}.{part}" for name in theirs)) for part in ("weight", "bias")]


def expand(rows: Iterable[Row], layers: int, decoder_layers: int = 0) -> list[Row]:
    """The rows of a model with so many layers: `{i}` stands for those of the encoder, `{j}` for those of a decoder."""
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
    """Our tensors, taken from another library's; says which one is missing."""
    ours = {}
    for line in rows:
        missing = [name for name in line.theirs if name not in theirs]
        if missing:
            raise InputError(f"{source} lacks the tensor {missing[0]!r}")
        ours[line.ours] = line.change.to_ours([theirs[name] for name in line.theirs])
    return ours


def to_theirs(rows: Iterable[Row], ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Another library's tensors, taken from ours."""
    theirs: dict[str, Tensor] = {}
    for line in rows:
        parts = line.change.to_theirs(ours[line.ours], len(line.theirs))
        theirs.update(zip(line.theirs, parts, strict=True))
    return theirs

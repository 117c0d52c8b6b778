"""Sub-networks as data: how many heads and neurons each layer keeps, and which layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from bertsmith.errors import InputError
from bertsmith.settings import Record


@dataclass(frozen=True)
class LayerCut:
    """The units one layer keeps: its first `heads` heads and its first `neurons` neurons.

    Neurons that come in `groups` are kept evenly: the first neurons / groups of each.
    """

    heads: int
    neurons: int
    groups: int = 1


class Subnet(Record):
    """A smaller network inside a larger one: an even width and depth, or counts layer by layer.

    >>> Subnet(width=0.5, depth=0.5)
    Subnet(width=0.5, depth=0.5, heads=None, neurons=None, layers=None, depth_rule='keep_last')
    """

    width: float = Field(default=1.0, gt=0, le=1)
    """Share of heads and of neurons that every layer keeps."""
    depth: float = Field(default=1.0, gt=0, le=1)
    """Share of layers that are kept, evenly spread."""
    heads: tuple[int, ...] | None = None
    """Heads of each kept layer, instead of the even width; neurons follow in proportion unless they are given."""
    neurons: tuple[int, ...] | None = None
    """Neurons of each kept layer, instead of the even width."""
    layers: tuple[int, ...] | None = None
    """Indices of the kept layers, instead of the even depth."""
    depth_rule: Literal["keep_last", "drop_last"] = "keep_last"
    """Which layers an even depth keeps; "drop_last" is the rule of the released DynaBERT weights."""

    def cuts(self, full: Sequence[LayerCut]) -> list[tuple[int, LayerCut]]:
        """The kept layers in order, each with its index and its cut, for an encoder whose layers have `full` units."""
        kept = self.kept_layers(len(full))
        cuts = []
        for position, index in enumerate(kept):
            units = full[index]
            heads = (
                _even(units.heads, self.width) if self.heads is None else _listed("heads", self.heads, kept, position)
            )
            # one ratio for both kinds of units, as DynaBERT trains them
            neurons = (
                _multiple(heads * units.neurons // units.heads, units.groups)
                if self.neurons is None
                else _listed("neurons", self.neurons, kept, position)
            )
            if neurons % units.groups:
                raise InputError(f"subnet.neurons is {neurons} for layer {index}; allowed: multiples of {units.groups}")
            for name, count, limit in (("heads", heads, units.heads), ("neurons", neurons, units.neurons)):
                if not 1 <= count <= limit:
                    raise InputError(f"subnet.{name} is {count} for layer {index}; allowed: 1 to {limit}")
            cuts.append((index, LayerCut(heads, neurons, units.groups)))
        return cuts

    def kept_layers(self, layers: int) -> tuple[int, ...]:
        """The indices of the layers that stay, of `layers` in all (Hou et al. 2020; both published depth rules)."""
        if self.layers is not None:
            if not self.layers or list(self.layers) != sorted({i for i in self.layers if 0 <= i < layers}):
                raise InputError(f"subnet.layers is {self.layers}; allowed: rising indices from 0 to {layers - 1}")
            return self.layers
        kept = _even(layers, self.depth)
        if self.depth_rule == "drop_last":
            return tuple(i * layers // kept for i in range(kept))
        return tuple(i * layers // kept - 1 for i in range(1, kept + 1))

    @property
    def is_even(self) -> bool:
        """Whether it is given by a width and a depth alone."""
        return self.heads is None and self.neurons is None and self.layers is None

    def counterparts(self, layers: int) -> tuple[int, ...]:
        """For each state on the way through the kept layers, embedding first, the like one among layers + 1 states.

        Where the last layer stays, what leaves a kept layer is compared; with "drop_last", as in the released code,
        what enters it, and the last states with the last.
        """
        kept = self.kept_layers(layers)
        if self.layers is None and self.depth_rule == "drop_last":
            return (*kept, layers)
        return (0, *(index + 1 for index in kept))


def is_even(cuts: Sequence[tuple[int, LayerCut]]) -> bool:
    """Whether all kept layers keep the same units, so that what they share can stay shared."""
    return len({cut for _, cut in cuts}) == 1


def _even(units: int, share: float) -> int:
    """The rounded share of a count, at least one; half rounds up, unlike Python's `round`."""
    return max(1, int(units * share + 0.5))


def _multiple(count: int, of: int) -> int:
    """The count rounded down to a multiple, at least the first one."""
    return max(of, count // of * of)


def _listed(name: str, counts: tuple[int, ...], kept: tuple[int, ...], position: int) -> int:
    if len(counts) != len(kept):
        raise InputError(f"subnet.{name} lists {len(counts)} layers but {len(kept)} layers are kept")
    return counts[position]

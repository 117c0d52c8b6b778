"""Sub-networks as data: how many heads and neurons each layer keeps, and which layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from bertsmith.errors import InputError
from bertsmith.settings import Record


@dataclass(frozen=True)
class LayerCut:
    """The units that a layer keeps: its first `heads` heads and its first `neurons` neurons.

    With `groups`, the first neurons / groups of each group are kept.
    """

    heads: int
    neurons: int
    groups: int = 1


class Subnet(Record):
    """A smaller network inside a larger one: a uniform width and depth, or counts layer by layer.

    >>> Subnet(width=0.5, depth=0.5)
    Subnet(width=0.5, depth=0.5, heads=None, neurons=None, layers=None, depth_rule='keep_last')
    """

    width: float = Field(default=1.0, gt=0, le=1)
    """Share of heads and of neurons that every layer keeps."""
    depth: float = Field(default=1.0, gt=0, le=1)
    """Share of layers that are kept, evenly spaced."""
    heads: tuple[int, ...] | None = None
    """Heads of each kept layer, instead of `width`; neurons are kept in proportion unless `neurons` is set."""
    neurons: tuple[int, ...] | None = None
    """Neurons of each kept layer, instead of `width`."""
    layers: tuple[int, ...] | None = None
    """Indices of the kept layers, instead of `depth`."""
    depth_rule: Literal["keep_last", "drop_last"] = "keep_last"
    """Layers that `depth` keeps; "drop_last" is the rule of the released DynaBERT weights."""

    def cuts(self, full: Sequence[LayerCut]) -> list[tuple[int, LayerCut]]:
        """Return index and cut of each kept layer, in order, for an encoder whose layers have `full` units."""
        kept = self.kept_layers(len(full))
        cuts = []
        for position, index in enumerate(kept):
            units = full[index]
            heads = (
                _share(units.heads, self.width)
                if self.heads is None
                else _listed_count("heads", self.heads, kept, position)
            )
            # one ratio for both kinds of units, as DynaBERT trains them
            neurons = (
                _round_down(heads * units.neurons // units.heads, units.groups)
                if self.neurons is None
                else _listed_count("neurons", self.neurons, kept, position)
            )
            if neurons % units.groups:
                raise InputError(f"subnet.neurons is {neurons} for layer {index}; allowed: multiples of {units.groups}")
            for name, count, limit in (("heads", heads, units.heads), ("neurons", neurons, units.neurons)):
                if not 1 <= count <= limit:
                    raise InputError(f"subnet.{name} is {count} for layer {index}; allowed: 1 to {limit}")
            cuts.append((index, LayerCut(heads, neurons, units.groups)))
        return cuts

    def kept_layers(self, layers: int) -> tuple[int, ...]:
        """Return the indices of the kept layers, of `layers` in total (Hou et al. 2020; both published depth rules)."""
        if self.layers is not None:
            if not self.layers or list(self.layers) != sorted({i for i in self.layers if 0 <= i < layers}):
                raise InputError(f"subnet.layers is {self.layers}; allowed: ascending indices from 0 to {layers - 1}")
            return self.layers
        count = _share(layers, self.depth)
        if self.depth_rule == "drop_last":
            return tuple(i * layers // count for i in range(count))
        return tuple(i * layers // count - 1 for i in range(1, count + 1))

    @property
    def is_even(self) -> bool:
        """Whether width and depth alone define it."""
        return self.heads is None and self.neurons is None and self.layers is None

    def counterparts(self, layers: int) -> tuple[int, ...]:
        """Return, for the embedding and each kept layer, the index of the matching hidden states of the whole model.

        With "keep_last" the outputs of a layer are matched. With "drop_last", as in the released code, the inputs of a
        kept layer are matched, and the final hidden states with the final ones.
        """
        kept = self.kept_layers(layers)
        if self.layers is None and self.depth_rule == "drop_last":
            return (*kept, layers)
        return (0, *(index + 1 for index in kept))


def is_even(cuts: Sequence[tuple[int, LayerCut]]) -> bool:
    """Return whether all kept layers keep the same units, so that shared modules can stay shared."""
    return len({cut for _, cut in cuts}) == 1


def _share(units: int, share: float) -> int:
    """Return units · share, rounded half up (unlike Python's `round`), at least 1."""
    return max(1, int(units * share + 0.5))


def _round_down(count: int, multiple: int) -> int:
    """Round a count down to a multiple, at least the first one."""
    return max(multiple, count // multiple * multiple)


def _listed_count(name: str, counts: tuple[int, ...], kept: tuple[int, ...], position: int) -> int:
    if len(counts) != len(kept):
        raise InputError(
            f"subnet.{name} lists {len(counts)} layers but {len(kept)} layers are kept; list one per layer"
        )
    return counts[position]

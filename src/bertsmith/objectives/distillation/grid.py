"""The sub-networks that an elastic model is trained for: all of a grid at every step, or some that are drawn."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from bertsmith.data.random import generator
from bertsmith.layers.subnet import LayerCut, Subnet
from bertsmith.settings import Record


class Grid(Record):
    """Widths × depths, and how many of them learn at a time."""

    widths: tuple[float, ...] = (1.0, 0.75, 0.5, 0.25)
    """Shares of heads and neurons; the whole width is always among them."""
    depths: tuple[float, ...] = (1.0, 0.75, 0.5)
    """Shares of layers; the whole depth is always among them."""
    depth_rule: Literal["keep_last", "drop_last"] = "keep_last"
    """Which layers stay; "drop_last" is the rule of the released DynaBERT weights."""
    sample: int | None = Field(default=None, ge=0)
    """How many sub-networks learn in a step besides the largest and the smallest (the sandwich rule); None for all."""
    per_layer: bool = False
    """Whether those that are drawn have a width of their own in every layer, heads and neurons apart: for a search over
    such networks, which are no use unless they were trained."""

    @model_validator(mode="after")
    def _check(self) -> "Grid":
        for name in ("widths", "depths"):
            shares = getattr(self, name)
            if 1.0 not in shares or len(set(shares)) < len(shares) or not all(0 < share <= 1 for share in shares):
                raise ValueError(f"{name} is {list(shares)}; allowed: different shares above 0 up to 1, 1 among them")
        if self.per_layer and not self.sample:
            raise ValueError(f"per_layer is true and sample is {self.sample}; allowed: a sample of 1 or more")
        return self

    @property
    def subnets(self) -> tuple[Subnet, ...]:
        """All of the grid, the smallest first and the largest last."""
        return tuple(
            Subnet(width=width, depth=depth, depth_rule=self.depth_rule)
            for depth in sorted(self.depths)
            for width in sorted(self.widths)
        )

    @property
    def is_whole(self) -> bool:
        """Whether all of the grid learns at every step."""
        count = len(self.subnets)
        return count == 1 or (not self.per_layer and (self.sample is None or self.sample >= count - 2))

    def drawn(self, units: Sequence[LayerCut], *seed: int) -> tuple[Subnet, ...]:
        """Those of one step, for an encoder of such layers; a function of the seed. The largest is the last."""
        if self.is_whole:
            return self.subnets
        smallest, *between, largest = self.subnets
        draw, sample = generator(*seed), self.sample or 0
        if self.per_layer:
            chosen = [self._uneven(units, draw) for _ in range(sample)]
        else:
            chosen = [between[place] for place in sorted(draw.permutation(len(between))[:sample])]
        return (smallest, *chosen, largest)

    def _uneven(self, units: Sequence[LayerCut], draw: np.random.Generator) -> Subnet:
        """A sub-network with widths drawn for each layer."""
        depth = float(draw.choice(self.depths))
        kept = Subnet(depth=depth, depth_rule=self.depth_rule).kept_layers(len(units))
        cuts = []
        for index in kept:
            heads, neurons = (
                Subnet(width=float(draw.choice(self.widths))).cuts([units[index]])[0][1] for _ in range(2)
            )
            cuts.append((heads.heads, neurons.neurons))
        return Subnet(
            depth=depth,
            depth_rule=self.depth_rule,
            heads=tuple(heads for heads, _ in cuts),
            neurons=tuple(count for _, count in cuts),
        )

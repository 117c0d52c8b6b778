"""Select the heads and neurons to keep, by their worth."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from bertsmith.errors import InputError
from bertsmith.layers.feedforward import FeedForwardConfig
from bertsmith.layers.linear import ElasticLinear
from bertsmith.layers.mixers import MixerConfig
from bertsmith.layers.subnet import LayerCut
from bertsmith.models.config import EncoderConfig
from bertsmith.models.model import Model
from bertsmith.settings import Record
from bertsmith.shrinking.importance import Importance, summed_over_uses
from bertsmith.shrinking.pruned_units import KeptUnits


class PruneConfig(Record):
    """Which units are kept, and how many."""

    by: Literal["importance", "magnitude", "l0"] = "importance"
    """The worth of a unit: the change of the loss without it, the norm of its weights, or a trained gate with an L0
    penalty."""
    scope: Literal["global", "layer"] = "global"
    """Whether units are ranked across layers, so that layers end up uneven, or every layer keeps the same share."""
    keep: float = Field(default=0.5, gt=0, le=1)
    """The share to keep; at least one head and one `multiple` of neurons are kept in every layer."""
    keep_heads: float | None = Field(default=None, gt=0, le=1)
    """Share of the heads; None for `keep`."""
    keep_neurons: float | None = Field(default=None, gt=0, le=1)
    """Share of the neurons; None for `keep`."""
    counts: Literal["units", "parameters"] = "units"
    """What `keep` is a share of: the heads and the neurons, each, or the weights of all mixers and feed-forwards, with
    as large a share of the heads as of the neurons."""
    step: float = Field(default=0.1, gt=0, le=1)
    """The share that is removed at a time, before worth is measured again; 1 for all at once."""
    multiple: int = Field(default=8, gt=0)
    """Every layer keeps a multiple of so many neurons, or all it has; multiples make matrix products faster."""

    @model_validator(mode="after")
    def _check_counts(self) -> "PruneConfig":
        if self.counts == "parameters" and (self.keep_heads is not None or self.keep_neurons is not None):
            raise ValueError("counts is 'parameters' with keep_heads or keep_neurons; allowed: keep alone")
        return self


@dataclass(frozen=True)
class Shares:
    """Shares of the unpruned model to keep: of heads and neurons, or of all their weights."""

    heads: float
    neurons: float


def schedule(config: PruneConfig) -> tuple[Shares, ...]:
    """Return the shares after every cut, in even steps of at most `step`; at least one cut."""
    heads, neurons = (config.keep if own is None else own for own in (config.keep_heads, config.keep_neurons))
    most = 1 - min(heads, neurons)
    cuts = 1 if config.by == "l0" else max(1, math.ceil(most / config.step - 1e-9))
    return tuple(Shares(1 - (1 - heads) * done / cuts, 1 - (1 - neurons) * done / cuts) for done in range(1, cuts + 1))


class Selector:
    """Selects units of a model, or of an already cut one; shares are of the whole model."""

    def __init__(self, config: PruneConfig, encoder: EncoderConfig, units: Sequence[LayerCut]) -> None:
        if config.scope == "global" and encoder.sharing in ("mixer", "feedforward"):
            raise InputError(
                f"prune.scope is 'global' and the layers of this model share their {encoder.sharing}, so they cannot "
                "become uneven; allowed: 'layer'"
            )
        self.config, self.encoder, self.units = config, encoder, tuple(units)
        self.blocks = [math.lcm(config.multiple, layer.groups) for layer in units]
        self.whole = self.parameters(KeptUnits.all_of(units))
        """Number of weights of all mixers and feed-forwards."""
        if config.counts == "parameters":
            self._check_least()

    def select(self, scores: Importance, shares: Shares) -> KeptUnits:
        """Return the units of highest worth."""
        heads, neurons = self._pools(scores)
        if self.config.counts == "units":
            return self._picked(heads, neurons, shares)
        return self._fitting(heads, neurons, shares.heads)

    def parameters(self, kept: KeptUnits) -> int:
        """Return the number of weights of mixers and feed-forwards with these units, shared ones counted once."""
        encoder, (heads, neurons) = self.encoder, kept.counts
        mixers = [_size(layer.mixer, encoder.width, count) for layer, count in zip(encoder.layers, heads, strict=True)]
        feedforwards = [
            _size(layer.feedforward, encoder.width, count) for layer, count in zip(encoder.layers, neurons, strict=True)
        ]
        mixers = mixers[:1] if encoder.shares_mixer else mixers
        return sum(mixers) + sum(feedforwards[:1] if encoder.shares_feedforward else feedforwards)

    def _pools(self, scores: Importance) -> tuple[list["_Pool"], list["_Pool"]]:
        """Return the heads, then the neurons, of every layer; of the first alone if layers share them."""
        is_normalised = self.config.scope == "global" and self.config.by != "l0"
        encoder, units = self.encoder, self.units
        found = []
        for values, is_shared, whole, blocks, groups in (
            (scores.heads, encoder.shares_mixer, [u.heads for u in units], [1] * len(units), [1] * len(units)),
            (
                scores.neurons,
                encoder.shares_feedforward,
                [u.neurons for u in units],
                self.blocks,
                [u.groups for u in units],
            ),
        ):
            values = summed_over_uses(values, is_shared=is_shared)
            pools = [
                _Pool.of(_normalised(own) if is_normalised else own, *sizes)
                for own, *sizes in zip(values, whole, blocks, groups, strict=True)
            ]
            found.append(pools[:1] if is_shared else pools)
        return found[0], found[1]

    def _picked(self, heads: list["_Pool"], neurons: list["_Pool"], shares: Shares) -> KeptUnits:
        choose = _across if self.config.scope == "global" else _within
        layers = len(self.units)
        found = [choose(pools, share) for pools, share in ((heads, shares.heads), (neurons, shares.neurons))]
        first, second = (own * layers if len(own) < layers else own for own in found)
        return KeptUnits(tuple(first), tuple(second))

    def _fitting(self, heads: list["_Pool"], neurons: list["_Pool"], share: float) -> KeptUnits:
        """Return units with a share of the weights: equal shares of heads and neurons, then more neurons."""
        limit = share * self.whole

        def fits(shares: Shares) -> bool:
            return self.parameters(self._picked(heads, neurons, shares)) <= limit

        even = _largest(lambda tried: fits(Shares(tried, tried)))
        return self._picked(heads, neurons, Shares(even, _largest(lambda tried: fits(Shares(even, tried)))))

    def _check_least(self) -> None:
        """Raise InputError if the least units of every layer exceed the share to keep."""
        units = [LayerCut(1, min(block, layer.neurons)) for block, layer in zip(self.blocks, self.units, strict=True)]
        least = self.parameters(KeptUnits.all_of(units)) / self.whole
        if least > self.config.keep:
            raise InputError(
                f"prune.keep is {self.config.keep} of the parameters; allowed: from {math.ceil(1000 * least) / 1000} "
                f"on, which is one head and {self.blocks[0]} neurons in every layer"
            )


def _largest(fits: Callable[[float], bool]) -> float:
    """Return the largest share from 0 to 1 that fits, by bisection."""
    low, high = 0.0, 1.0
    if fits(high):
        return high
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class _Pool:
    """Heads or neurons of one layer in blocks that are kept or removed together, the worthiest first."""

    blocks: tuple[Tensor, ...]
    worth: tuple[float, ...]
    """Mean worth of each block."""
    whole: int
    """Units of the unpruned layer."""
    size: int
    """Units of a block; the last one may be smaller."""

    @classmethod
    def of(cls, scores: Tensor, whole: int, size: int, groups: int) -> "_Pool":
        scores = scores.double()
        by_group = scores.unflatten(0, (groups, -1))
        # the best of every group, the second best of every group …: a prefix has as many of each
        order = by_group.argsort(dim=1, descending=True, stable=True)
        order = (order + torch.arange(groups)[:, None] * by_group.shape[1]).T.flatten()
        blocks = order.split(size)
        return cls(blocks, tuple(float(scores[block].mean()) for block in blocks), whole, size)

    def first(self, count: int) -> Tensor:
        """Return the units of the first blocks, ascending."""
        return torch.cat(self.blocks[:count]).sort().values


def _within(pools: Sequence[_Pool], share: float) -> list[Tensor]:
    """Select the same share of every layer, in whole blocks, at least one."""
    return [pool.first(max(1, _rounded(share * pool.whole / pool.size))) for pool in pools]


def _across(pools: Sequence[_Pool], share: float) -> list[Tensor]:
    """Select a share of all layers together by worth, in whole blocks, at least one of every layer."""
    wanted = _rounded(sum(share * pool.whole / pool.size for pool in pools))
    counts = [1] * len(pools)
    others = [(-worth, position) for position, pool in enumerate(pools) for worth in pool.worth[1:]]
    for _, position in sorted(others)[: max(0, wanted - len(pools))]:
        counts[position] += 1
    return [pool.first(count) for pool, count in zip(pools, counts, strict=True)]


def _normalised(scores: Tensor) -> Tensor:
    """Normalise the scores of a layer to norm 1, to compare layers (Molchanov et al. 2017)."""
    scores = scores.double()
    return scores / scores.norm().clamp(min=1e-300)


def _rounded(count: float) -> int:
    """Round to the nearest integer; half rounds up, unlike Python's `round`."""
    return math.floor(count + 0.5 + 1e-9)


@lru_cache(maxsize=4096)
def _size(part: MixerConfig | FeedForwardConfig, width: int, count: int) -> int:
    """Return the number of weights of a mixer with so many heads, or of a feed-forward with so many neurons."""
    if isinstance(part, MixerConfig):
        part = part.cut(LayerCut(count, 0), width)
    else:
        part = part.cut(LayerCut(0, count, part.groups))
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in part.build(width).parameters())


def magnitude(model: Model) -> Importance:
    """Return the norm of the matrix weights of each head and neuron."""
    heads, neurons = [], []
    for block in model.encoder._blocks():
        heads.append(_heads(block.mixer, block.mixer.heads))
        feedforward = block.feedforward
        squares = feedforward.expand.squares("out") + feedforward.contract.squares("in")
        neurons.append(squares.sqrt().cpu())
    return Importance(tuple(heads), tuple(neurons))


def _heads(mixer: nn.Module, count: int) -> Tensor:
    total: Tensor | None = None
    for layer in mixer.modules():
        if not isinstance(layer, ElasticLinear):
            continue
        if layer.units_out == count:
            squares = layer.squares("out")
        elif layer.units_in == count:
            squares = layer.squares("in")
        else:
            continue
        total = squares if total is None else total + squares
    assert total is not None, "a mixer has an output with heads"
    return total.sqrt().cpu()

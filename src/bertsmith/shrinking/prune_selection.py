"""Select the heads and neurons to keep, by their scores."""

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
    """Selection of the units to keep."""

    by: Literal["importance", "magnitude", "l0", "random", "reversed"] = "importance"
    """Score of a unit: the first-order change of the loss without it, the norm of its weights, or a trained gate with
    an L0 penalty. Baselines: random scores, and the most important units first ("reversed")."""
    scope: Literal["global", "layer"] = "global"
    """Whether units are ranked across layers, so that layers may differ in size, or within each layer."""
    keep: float = Field(default=0.5, gt=0, le=1)
    """Share to keep; every layer keeps at least one head and `multiple` neurons."""
    keep_heads: float | None = Field(default=None, gt=0, le=1)
    """Share of the heads to keep; None for `keep`."""
    keep_neurons: float | None = Field(default=None, gt=0, le=1)
    """Share of the neurons to keep; None for `keep`."""
    counts: Literal["units", "parameters"] = "units"
    """Meaning of `keep`: a share of the heads and of the neurons, or a share of the parameters of all mixers and
    feed-forwards, with equal shares of heads and neurons."""
    step: float = Field(default=0.1, gt=0, le=1)
    """Share removed per cut; units are scored again before each cut. 1 for a single cut."""
    multiple: int = Field(default=8, gt=0)
    """The number of neurons of every layer is a multiple of this, or unchanged; multiples make matrix products
    faster."""

    @model_validator(mode="after")
    def _check_counts(self) -> "PruneConfig":
        if self.counts == "parameters" and (self.keep_heads is not None or self.keep_neurons is not None):
            raise ValueError("counts is 'parameters' with keep_heads or keep_neurons; set only keep")
        return self


@dataclass(frozen=True)
class Shares:
    """Shares of the unpruned model to keep: of heads and neurons, or of their parameters."""

    heads: float
    neurons: float


def schedule(config: PruneConfig) -> tuple[Shares, ...]:
    """Return the shares to keep after every cut, in even steps of at most `step`; at least one cut."""
    heads, neurons = (config.keep if share is None else share for share in (config.keep_heads, config.keep_neurons))
    removed = 1 - min(heads, neurons)
    cuts = 1 if config.by == "l0" else max(1, math.ceil(removed / config.step - 1e-9))
    return tuple(Shares(1 - (1 - heads) * done / cuts, 1 - (1 - neurons) * done / cuts) for done in range(1, cuts + 1))


class Selector:
    """Select units of a model, possibly already pruned; shares refer to the unpruned model."""

    def __init__(self, config: PruneConfig, encoder: EncoderConfig, units: Sequence[LayerCut]) -> None:
        if config.scope == "global" and encoder.sharing in ("mixer", "feedforward"):
            raise InputError(
                f"prune.scope is 'global', but the layers of this model share their {encoder.sharing} and must keep "
                "the same units; use 'layer'"
            )
        self.config, self.encoder, self.units = config, encoder, tuple(units)
        self.blocks = [math.lcm(config.multiple, layer.groups) for layer in units]
        self.whole = self.parameters(KeptUnits.all_of(units))
        """Number of parameters of all mixers and feed-forwards."""
        if config.counts == "parameters":
            self._check_least()

    def select(self, scores: Importance, shares: Shares) -> KeptUnits:
        """Return the units with the highest scores."""
        heads, neurons = self._pools(scores)
        if self.config.counts == "units":
            return self._select_shares(heads, neurons, shares)
        return self._select_parameters(heads, neurons, shares.heads)

    def parameters(self, kept: KeptUnits) -> int:
        """Return the parameters of mixers and feed-forwards with these units; shared ones count once."""
        encoder, (heads, neurons) = self.encoder, kept.counts
        mixers = [_size(layer.mixer, encoder.width, count) for layer, count in zip(encoder.layers, heads, strict=True)]
        feedforwards = [
            _size(layer.feedforward, encoder.width, count) for layer, count in zip(encoder.layers, neurons, strict=True)
        ]
        mixers = mixers[:1] if encoder.shares_mixer else mixers
        return sum(mixers) + sum(feedforwards[:1] if encoder.shares_feedforward else feedforwards)

    def _pools(self, scores: Importance) -> tuple[list["_Pool"], list["_Pool"]]:
        """Return the pools of heads and of neurons of every layer; of the first layer only if layers share them."""
        is_normalised = self.config.scope == "global" and self.config.by != "l0"
        encoder, units = self.encoder, self.units
        pools_by_kind = []
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
                _Pool.of(_normalised(scores) if is_normalised else scores, *sizes)
                for scores, *sizes in zip(values, whole, blocks, groups, strict=True)
            ]
            pools_by_kind.append(pools[:1] if is_shared else pools)
        return pools_by_kind[0], pools_by_kind[1]

    def _select_shares(self, heads: list["_Pool"], neurons: list["_Pool"], shares: Shares) -> KeptUnits:
        """Select shares of the heads and of the neurons."""
        select = _across if self.config.scope == "global" else _within
        layers = len(self.units)
        kept_heads, kept_neurons = select(heads, shares.heads), select(neurons, shares.neurons)
        if len(kept_heads) < layers:
            kept_heads *= layers
        if len(kept_neurons) < layers:
            kept_neurons *= layers
        return KeptUnits(tuple(kept_heads), tuple(kept_neurons))

    def _select_parameters(self, heads: list["_Pool"], neurons: list["_Pool"], share: float) -> KeptUnits:
        """Select a share of the parameters: equal shares of heads and neurons, then more neurons if they fit."""
        limit = share * self.whole

        def fits(shares: Shares) -> bool:
            return self.parameters(self._select_shares(heads, neurons, shares)) <= limit

        even = _largest(lambda tried: fits(Shares(tried, tried)))
        return self._select_shares(heads, neurons, Shares(even, _largest(lambda tried: fits(Shares(even, tried)))))

    def _check_least(self) -> None:
        """Raise InputError if the minimum units of every layer exceed the share to keep."""
        units = [LayerCut(1, min(block, layer.neurons)) for block, layer in zip(self.blocks, self.units, strict=True)]
        least = self.parameters(KeptUnits.all_of(units)) / self.whole
        if least > self.config.keep:
            raise InputError(
                f"prune.keep is {self.config.keep} of the parameters; allowed: at least "
                f"{math.ceil(1000 * least) / 1000}, which is one head and {self.blocks[0]} neurons in every layer"
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
    """Heads or neurons of one layer in blocks that are kept or removed together, highest score first."""

    blocks: tuple[Tensor, ...]
    scores: tuple[float, ...]
    """Mean score of each block."""
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
    """Select a share of all layers together by score, in whole blocks, at least one of every layer."""
    total = _rounded(sum(share * pool.whole / pool.size for pool in pools))
    counts = [1] * len(pools)
    others = [(-score, layer) for layer, pool in enumerate(pools) for score in pool.scores[1:]]
    for _, layer in sorted(others)[: max(0, total - len(pools))]:
        counts[layer] += 1
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
    """Return the number of parameters of a mixer with `count` heads or a feed-forward with `count` neurons."""
    if isinstance(part, MixerConfig):
        part = part.cut(LayerCut(count, 0), width)
    else:
        part = part.cut(LayerCut(0, count, part.groups))
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in part.build(width).parameters())


def magnitude(model: Model) -> Importance:
    """Return the weight norm of each head and neuron."""
    heads, neurons = [], []
    for block in model.encoder._blocks():
        heads.append(_head_norms(block.mixer, block.mixer.heads))
        feedforward = block.feedforward
        squares = feedforward.expand.squares("out") + feedforward.contract.squares("in")
        neurons.append(squares.sqrt().cpu())
    return Importance(tuple(heads), tuple(neurons))


def _head_norms(mixer: nn.Module, count: int) -> Tensor:
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

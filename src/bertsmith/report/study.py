"""Averages of attention and convolution maps over many texts: average maps, mass by distance, kernels.

All queries (counted tokens of all texts) have equal weight, and so have all heads.
- `mass` at distance d = query − key: the sum of the weights at that distance over all queries, divided by the number
  of queries. A query near an end lacks some distances and adds nothing to them, so the masses of a map whose rows sum
  to 1 sum to 1.
- `mean` at distance d: the same sum divided by the number of token pairs at that distance.
- `near`: the share of the mass within ±NEAR.
- `support`: the number of keys with a weight above 0, averaged over queries.
- `average` at (query, key): the mean over the texts that have both positions.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.layers.mixers.base import MAP_KINDS
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.model import Model
from bertsmith.report.maps import NEAR, Kernels, order_names, trim_kernels
from bertsmith.text.tokenizer import ROLES, Tokenizer

MAX_BATCH = 32  # texts
MAX_WEIGHTS = 64 << 20  # in all maps of a batch, 256 MB


@dataclass
class _Sums:
    """A map of one layer, summed over texts."""

    cells: np.ndarray  # (length, length), also summed over heads
    distances: np.ndarray  # (heads, 2 length - 1)
    support: np.ndarray  # (heads,), pairs with a weight above 0


class MapStudy:
    """Sums of the maps of many texts and their averages; `layer` None means all heads of all layers."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.texts = self.queries = 0
        self.distances = np.arange(-(length - 1), length)  # query − key
        self._cells = np.zeros((length, length))  # number of texts that have both positions
        self._uniform = np.zeros(2 * length - 1)  # sums of a head with uniform weights
        self._sums: dict[str, list[_Sums | None]] = {}
        positions = torch.arange(length)
        self._distance_index = positions[:, None] - positions + length - 1  # (length, length)

    def add(self, maps: Sequence[dict[str, Tensor]], is_counted: Tensor) -> None:
        """Add the maps of a batch of texts to the sums.

        Shape:
            maps: for every layer by name (batch, heads, max_length, max_length)
            is_counted: (batch, max_length), True at tokens to count
        """
        is_counted = is_counted.cpu()
        pairs = is_counted[:, :, None] & is_counted[:, None, :]  # (batch, max_length, max_length)
        max_length = is_counted.shape[1]
        self.texts += int(is_counted.any(1).sum())
        self.queries += int(is_counted.sum())
        self._cells[:max_length, :max_length] += pairs.sum(0).numpy()
        uniform = pairs / pairs.sum(-1, keepdim=True).clamp(min=1)
        self._uniform += self._by_distance(uniform.double().sum(0, keepdim=True))[0]
        if not is_counted.any():
            return
        for layer, named in enumerate(maps):
            for name, map_ in named.items():
                self._add(name, layer, len(maps), map_.detach().cpu().double(), pairs)

    def _add(self, name: str, layer: int, layers: int, map_: Tensor, pairs: Tensor) -> None:
        # values at padding may be NaN
        real = torch.where(pairs[:, None], map_, 0.0)
        if not bool(real.isfinite().all()):
            raise InputError(
                f"the {name} map of layer {layer + 1} has non-finite values; the weights of the model are damaged"
            )
        summed = real.sum(0)  # (heads, max_length, max_length)
        max_length = summed.shape[-1]
        sums = self._sums.setdefault(name, [None] * layers)
        total = sums[layer]
        if total is None:
            cells = np.zeros((self.length, self.length))
            total = sums[layer] = _Sums(cells, np.zeros((len(summed), 2 * self.length - 1)), np.zeros(len(summed)))
        total.cells[:max_length, :max_length] += summed.sum(0).numpy()
        total.distances += self._by_distance(summed)
        total.support += (real > 0).sum((0, 2, 3)).numpy()

    def _by_distance(self, maps: Tensor) -> np.ndarray:
        """Sum along the diagonals: (heads, max_length, max_length) -> (heads, 2 length - 1)."""
        max_length = maps.shape[-1]
        sums = maps.new_zeros(len(maps), 2 * self.length - 1)
        index = self._distance_index[:max_length, :max_length].flatten()
        return sums.index_add_(1, index, maps.flatten(1)).numpy()

    @property
    def names(self) -> list[str]:
        """Names of the maps, attention first."""
        return order_names(list(self._sums))

    @property
    def layers(self) -> int:
        return max((len(sums) for sums in self._sums.values()), default=0)

    def heads(self, name: str) -> list[int]:
        """Return the number of heads of every layer; 0 if the layer lacks the map."""
        return [0 if sums is None else len(sums.distances) for sums in self._sums[name]]

    def average(self, name: str, layer: int | None = None) -> np.ndarray:
        """Return the average map, (length, length); 0 at positions that no text has."""
        selected = self._select(name, layer)
        heads = sum(len(sums.distances) for sums in selected)
        return np.sum([sums.cells for sums in selected], axis=0) / heads / np.maximum(self._cells, 1)

    def mass(self, name: str, layer: int | None = None) -> np.ndarray:
        """Return the share of the mass at each of `distances`, averaged over queries and heads."""
        return self._heads(name, layer).mean(0) / max(self.queries, 1)

    def mean(self, name: str, layer: int | None = None) -> np.ndarray:
        """Return the mean over the token pairs at each of `distances` and over heads; 0 without such a pair."""
        return self._heads(name, layer).mean(0) / np.maximum(self._pairs, 1)

    def near(self, name: str, layer: int | None = None) -> float:
        """Return the share of the mass within ±NEAR."""
        return _within(self.distances, self.mass(name, layer))

    def near_by_head(self, name: str, layer: int) -> list[float]:
        """Return the share of each head's mass within ±NEAR."""
        return [_within(self.distances, head) for head in self._heads(name, layer)]

    def support_by_head(self, name: str, layer: int) -> list[float]:
        """Return the mean number of keys to which a query of each head gives a weight above 0."""
        (sums,) = self._select(name, layer)
        return [float(count) for count in sums.support / max(self.queries, 1)]

    def kernels(self, name: str) -> Kernels:
        """Return the average kernel of every convolution head: at each tap the mean over all token pairs."""
        width = len(self.distances)
        layers = [
            np.zeros((0, width)) if sums is None else sums.distances / np.maximum(self._pairs, 1)
            for sums in self._sums[name]
        ]
        return trim_kernels(self.distances, layers)

    @property
    def uniform_mass(self) -> np.ndarray:
        """Mass by distance of uniform weights on these texts."""
        return self._uniform / max(self.queries, 1)

    @property
    def uniform_near(self) -> float:
        """Share within ±NEAR of uniform weights on these texts: the baseline of `near`."""
        return _within(self.distances, self._uniform)

    @property
    def _pairs(self) -> np.ndarray:
        return self._by_distance(torch.from_numpy(self._cells)[None])[0]

    def _heads(self, name: str, layer: int | None) -> np.ndarray:
        return np.concatenate([sums.distances for sums in self._select(name, layer)])

    def _select(self, name: str, layer: int | None) -> list[_Sums]:
        """Return the sums of a layer, or of all layers that have the map."""
        candidates = self._sums[name] if layer is None else [self._sums[name][layer]]
        selected = [sums for sums in candidates if sums is not None]
        if not selected:
            raise ValueError(f"layer {layer} has no map {name!r}")
        return selected


def _within(distances: np.ndarray, mass: np.ndarray) -> float:
    total = float(mass.sum())
    return float(mass[np.abs(distances) <= NEAR].sum()) / total if total else 0.0


def main_map(study: MapStudy) -> str:
    """Return the main map of a study: attention, else the first with weights, else the first."""
    return next((name for name in study.names if not MAP_KINDS[name].is_score), study.names[0])


def study_texts(
    model: Model,
    texts: Sequence[str],
    *,
    length: int,
    counts_special: bool = True,
    progress: Callable[[int], None] = lambda texts: None,
) -> MapStudy:
    """Study a model on texts, each truncated to `length` tokens; `progress` is called with the texts of each batch."""
    max_length = model.config.encoder.embedding.max_length
    if not 3 <= length <= max_length:
        raise InputError(f"--length is {length}; allowed: 3 to {max_length}, the maximum length of the model")
    special = torch.tensor(_added_tokens(model.require_tokenizer()), device=model.device)
    study = MapStudy(length)
    with model.evaluating():
        for ids, types, is_token in _batches(model, texts, length):
            with torch.inference_mode():
                inputs = EncoderInputs(ids, SequenceLayout.padded(is_token), types)
                maps = model.encoder.run(inputs, Want(maps=True)).maps
            is_counted = is_token if counts_special else is_token & ~torch.isin(ids, special)
            study.add(maps, is_counted)
            progress(len(ids))
    if not study.queries:
        raise InputError("the texts have no tokens to count; pass texts that contain words")
    return study


def _added_tokens(tokenizer: Tokenizer) -> list[int]:
    """Return the special tokens that are added to a text; unknown and mask tokens stand for its words."""
    words = {*ROLES["unknown"], *ROLES["mask"]}
    ids = list(tokenizer.special_ids)
    return [token_id for token_id, token in zip(ids, tokenizer.tokens(ids), strict=True) if token not in words]


def _batches(model: Model, texts: Sequence[str], length: int) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
    """Yield ids, types and is_token of batches of texts of similar length; the sums do not depend on the order."""
    tokenizer, encoder = model.require_tokenizer(), model.config.encoder
    rows = tokenizer.encode(list(texts), max_length=length, padding=False)["input_ids"]
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    heads = sum(layer.mixer.heads for layer in encoder.layers)
    start = 0
    while start < len(order):
        # texts are sorted, so the last one of a batch is the longest; a head has at most four maps
        stop = min(len(order), start + MAX_BATCH)
        while stop > start + 1 and (stop - start) * heads * 4 * len(rows[order[stop - 1]]) ** 2 > MAX_WEIGHTS:
            stop = start + (stop - start) // 2
        arrays = tokenizer.encode([texts[index] for index in order[start:stop]], max_length=length)
        batch = {name: torch.from_numpy(array).to(model.device) for name, array in arrays.items()}
        types = batch["token_type_ids"] if encoder.embedding.types else None
        yield batch["input_ids"], types, batch["attention_mask"].bool()
        start = stop


@dataclass(frozen=True, kw_only=True)
class KernelStatistics:
    """Average kernels of the convolution heads: taps of every head by layer number."""

    distances: list[int]
    by_layer: dict[str, list[list[float]]]


@dataclass(frozen=True, kw_only=True)
class MapStatistics:
    """Averages of one map, over all layers and by layer number; scores have means, weights have masses."""

    kind: str
    """"weights" or "scores"."""
    heads: list[int]
    mean_by_distance: list[float] | None = None
    mean_by_distance_by_layer: dict[str, list[float]] | None = None
    near: float | None = None
    near_by_layer: dict[str, float] | None = None
    near_by_head: dict[str, list[float]] | None = None
    support_by_head: dict[str, list[float]] | None = None
    mass: float | None = None
    mass_by_distance: list[float] | None = None
    mass_by_distance_by_layer: dict[str, list[float]] | None = None
    kernels: KernelStatistics | None = None


@dataclass(frozen=True, kw_only=True)
class UniformStatistics:
    """Averages of uniform weights, as a baseline."""

    near: float
    mass_by_distance: list[float]


@dataclass(frozen=True, kw_only=True)
class StudyStatistics:
    """All averages of a study except the average maps, as stored in result.json."""

    texts: int
    tokens: int
    layers: int
    distances: list[int]
    spread_evenly: UniformStatistics
    maps: dict[str, MapStatistics]


def study_statistics(study: MapStudy) -> StudyStatistics:
    """Return the averages of a study."""
    return StudyStatistics(
        texts=study.texts,
        tokens=study.queries,
        layers=study.layers,
        distances=study.distances.tolist(),
        spread_evenly=UniformStatistics(near=study.uniform_near, mass_by_distance=_rounded(study.uniform_mass)),
        maps={name: _map_statistics(study, name) for name in study.names},
    )


def _map_statistics(study: MapStudy, name: str) -> MapStatistics:
    kind, heads = MAP_KINDS[name], study.heads(name)
    layers = {str(layer + 1): layer for layer, count in enumerate(heads) if count}
    kernels = None
    if kind.is_convolution:
        averages = study.kernels(name)
        by_layer = {number: averages.layers[layer].round(6).tolist() for number, layer in layers.items()}
        kernels = KernelStatistics(distances=averages.distances, by_layer=by_layer)
    if kind.is_score:
        return MapStatistics(
            kind="scores",
            heads=heads,
            mean_by_distance=_rounded(study.mean(name)),
            mean_by_distance_by_layer={number: _rounded(study.mean(name, layer)) for number, layer in layers.items()},
            kernels=kernels,
        )
    return MapStatistics(
        kind="weights",
        heads=heads,
        near=study.near(name),
        near_by_layer={number: study.near(name, layer) for number, layer in layers.items()},
        near_by_head={number: study.near_by_head(name, layer) for number, layer in layers.items()},
        support_by_head={number: study.support_by_head(name, layer) for number, layer in layers.items()},
        mass=float(study.mass(name).sum()),
        mass_by_distance=_rounded(study.mass(name)),
        mass_by_distance_by_layer={number: _rounded(study.mass(name, layer)) for number, layer in layers.items()},
        kernels=kernels,
    )


def _rounded(values: np.ndarray) -> list[float]:
    return [float(value) for value in values.round(8)]

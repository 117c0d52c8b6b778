"""What the heads of a model do on average over many texts: average maps, mass by distance, kernels.

Every query, that is every counted token of every text, has the same weight, and so has every head.
- `mass` at distance d = query − key: the sum of the weights at that distance over all queries, divided by the number
  of queries. A query near an end lacks some distances and adds nothing to them, so that the masses of a map whose rows
  sum to 1 sum to 1.
- `mean` at distance d: the same sum divided by the number of pairs of tokens that lie so far apart.
- `near`: the part of all mass that lies within ±NEAR.
- `average` at (query, key): the mean over the texts that have both places.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.layers.mixers.base import MAP_KINDS
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.model import Model
from bertsmith.report.maps import NEAR, Kernels, in_order, trimmed
from bertsmith.text.tokenizer import ROLES, Tokenizer

LARGEST_BATCH = 32  # texts
LARGEST_MAPS = 64 << 20  # weights of all layers' maps that are computed at once: 256 MB


@dataclass
class _Sums:
    """One named map of one layer, summed over texts."""

    cells: np.ndarray  # (length, length), summed over heads, too
    distances: np.ndarray  # (heads, 2 length - 1)


class MapStudy:
    """Sums of the maps of many texts, and the averages they give; `layer` None stands for all heads of all layers."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.texts = self.queries = 0
        self.distances = np.arange(-(length - 1), length)  # query − key
        self._cells = np.zeros((length, length))  # texts that have both places
        self._even = np.zeros(2 * length - 1)  # sums of a head that spreads its weight evenly
        self._sums: dict[str, list[_Sums | None]] = {}
        places = torch.arange(length)
        self._distance_index = places[:, None] - places + length - 1  # (length, length)

    def add(self, maps: Sequence[dict[str, Tensor]], is_counted: Tensor) -> None:
        """Nothing; the maps of a batch of texts are part of the sums from now on.

        Shape:
            maps: for every layer by name (batch, heads, longest, longest), as the encoder gives them
            is_counted: (batch, longest), True at the tokens that count
        """
        is_counted = is_counted.cpu()
        pairs = is_counted[:, :, None] & is_counted[:, None, :]  # (batch, longest, longest)
        longest = is_counted.shape[1]
        self.texts += int(is_counted.any(1).sum())
        self.queries += int(is_counted.sum())
        self._cells[:longest, :longest] += pairs.sum(0).numpy()
        even = pairs / pairs.sum(-1, keepdim=True).clamp(min=1)
        self._even += self._by_distance(even.double().sum(0, keepdim=True))[0]
        if not is_counted.any():
            return
        for layer, named in enumerate(maps):
            for name, map_ in named.items():
                self._add(name, layer, len(maps), map_.detach().cpu().double(), pairs)

    def _add(self, name: str, layer: int, layers: int, map_: Tensor, pairs: Tensor) -> None:
        # what stands at pads may be anything, even no number
        kept = torch.where(pairs[:, None], map_, 0.0)
        if not bool(kept.isfinite().all()):
            raise InputError(
                f"the {name} map of layer {layer + 1} holds values that are not finite; the model is broken"
            )
        summed = kept.sum(0)  # (heads, longest, longest)
        longest = summed.shape[-1]
        sums = self._sums.setdefault(name, [None] * layers)
        total = sums[layer]
        if total is None:
            cells = np.zeros((self.length, self.length))
            total = sums[layer] = _Sums(cells, np.zeros((len(summed), 2 * self.length - 1)))
        total.cells[:longest, :longest] += summed.sum(0).numpy()
        total.distances += self._by_distance(summed)

    def _by_distance(self, maps: Tensor) -> np.ndarray:
        """The sums along the diagonals: (heads, longest, longest) -> (heads, 2 length - 1)."""
        longest = maps.shape[-1]
        sums = maps.new_zeros(len(maps), 2 * self.length - 1)
        index = self._distance_index[:longest, :longest].flatten()
        return sums.index_add_(1, index, maps.flatten(1)).numpy()

    @property
    def names(self) -> list[str]:
        """The maps there are, attention first."""
        return in_order(list(self._sums))

    @property
    def layers(self) -> int:
        return max((len(sums) for sums in self._sums.values()), default=0)

    def heads(self, name: str) -> list[int]:
        """The heads of every layer; 0 where a layer lacks the map."""
        return [0 if sums is None else len(sums.distances) for sums in self._sums[name]]

    def average(self, name: str, layer: int | None = None) -> np.ndarray:
        """The average map, (length, length); 0 at places that no text has."""
        chosen = self._chosen(name, layer)
        heads = sum(len(sums.distances) for sums in chosen)
        return np.sum([sums.cells for sums in chosen], axis=0) / heads / np.maximum(self._cells, 1)

    def mass(self, name: str, layer: int | None = None) -> np.ndarray:
        """The share of the mass at each of `distances`, averaged over queries and heads."""
        return self._heads(name, layer).mean(0) / max(self.queries, 1)

    def mean(self, name: str, layer: int | None = None) -> np.ndarray:
        """The mean over the pairs of tokens at each of `distances`, and over heads; 0 where there is no such pair."""
        return self._heads(name, layer).mean(0) / np.maximum(self._pairs, 1)

    def near(self, name: str, layer: int | None = None) -> float:
        """The part of the mass within ±NEAR."""
        return _within(self.distances, self.mass(name, layer))

    def near_by_head(self, name: str, layer: int) -> list[float]:
        """The part of each head's mass within ±NEAR."""
        return [_within(self.distances, head) for head in self._heads(name, layer)]

    def kernels(self, name: str) -> Kernels:
        """The average kernel of every convolution head, at each tap the mean over the pairs of tokens there are."""
        width = len(self.distances)
        layers = [
            np.zeros((0, width)) if sums is None else sums.distances / np.maximum(self._pairs, 1)
            for sums in self._sums[name]
        ]
        return trimmed(self.distances, layers)

    @property
    def even_mass(self) -> np.ndarray:
        """The mass by distance of a head that spreads its weight evenly over each of these texts."""
        return self._even / max(self.queries, 1)

    @property
    def even_near(self) -> float:
        """The share within ±NEAR of a head that spreads its weight evenly: what a share is to be held against."""
        return _within(self.distances, self._even)

    @property
    def _pairs(self) -> np.ndarray:
        return self._by_distance(torch.from_numpy(self._cells)[None])[0]

    def _heads(self, name: str, layer: int | None) -> np.ndarray:
        return np.concatenate([sums.distances for sums in self._chosen(name, layer)])

    def _chosen(self, name: str, layer: int | None) -> list[_Sums]:
        chosen = [sums for sums in self._sums[name] if sums is not None] if layer is None else [self._sums[name][layer]]
        found = [sums for sums in chosen if sums is not None]
        if not found:
            raise ValueError(f"layer {layer} has no map {name!r}")
        return found


def _within(distances: np.ndarray, mass: np.ndarray) -> float:
    total = float(mass.sum())
    return float(mass[np.abs(distances) <= NEAR].sum()) / total if total else 0.0


def main_map(study: MapStudy) -> str:
    """The map a study is about: attention, or else the first one that holds weights, or else the first."""
    return next((name for name in study.names if not MAP_KINDS[name].is_score), study.names[0])


def study_texts(
    model: Model,
    texts: Sequence[str],
    *,
    length: int,
    counts_special: bool = True,
    progress: Callable[[int], None] = lambda texts: None,
) -> MapStudy:
    """The study of a model on texts, each cut to `length` tokens, in eval mode; `progress` gets the texts just done."""
    longest = model.config.encoder.embedding.longest
    if not 3 <= length <= longest:
        raise InputError(f"--length is {length}; allowed: 3 to {longest}, the most tokens the model takes")
    special = torch.tensor(_frame(model.require_tokenizer()), device=model.device)
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
        raise InputError("the texts hold no token that counts; give texts with words in them")
    return study


def _frame(tokenizer: Tokenizer) -> list[int]:
    """The special tokens that stand around a text; an unknown word or a mask is a word of it."""
    words = {*ROLES["unknown"], *ROLES["mask"]}
    ids = list(tokenizer.special_ids)
    return [token for token, piece in zip(ids, tokenizer.pieces(ids), strict=True) if piece not in words]


def _batches(model: Model, texts: Sequence[str], length: int) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
    """Ids, types and is_token of batches of texts of about one length; the sums do not depend on the order."""
    tokenizer, encoder = model.require_tokenizer(), model.config.encoder
    rows = tokenizer.encode(list(texts), max_length=length, padding=False)["input_ids"]
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    heads = sum(layer.mixer.heads for layer in encoder.layers)
    start = 0
    while start < len(order):
        # the last of a batch is its longest; four maps for each head are the most there are
        stop = min(len(order), start + LARGEST_BATCH)
        while stop > start + 1 and (stop - start) * heads * 4 * len(rows[order[stop - 1]]) ** 2 > LARGEST_MAPS:
            stop = start + (stop - start) // 2
        chosen = [texts[index] for index in order[start:stop]]
        arrays = tokenizer.encode(chosen, max_length=length)
        batch = {name: torch.from_numpy(array).to(model.device) for name, array in arrays.items()}
        types = batch["token_type_ids"] if encoder.embedding.types else None
        yield batch["input_ids"], types, batch["attention_mask"].bool()
        start = stop


def study_figures(study: MapStudy) -> dict[str, Any]:
    """Every figure of a study but the average maps themselves, as plain data."""
    maps: dict[str, Any] = {}
    for name in study.names:
        layers = [layer for layer, heads in enumerate(study.heads(name)) if heads]
        kind = MAP_KINDS[name]
        found: dict[str, Any] = {"kind": "scores" if kind.is_score else "weights", "heads": study.heads(name)}
        if kind.is_score:  # their mass cannot be shared out
            found["mean_by_distance"] = _plain(study.mean(name))
            found["mean_by_distance_by_layer"] = {str(layer + 1): _plain(study.mean(name, layer)) for layer in layers}
        else:
            found["near"] = study.near(name)
            found["near_by_layer"] = {str(layer + 1): study.near(name, layer) for layer in layers}
            found["near_by_head"] = {str(layer + 1): study.near_by_head(name, layer) for layer in layers}
            found["mass"] = float(study.mass(name).sum())
            found["mass_by_distance"] = _plain(study.mass(name))
            found["mass_by_distance_by_layer"] = {str(layer + 1): _plain(study.mass(name, layer)) for layer in layers}
        if kind.is_convolution:
            kernels = study.kernels(name)
            found["kernels"] = {
                "distances": kernels.distances,
                "by_layer": {str(layer + 1): kernels.layers[layer].round(6).tolist() for layer in layers},
            }
        maps[name] = found
    return {
        "texts": study.texts,
        "tokens": study.queries,
        "layers": study.layers,
        "distances": study.distances.tolist(),
        "spread_evenly": {"near": study.even_near, "mass_by_distance": _plain(study.even_mass)},
        "maps": maps,
    }


def _plain(values: np.ndarray) -> list[float]:
    return [float(value) for value in values.round(8)]

"""Attention and convolution maps of a text: computation, checks, statistics of each head, convolution kernels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.layers.mixers.base import MAP_KINDS
from bertsmith.layers.subnet import Subnet
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.model import Model

MAX_TOKENS = 128  # a longer text would make the page too large
NEAR = 4  # maximum distance of neighbouring tokens
SEPARATORS = frozenset({"[SEP]", "</s>", "<sep>", "<|endoftext|>"})
TOLERANCE = 0.01  # rounding of half precision

Maps = Mapping[str, Sequence[np.ndarray]]
"""By name, for every layer an array (heads, length, length); 0 heads if the layer lacks the map."""


@dataclass(frozen=True)
class HeadStatistics:
    """Statistics of one head on one text, averaged over its queries."""

    entropy: float  # nats; 0 if all weight is on one token
    distance: float  # mean distance in tokens
    near: float  # share of the weight within ±NEAR tokens
    first: float  # share on the first token
    separator: float  # share on separator tokens


@dataclass(frozen=True)
class ScoreStatistics:
    """Statistics of the scores of one head on one text."""

    mean: float
    std: float
    lowest: float
    highest: float


@dataclass(frozen=True)
class TextMap:
    """One map of every layer with checked values; `layers` as in `Maps`."""

    name: str
    layers: tuple[np.ndarray, ...]

    @property
    def is_score(self) -> bool:
        return MAP_KINDS[self.name].is_score

    @property
    def is_convolution(self) -> bool:
        return MAP_KINDS[self.name].is_convolution

    @property
    def label(self) -> str:
        return label(self.name)

    @property
    def heads(self) -> list[int]:
        """Number of heads of every layer."""
        return [len(layer) for layer in self.layers]

    @property
    def scale(self) -> float:
        """The weight or absolute score that gets the strongest colour."""
        if not self.is_score:
            return 1.0
        return max((float(np.abs(layer).max()) for layer in self.layers if layer.size), default=0.0) or 1.0


def label(name: str) -> str:
    """Return the name of a map as shown on a page."""
    return name.replace("_", " ")


def order_names(names: Sequence[str]) -> list[str]:
    """Return the distinct names, attention first."""
    distinct = list(dict.fromkeys(names))
    return sorted(distinct, key=lambda name: name != "attention")


def compute_maps(model: Model, text: str, pair: str | None = None) -> tuple[list[str], dict[str, list[np.ndarray]]]:
    """Return the tokens of a text and the maps that a model computes for it."""
    tokenizer, embedding = model.require_tokenizer(), model.config.encoder.embedding
    if not text.strip():
        raise InputError("--text is empty; at least one word is needed")
    arrays = tokenizer.encode([text], None if pair is None else [pair])
    ids = torch.from_numpy(arrays["input_ids"])
    max_length = min(MAX_TOKENS, embedding.max_length)
    if ids.shape[1] > max_length:
        raise InputError(f"--text has {ids.shape[1]} tokens; allowed: up to {max_length}")
    types = torch.from_numpy(arrays["token_type_ids"]) if embedding.types else None
    return tokenizer.tokens(ids[0].tolist()), sequence_maps(model, ids, types)


def sequence_maps(
    model: Model, ids: torch.Tensor, types: torch.Tensor | None = None, *, subnet: Subnet | None = None
) -> dict[str, list[np.ndarray]]:
    """Return the maps that a model, or a sub-network of it, computes for one sequence.

    Shape: ids and types (1, length).
    """
    layout = SequenceLayout.full(*ids.shape).to(ids.device)
    with torch.inference_mode(), model.evaluating():
        by_layer = model.run(EncoderInputs(ids, layout, types, subnet), Want(maps=True)).maps
    names = dict.fromkeys(name for layer in by_layer for name in layer)
    missing = torch.zeros(1, 0, *ids.shape[1:], ids.shape[1])  # for layers without the map
    return {name: [layer.get(name, missing)[0].float().cpu().numpy() for layer in by_layer] for name in names}


def text_maps(tokens: Sequence[str], maps: Maps) -> list[TextMap]:
    """Check the maps of a text and return them, attention first; raise ValueError on wrong shapes or values."""
    length = len(tokens)
    checked = []
    for name in order_names(list(maps)):
        layers = tuple(np.asarray(layer, dtype=np.float32) for layer in maps[name])
        for layer in layers:
            if layer.ndim != 3 or layer.shape[1:] != (length, length) or not length:
                raise ValueError(
                    f"map {name!r} of shape {layer.shape} is not (heads, {length}, {length}) for {length} tokens"
                )
            if not np.isfinite(layer).all():
                raise ValueError(f"map {name!r} holds values that are not finite")
        if not any(layer.size for layer in layers):
            continue
        if not MAP_KINDS[name].is_score:
            if any(np.abs(layer - 0.5).max(initial=0) > 0.5 + TOLERANCE for layer in layers):
                raise ValueError(f"map {name!r} holds weights below 0 or above 1")
            layers = tuple(layer.clip(0, 1) for layer in layers)
        checked.append(TextMap(name, layers))
    if not checked:
        raise ValueError("there is no map to show")
    return checked


def head_statistics(tokens: Sequence[str], layers: Sequence[np.ndarray]) -> list[list[HeadStatistics]]:
    """Return the statistics of each head of a map of weights, as [layer][head].

    Shape:
        layers: each (heads, length, length), each row of a map a distribution over the keys
    """
    positions = np.arange(len(tokens))
    distances = np.abs(positions[:, None] - positions)  # (length, length)
    is_separator = np.array([token in SEPARATORS for token in tokens])
    statistics = []
    for layer in layers:
        safe = np.where(layer > 0, layer, 1.0)  # 0 log 0 counts as 0
        entropy = -(layer * np.log(safe)).sum(-1).mean(-1)  # (heads,)
        distance = (layer * distances).sum(-1).mean(-1)
        near = (layer * (distances <= NEAR)).sum(-1).mean(-1)
        first = layer[..., 0].mean(-1)
        separator = layer[..., is_separator].sum(-1).mean(-1)
        stacked = np.stack([entropy, distance, near, first, separator], axis=-1)
        statistics.append([HeadStatistics(*(float(value) for value in head)) for head in stacked])
    return statistics


def score_statistics(layers: Sequence[np.ndarray]) -> list[list[ScoreStatistics]]:
    """Return the statistics of each head of a map of scores, as [layer][head]."""
    return [
        [ScoreStatistics(float(one.mean()), float(one.std()), float(one.min()), float(one.max())) for one in layer]
        for layer in layers
    ]


def map_statistics(
    tokens: Sequence[str], one: TextMap
) -> Sequence[Sequence[HeadStatistics]] | Sequence[Sequence[ScoreStatistics]]:
    """Return the statistics of each head of a map, as [layer][head]."""
    return score_statistics(one.layers) if one.is_score else head_statistics(tokens, one.layers)


@dataclass(frozen=True)
class Kernels:
    """Average kernels of the convolution heads: `layers` are (heads, taps), with the distance of each tap."""

    distances: list[int]  # query − key, ascending; positive distances look back
    layers: list[np.ndarray]


def trim_kernels(distances: np.ndarray, layers: Sequence[np.ndarray]) -> Kernels:
    """Drop the distances at either end that no head reaches.

    Shape:
        distances: (positions,), query − key, ascending
        layers: each (heads, positions)
    """
    is_used = np.zeros(len(distances), dtype=bool)
    for layer in layers:
        is_used |= (np.abs(layer) > 1e-9).any(0)
    is_used |= distances == 0
    first, last = int(is_used.argmax()), len(is_used) - int(is_used[::-1].argmax())
    return Kernels([int(one) for one in distances[first:last]], [layer[:, first:last] for layer in layers])


def average_kernels(one: TextMap) -> Kernels:
    """Return the average kernels of a convolution map: at each distance the mean over all pairs of tokens."""
    length = one.layers[0].shape[-1]
    distances = np.arange(-(length - 1), length)
    layers = [
        np.stack([np.diagonal(layer, -int(distance), 1, 2).mean(-1) for distance in distances], axis=-1)
        for layer in one.layers
    ]  # each (heads, 2 length - 1)
    return trim_kernels(distances, layers)

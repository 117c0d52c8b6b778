"""Named maps of a text: which hold weights and which scores, what each head does, the kernels of convolution heads."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.layers.mixers.base import MAP_KINDS
from bertsmith.layers.subnet import Subnet
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.model import Model

LONGEST = 128  # tokens; a page with more would be too heavy to look at

NEAR = 4  # positions on each side that count as the neighbourhood of a token
SEPARATORS = frozenset({"[SEP]", "</s>", "<sep>", "<|endoftext|>"})
SLACK = 0.01  # the rounding of half precision

Maps = Mapping[str, Sequence[np.ndarray]]
"""By name, for every layer an array (heads, length, length); one without heads where a layer lacks the map."""


@dataclass(frozen=True)
class HeadFigures:
    """What one head does on one text, as means over its queries."""

    entropy: float  # nats; 0 for a head that looks at one token
    distance: float  # positions between a token and where it looks
    near: float  # share of the weight within NEAR positions
    first: float  # share on the first token
    separator: float  # share on separator tokens


@dataclass(frozen=True)
class ScoreFigures:
    """The scores of one head on one text."""

    mean: float
    deviation: float
    lowest: float
    highest: float


@dataclass(frozen=True)
class TextMap:
    """One named map of every layer, checked; `layers` are as in `Maps`."""

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
        """The heads of every layer."""
        return [len(layer) for layer in self.layers]

    @property
    def scale(self) -> float:
        """The largest weight or score there could be in the picture: what its strongest colour stands for."""
        if not self.is_score:
            return 1.0
        return max((float(np.abs(layer).max()) for layer in self.layers if layer.size), default=0.0) or 1.0


def label(name: str) -> str:
    """A map's name as a page writes it."""
    return name.replace("_", " ")


def in_order(names: Sequence[str]) -> list[str]:
    """The names without repeats, attention first."""
    found = list(dict.fromkeys(names))
    return sorted(found, key=lambda name: name != "attention")


def maps_of(model: Model, text: str, pair: str | None = None) -> tuple[list[str], dict[str, list[np.ndarray]]]:
    """The pieces of a text and the maps a model makes of it, as in `Maps`."""
    tokenizer, embedding = model.require_tokenizer(), model.config.encoder.embedding
    if not text.strip():
        raise InputError("--text is empty; give some words")
    arrays = tokenizer.encode([text], None if pair is None else [pair])
    ids = torch.from_numpy(arrays["input_ids"])
    longest = min(LONGEST, embedding.longest)
    if ids.shape[1] > longest:
        raise InputError(f"--text has {ids.shape[1]} tokens; allowed: up to {longest}")
    types = torch.from_numpy(arrays["token_type_ids"]) if embedding.types else None
    return tokenizer.pieces(ids[0].tolist()), sequence_maps(model, ids, types)


def sequence_maps(
    model: Model, ids: torch.Tensor, types: torch.Tensor | None = None, *, subnet: Subnet | None = None
) -> dict[str, list[np.ndarray]]:
    """The maps a model, or a sub-network of it, makes of one sequence, as in `Maps`.

    Shape: ids and types (1, length).
    """
    layout = SequenceLayout.full(*ids.shape).to(ids.device)
    with torch.inference_mode(), model.evaluating():
        by_layer = model.run(EncoderInputs(ids, layout, types, subnet), Want(maps=True)).maps
    names = dict.fromkeys(name for layer in by_layer for name in layer)
    missing = torch.zeros(1, 0, *ids.shape[1:], ids.shape[1])  # a layer that lacks a map has no heads of it
    return {name: [layer.get(name, missing)[0].float().cpu().numpy() for layer in by_layer] for name in names}


def text_maps(tokens: Sequence[str], maps: Maps) -> list[TextMap]:
    """The maps of a text, attention first; raises ValueError where they do not fit the text or are no numbers."""
    length = len(tokens)
    made = []
    for name in in_order(list(maps)):
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
            if any(np.abs(layer - 0.5).max(initial=0) > 0.5 + SLACK for layer in layers):
                raise ValueError(f"map {name!r} holds weights below 0 or above 1")
            layers = tuple(layer.clip(0, 1) for layer in layers)
        made.append(TextMap(name, layers))
    if not made:
        raise ValueError("there is no map to show")
    return made


def head_figures(tokens: Sequence[str], layers: Sequence[np.ndarray]) -> list[list[HeadFigures]]:
    """The figures of each head of a map of weights, as [layer][head].

    Shape:
        layers: each (heads, length, length), each row of a map a distribution over the keys
    """
    positions = np.arange(len(tokens))
    apart = np.abs(positions[:, None] - positions)  # (length, length)
    is_separator = np.array([token in SEPARATORS for token in tokens])
    found = []
    for layer in layers:
        safe = np.where(layer > 0, layer, 1.0)  # 0 log 0 counts as 0
        entropy = -(layer * np.log(safe)).sum(-1).mean(-1)  # (heads,)
        distance = (layer * apart).sum(-1).mean(-1)
        near = (layer * (apart <= NEAR)).sum(-1).mean(-1)
        first = layer[..., 0].mean(-1)
        separator = layer[..., is_separator].sum(-1).mean(-1)
        stacked = np.stack([entropy, distance, near, first, separator], axis=-1)
        found.append([HeadFigures(*(float(value) for value in head)) for head in stacked])
    return found


def score_figures(layers: Sequence[np.ndarray]) -> list[list[ScoreFigures]]:
    """The figures of each head of a map of scores, as [layer][head]."""
    return [
        [ScoreFigures(float(one.mean()), float(one.std()), float(one.min()), float(one.max())) for one in layer]
        for layer in layers
    ]


def figures_of(tokens: Sequence[str], one: TextMap) -> list[list[dict[str, Any]]]:
    """The figures of each head of a map as plain data, by the kind of the map."""
    found = score_figures(one.layers) if one.is_score else head_figures(tokens, one.layers)
    return [[asdict(figures) for figures in layer] for layer in found]


@dataclass(frozen=True)
class Kernels:
    """The average kernel of every convolution head: `layers` are (heads, taps), with the distance of each tap."""

    distances: list[int]  # query − key, rising: positive ones look back
    layers: list[np.ndarray]


def trimmed(distances: np.ndarray, layers: Sequence[np.ndarray]) -> Kernels:
    """The kernels without the distances, at either end, that no head reaches.

    Shape:
        distances: (places,), query − key, rising
        layers: each (heads, places)
    """
    is_used = np.zeros(len(distances), dtype=bool)
    for layer in layers:
        is_used |= (np.abs(layer) > 1e-9).any(0)
    is_used |= distances == 0
    first, last = int(is_used.argmax()), len(is_used) - int(is_used[::-1].argmax())
    return Kernels([int(one) for one in distances[first:last]], [layer[:, first:last] for layer in layers])


def kernels_of(one: TextMap) -> Kernels:
    """The average kernels of a banded map: at each distance the mean over the pairs of tokens there are."""
    length = one.layers[0].shape[-1]
    distances = np.arange(-(length - 1), length)
    layers = [
        np.stack([np.diagonal(layer, -int(distance), 1, 2).mean(-1) for distance in distances], axis=-1)
        for layer in one.layers
    ]  # each (heads, 2 length - 1)
    return trimmed(distances, layers)

"""What is told of an elastic model: its sub-networks, which heads and layers survive, what heads look at when few are
left; collected here, drawn elsewhere."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np

from bertsmith.layers.subnet import LayerCut, Subnet
from bertsmith.models.build import extract
from bertsmith.models.model import Model
from bertsmith.report.maps import SEPARATORS, HeadFigures, head_figures, maps_of, text_maps
from bertsmith.shrinking.elastic_metadata import ElasticRecord, MemberFigures

TOKENS_DRAWN = 16  # of the text that attention is shown on
HEADS_DRAWN = 4  # of each layer, the most important ones


@dataclass(frozen=True)
class HeadPair:
    """A head of a small network beside the same head of the whole one, on the same text.

    Shape: whole (length, length), small (length, length).
    """

    number: int
    """Before rewiring."""
    whole: np.ndarray
    small: np.ndarray
    whole_figures: HeadFigures
    small_figures: HeadFigures


@dataclass(frozen=True)
class HeadComparison:
    """What heads look at in the whole network and in the smallest one."""

    tokens: Sequence[str]
    subnet: Subnet
    layers: Sequence[tuple[int, Sequence[HeadPair]]]
    """The layers that are left, each with its number in the whole network and its most important heads."""
    whole_figures: Sequence[HeadFigures]
    """Of all heads of the whole network …"""
    small_figures: Sequence[HeadFigures]
    """… and of the smallest."""

    @property
    def has_separator(self) -> bool:
        """Whether attention to it can be told."""
        return any(token in SEPARATORS for token in self.tokens)


@dataclass(frozen=True)
class ElasticReport:
    """Everything the page tells; what a run does not have is left empty."""

    title: str
    model: str
    task: str
    record: ElasticRecord
    order: str = "importance"
    """How units were ordered; see ElasticSettings."""
    stages: Mapping[str, Sequence[dict[str, Any]]] = field(default_factory=dict)
    """The rows of the log of every stage, by its name."""
    heads: HeadComparison | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    commands: Sequence[str] = ()
    settings: str = ""


def widths(record: ElasticRecord) -> list[float]:
    """The widths of the grid, the widest first."""
    return sorted({member.width for member in record.grid}, reverse=True)


def depths(record: ElasticRecord) -> list[float]:
    """The depths of the grid, the deepest first."""
    return sorted({member.depth for member in record.grid}, reverse=True)


def mean_score(record: ElasticRecord) -> float:
    """The mean over the grid, which is the score of an elastic model."""
    return fmean(member.score for member in record.grid)


def member_at(record: ElasticRecord, width: float, depth: float) -> MemberFigures | None:
    """The sub-network of a width and a depth, if it is in the grid."""
    return next((member for member in record.grid if (member.width, member.depth) == (width, depth)), None)


def largest(record: ElasticRecord) -> MemberFigures:
    """The widest of the deepest sub-networks."""
    return max(record.grid, key=lambda member: (member.depth, member.width))


def smallest(record: ElasticRecord) -> MemberFigures:
    """The narrowest of the shallowest sub-networks."""
    return min(record.grid, key=lambda member: (member.depth, member.width))


def kept_share(record: ElasticRecord, score: float) -> float | None:
    """A score as a share of the fine-tuned model's; None where that is nothing to be shared."""
    return score / record.teacher_score if record.teacher_score > 0 and math.isfinite(record.teacher_score) else None


def cheapest_that_keeps(record: ElasticRecord, share: float) -> MemberFigures | None:
    """The sub-network of fewest operations that has at least a share of the fine-tuned model's score."""
    good = [member for member in record.grid if (kept_share(record, member.score) or 0.0) >= share]
    return min(good, key=lambda member: (member.flops, member.latency_ms), default=None)


def narrowest_widths(record: ElasticRecord) -> list[list[float]]:
    """For every layer, by the numbers heads had before rewiring, the narrowest width that keeps each."""
    found = []
    for order in record.head_order:
        own = [0.0] * len(order)
        for width in widths(record):
            ((_, cut),) = Subnet(width=width).cuts([LayerCut(len(order), len(order))])
            for number in order[: cut.heads]:
                own[number] = width
        found.append(own)
    return found


def shallowest_depths(record: ElasticRecord) -> list[float]:
    """For every layer the smallest depth that keeps it."""
    layers = len(record.head_order)
    found = [0.0] * layers
    for depth in depths(record):
        for index in Subnet(depth=depth, depth_rule=record.depth_rule).kept_layers(layers):
            found[index] = depth
    return found


def compared_heads(model: Model, record: ElasticRecord, text: str) -> HeadComparison | None:
    """What heads of an elastic model look at in the beginning of a text, whole and at its smallest.

    None where it has one size only, or layers whose heads have no weights to show.
    """
    member = smallest(record)
    if member is largest(record) or not text.strip():
        return None
    subnet = Subnet(width=member.width, depth=member.depth, depth_rule=record.depth_rule)
    text = _beginning(model, text)
    with model.evaluating():
        tokens, whole_maps = maps_of(model, text)
        _, small_maps = maps_of(extract(model, subnet), text)
    try:
        checked = [*text_maps(tokens, small_maps), *text_maps(tokens, whole_maps)]
    except ValueError:  # a model that learned nothing but not-a-number is no reason to have no report
        return None
    name = next((one.name for one in checked if not one.is_score and one.name in whole_maps), None)
    if name is None or name not in small_maps:
        return None
    whole, small = whole_maps[name], small_maps[name]
    whole_figures, small_figures = head_figures(tokens, whole), head_figures(tokens, small)
    layers = []
    for place, index in enumerate(subnet.kept_layers(len(whole))):
        pairs = [
            HeadPair(
                record.head_order[index][head],
                whole[index][head],
                small[place][head],
                whole_figures[index][head],
                small_figures[place][head],
            )
            for head in range(min(HEADS_DRAWN, len(small[place])))
        ]
        if pairs:
            layers.append((index, pairs))
    flat = [[figures for layer in found for figures in layer] for found in (whole_figures, small_figures)]
    return HeadComparison(tokens, subnet, layers, flat[0], flat[1]) if layers else None


def _beginning(model: Model, text: str) -> str:
    """As much of a text as can be drawn: whole words, or letters of the first where it alone is too long."""
    tokenizer, words = model.require_tokenizer(), text.split()
    most = min(TOKENS_DRAWN, model.config.encoder.embedding.longest)

    def is_long(beginning: str) -> bool:
        return int(tokenizer.encode([beginning])["input_ids"].shape[1]) > most

    words = words[:most]
    while len(words) > 1 and is_long(" ".join(words)):
        words.pop()
    shown = " ".join(words)
    while len(shown) > 1 and is_long(shown):
        shown = shown[: len(shown) // 2]
    return shown

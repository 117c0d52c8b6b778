"""Report page of an elastic model: scores and costs of its sub-networks, surviving heads, curves, attention maps."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np
from markupsafe import Markup

from bertsmith.layers.subnet import LayerCut, Subnet
from bertsmith.models.build import extract
from bertsmith.models.model import Model
from bertsmith.report.charts import (
    Marker,
    Panel,
    Reference,
    Series,
    column,
    heat_colour,
    heat_map,
    line_chart,
    line_legend,
    marker_chart,
    series_colour,
)
from bertsmith.report.finetuning import metric_name
from bertsmith.report.maps import SEPARATORS, HeadStatistics, compute_maps, head_statistics, text_maps
from bertsmith.report.page import render
from bertsmith.shrinking.elastic_metadata import ElasticMetadata, SubnetworkMetadata
from bertsmith.shrinking.subnetworks import subnet_name

MAX_TOKENS = 16  # of the text for the attention maps
MAX_HEADS = 4  # per layer, the most important ones
PALE_SCORE = 0.9  # share of the best score that gets the palest shade, so that small differences look small
DARK_SHARE = 0.55  # cells above this shade get light text
HALF_TOLERANCE = 0.05  # shares from 45 to 55 % are half
GOOD_SHARES = (0.99, 0.98, 0.95)
STAGES = {"width": "Widths", "depth": "Widths and depths", "labels": "Labels"}


@dataclass(frozen=True)
class HeadPair:
    """A head of the smallest sub-network and the same head of the whole network, on the same text.

    Shape: whole and small (length, length).
    """

    index: int
    """Index of the head before rewiring."""
    whole: np.ndarray
    small: np.ndarray
    whole_statistics: HeadStatistics
    small_statistics: HeadStatistics

    @property
    def maps(self) -> Markup:
        return heat_map(self.whole) + heat_map(self.small)


@dataclass(frozen=True)
class HeadComparison:
    """Attention of the whole network and of its smallest sub-network."""

    tokens: Sequence[str]
    subnet: Subnet
    layers: Sequence[tuple[int, Sequence[HeadPair]]]
    """The remaining layers: index in the whole network and most important heads."""
    whole_statistics: Sequence[HeadStatistics]
    small_statistics: Sequence[HeadStatistics]

    @property
    def has_separator(self) -> bool:
        return any(token in SEPARATORS for token in self.tokens)

    @property
    def entropies(self) -> tuple[float, float]:
        """Mean entropy over all heads of the whole and of the small network."""
        return fmean(one.entropy for one in self.whole_statistics), fmean(one.entropy for one in self.small_statistics)

    @property
    def separators(self) -> tuple[float, float]:
        """Mean share of the weight on separators, of the whole and of the small network."""
        whole, small = self.whole_statistics, self.small_statistics
        return fmean(one.separator for one in whole), fmean(one.separator for one in small)

    @property
    def has_one_head(self) -> bool:
        """Whether every remaining layer has a single head."""
        return all(len(pairs) == 1 for _, pairs in self.layers)

    @property
    def is_cut(self) -> bool:
        """Whether a layer may have more heads than are drawn."""
        return len(self.layers[0][1]) >= MAX_HEADS


@dataclass(frozen=True)
class ElasticReport:
    """Contents of the page; sections without data are omitted."""

    title: str
    model: str
    task: str
    record: ElasticMetadata
    order: str = "importance"
    """Order of the heads and neurons (`ElasticSettings.order`)."""
    stages: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """Log rows by stage."""
    heads: HeadComparison | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    commands: Sequence[str] = ()
    settings: str = ""
    alerts: Sequence[str] = ()
    """Reasons not to use the model at all."""


@dataclass(frozen=True)
class SizeCell:
    """A sub-network in the grid of sizes; `shade` is 0 for the palest and 1 for the best."""

    size: SubnetworkMetadata
    shade: float
    retained: str
    """Share of the fine-tuned model's score; "" if unknown."""
    costs: tuple[str, ...]


@dataclass(frozen=True)
class SizeGrid:
    """Sub-networks by width (rows) and depth (columns), and the cheapest ones that retain most of the score."""

    depths: Sequence[float]
    rows: Sequence[tuple[float, Sequence[SizeCell | None]]]
    good_enough: Mapping[str, str]
    note: str


@dataclass(frozen=True)
class HeatCell:
    """A coloured cell with its text and hover title."""

    shade: float
    text: str
    title: str

    @property
    def colour(self) -> str:
        return heat_colour(self.shade)

    @property
    def is_dark(self) -> bool:
        return self.shade > DARK_SHARE


@dataclass(frozen=True)
class HeatTable:
    """One row per layer, with a cell per head and possibly one for the whole layer."""

    rows: Sequence[tuple[Sequence[HeatCell], HeatCell | None]]
    key: Sequence[tuple[str, str]]
    """Colours and their labels."""

    @property
    def columns(self) -> int:
        return max((len(cells) for cells, _ in self.rows), default=0)

    @property
    def has_layers(self) -> bool:
        return any(layer is not None for _, layer in self.rows)


def widths(record: ElasticMetadata) -> list[float]:
    """Return the widths of the grid in descending order."""
    return sorted({size.width for size in record.grid}, reverse=True)


def depths(record: ElasticMetadata) -> list[float]:
    """Return the depths of the grid in descending order."""
    return sorted({size.depth for size in record.grid}, reverse=True)


def mean_score(record: ElasticMetadata) -> float:
    """Return the mean score over the grid, which is the score of an elastic model."""
    return fmean(size.score for size in record.grid)


def subnetwork_at(record: ElasticMetadata, width: float, depth: float) -> SubnetworkMetadata | None:
    """Return the sub-network of a width and a depth, if it is in the grid."""
    return next((size for size in record.grid if (size.width, size.depth) == (width, depth)), None)


def largest(record: ElasticMetadata) -> SubnetworkMetadata:
    """Return the widest of the deepest sub-networks."""
    return max(record.grid, key=lambda size: (size.depth, size.width))


def smallest(record: ElasticMetadata) -> SubnetworkMetadata:
    """Return the narrowest of the shallowest sub-networks."""
    return min(record.grid, key=lambda size: (size.depth, size.width))


def retained_share(record: ElasticMetadata, score: float) -> float | None:
    """Return a score as a share of the fine-tuned model's; None if that is not positive."""
    return score / record.teacher_score if record.teacher_score > 0 and math.isfinite(record.teacher_score) else None


@dataclass(frozen=True)
class HalfSize:
    """The sub-network of the headline, and the words for its size."""

    size: SubnetworkMetadata
    words: str


def best_half(record: ElasticMetadata) -> HalfSize | None:
    """Return the best sub-network of half the size or half the operations, else the smallest; None without another.

    Sub-networks keep all embeddings, so none may have half of the parameters.
    """
    whole = largest(record)
    smaller = [size for size in record.grid if size.parameters < whole.parameters and math.isfinite(size.score)]
    if not smaller:
        return None
    shares: dict[str, Callable[[SubnetworkMetadata], float]] = {
        "Half the size keeps": lambda size: size.parameters / whole.parameters,
        "Half the operations keep": lambda size: size.flops / whole.flops,
    }
    for words, share in shares.items():
        halves = [size for size in smaller if abs(share(size) - 0.5) <= HALF_TOLERANCE]
        if halves:
            return HalfSize(max(halves, key=lambda size: size.score), words)
    small = min(smaller, key=lambda size: (size.parameters, -size.score))
    return HalfSize(small, f"{_ratio(small.parameters, whole.parameters)} of the size keeps")


def cheapest_with(record: ElasticMetadata, share: float) -> SubnetworkMetadata | None:
    """Return the sub-network with the fewest operations that retains at least this share of the fine-tuned score."""
    good = [size for size in record.grid if (retained_share(record, size.score) or 0.0) >= share]
    return min(good, key=lambda size: (size.flops, size.latency_ms), default=None)


def narrowest_widths(record: ElasticMetadata) -> list[list[float]]:
    """Return, by layer and head index before rewiring, the narrowest width that keeps the head."""
    layers = []
    for order in record.head_order:
        narrowest = [0.0] * len(order)
        for width in widths(record):
            ((_, cut),) = Subnet(width=width).cuts([LayerCut(len(order), len(order))])
            for index in order[: cut.heads]:
                narrowest[index] = width
        layers.append(narrowest)
    return layers


def shallowest_depths(record: ElasticMetadata) -> list[float]:
    """Return for every layer the smallest depth that keeps it."""
    layers = len(record.head_order)
    shallowest = [0.0] * layers
    for depth in depths(record):
        for index in Subnet(depth=depth, depth_rule=record.depth_rule).kept_layers(layers):
            shallowest[index] = depth
    return shallowest


def compare_heads(model: Model, record: ElasticMetadata, text: str) -> HeadComparison | None:
    """Compare the attention of an elastic model and of its smallest sub-network on the beginning of a text.

    Return None if the model has one size or no map of weights.
    """
    size = smallest(record)
    if size is largest(record) or not text.strip():
        return None
    subnet = Subnet(width=size.width, depth=size.depth, depth_rule=record.depth_rule)
    text = _beginning(model, text)
    with model.evaluating():
        tokens, whole_maps = compute_maps(model, text)
        _, small_maps = compute_maps(extract(model, subnet), text)
    try:
        checked = [*text_maps(tokens, small_maps), *text_maps(tokens, whole_maps)]
    except ValueError:  # a diverged model still gets its report
        return None
    name = next((one.name for one in checked if not one.is_score and one.name in whole_maps), None)
    if name is None or name not in small_maps:
        return None
    whole, small = whole_maps[name], small_maps[name]
    whole_statistics, small_statistics = head_statistics(tokens, whole), head_statistics(tokens, small)
    layers = []
    for position, index in enumerate(subnet.kept_layers(len(whole))):
        pairs = [
            HeadPair(
                record.head_order[index][head],
                whole[index][head],
                small[position][head],
                whole_statistics[index][head],
                small_statistics[position][head],
            )
            for head in range(min(MAX_HEADS, len(small[position])))
        ]
        if pairs:
            layers.append((index, pairs))
    flat = [[one for layer in statistics for one in layer] for statistics in (whole_statistics, small_statistics)]
    return HeadComparison(tokens, subnet, layers, flat[0], flat[1]) if layers else None


def render_elastic_page(report: ElasticReport) -> str:
    """Return the report as one self-contained HTML document."""
    record = report.record
    has_sizes = len(record.grid) > 1
    return render(
        "elastic.html",
        report=report,
        headline=_headline(report),
        lead=_lead(report),
        alerts=[*report.alerts, *_alerts(record)],
        metrics=_metrics(record),
        sizes=size_grid(record),
        costs=_cost_panels(record) if has_sizes else (),
        importance=_importance_table(record),
        survival=_survival_table(record) if has_sizes else None,
        has_depths=len(depths(record)) > 1,
        stages=[panels for stage, rows in report.stages.items() if (panels := _stage_panels(record, stage, rows))],
        max_heads=MAX_HEADS,
    )


def size_grid(record: ElasticMetadata, *, has_latency: bool = True) -> SizeGrid:
    """Return the grid of sizes: widths in rows, depths in columns."""
    scores = [size.score for size in record.grid if math.isfinite(size.score)] or [0.0]
    best = max(scores)
    palest = min(*scores, best - (1 - PALE_SCORE) * abs(best))

    def cell(size: SubnetworkMetadata | None) -> SizeCell | None:
        if size is None:
            return None
        shade = (size.score - palest) / ((best - palest) or 1.0) if math.isfinite(size.score) else 0.0
        latency = (f"{size.latency_ms:.2f} ms",) if has_latency else ()
        costs = _millions(size.parameters), _giga(size.flops), *latency
        return SizeCell(size, shade, _retained(record, size.score), costs)

    rows = [
        (width, [cell(subnetwork_at(record, width, depth)) for depth in depths(record)]) for width in widths(record)
    ]
    note = (
        f"{metric_name(record.metric)} on dev, and its share of the fine-tuned model's {record.teacher_score:.2f}; "
        f"below it parameters{', operations and latency' if has_latency else ' and operations'} for one sequence of "
        f"{record.length} tokens."
    )
    return SizeGrid(depths(record), rows, _good_enough(record), note)


def _headline(report: ElasticReport) -> str:
    record = report.record
    half = None if report.alerts else best_half(record)  # shares of a degenerate model's score mean nothing
    share = None if half is None else retained_share(record, half.size.score)
    if half is None or share is None:
        sizes = f"on average over {len(record.grid)} sizes of one model" if len(record.grid) > 1 else "at the only size"
        return f"{metric_name(record.metric)} {mean_score(record):.2f} {sizes}"
    kept = "all" if share >= 1 else f"{100 * share:.1f}\u00a0%"
    return f"{half.words} {kept} of the score"


def _lead(report: ElasticReport) -> str:
    record = report.record
    whole, metric = largest(record), record.metric.replace("_", " ")
    text = f"{report.model}, fine-tuned for {report.task}, has {metric} {record.teacher_score:.2f}."
    half, small = best_half(record), smallest(record)
    if half is None:
        return text

    def described(size: SubnetworkMetadata) -> str:
        return (
            f"has {size.score:.2f} with {_ratio(size.parameters, whole.parameters)} of the parameters and "
            f"{_ratio(size.flops, whole.flops)} of the operations"
        )

    rest = "" if small is half.size else f" The smallest ({_size_name(small)}) {described(small)}."
    return f"{text} The sub-network of {_size_name(half.size)} {described(half.size)}.{rest}"


def _metrics(record: ElasticMetadata) -> dict[str, str]:
    whole, small = largest(record), smallest(record)
    metrics = {"Fine-tuned model": f"{record.teacher_score:.2f}", "Mean of all sizes": f"{mean_score(record):.2f}"}
    if small is not whole:
        metrics |= {"Largest size": f"{whole.score:.2f}", "Smallest size": f"{small.score:.2f}"}
    return metrics


def _alerts(record: ElasticMetadata) -> list[str]:
    broken = sum(not math.isfinite(size.score) for size in record.grid)
    if not broken:
        return []
    return [f"The score of {broken} of {len(record.grid)} sizes is undefined: their predictions may be constant."]


def _good_enough(record: ElasticMetadata) -> dict[str, str]:
    """Return the cheapest sub-networks that retain most of the score."""
    facts, whole = {}, largest(record)
    listed: list[SubnetworkMetadata] = []
    for share in GOOD_SHARES:
        size = cheapest_with(record, share)
        if size is not None and size is not whole and size not in listed:
            listed.append(size)
            name = f"{_size_name(size)} ({_ratio(size.flops, whole.flops)} of the FLOPs)"
            facts[f"{100 * share:.0f}\u00a0% retained by"] = name
    return facts


def _cost_panels(record: ElasticMetadata) -> list[Panel]:
    by_latency = _cost_chart(record, "latency, ms", lambda size: size.latency_ms)
    by_flops = _cost_chart(record, "GFLOP", lambda size: size.flops / 1e9)
    return [Panel("By latency", by_latency), Panel("By operations", by_flops)]


def _cost_chart(record: ElasticMetadata, x_label: str, cost: Callable[[SubnetworkMetadata], float]) -> Markup:
    """Draw score against a cost: a line for every depth, a larger marker for a larger width."""
    groups = []
    for depth in depths(record):
        row = [subnetwork_at(record, width, depth) for width in widths(record)]
        group = [size for size in row if size is not None and math.isfinite(size.score + cost(size))]
        if group:
            groups.append(group)
    markers = [
        Marker(
            cost(size),
            size.score,
            f"{_size_name(size)}: {size.score:.2f} at {cost(size):.4g} {x_label}",
            colour,
            radius=2.5 + 4 * size.width,
        )
        for colour, group in enumerate(groups)
        for size in group
    ]
    return marker_chart(
        markers,
        x_label=x_label,
        y_label=metric_name(record.metric),
        lines=[
            (series_colour(colour), [(cost(size), size.score) for size in group]) for colour, group in enumerate(groups)
        ],
        y_reference=_teacher(record),
        label_at_start=True,
        legend=line_legend([f"depth {group[0].depth:g}" for group in groups]),
    )


def _importance_table(record: ElasticMetadata) -> HeatTable | None:
    """Return the importance of every head; shades are relative to the layer's maximum, numbers to its sum."""
    rows = []
    for layer, raw_scores in enumerate(record.head_scores):
        scores = [score if math.isfinite(score) else 0.0 for score in raw_scores]
        cells = []
        for head, score in enumerate(scores):
            share, rank = 100 * score / (sum(scores) or 1.0), sorted(scores, reverse=True).index(score) + 1
            title = (
                f"layer {layer + 1}, head {head + 1}: importance {raw_scores[head]:.4g}, "
                f"{share:.1f} % of the layer's sum, rank {rank} of {len(scores)}"
            )
            cells.append(HeatCell(score / (max(scores) or 1.0), f"{share:.0f}", title))
        rows.append((cells, None))
    return HeatTable(rows, ()) if rows else None


def _survival_table(record: ElasticMetadata) -> HeatTable | None:
    """Return the narrowest width that keeps each head, and the smallest depth that keeps each layer."""
    heads, layers = narrowest_widths(record), shallowest_depths(record)
    if not heads:
        return None
    steps = sorted({width for layer in heads for width in layer}, reverse=True)
    levels, widest = sorted(set(layers), reverse=True), widths(record)[0]
    rows = []
    for layer, narrowest in enumerate(heads):
        cells = [
            HeatCell(
                _rank_share(steps, width),
                _short_share(width),
                f"layer {layer + 1}, head {head + 1}: kept down to width {width:g}",
            )
            for head, width in enumerate(narrowest)
        ]
        depth = layers[layer]
        last = HeatCell(
            _rank_share(levels, depth), _short_share(depth), f"layer {layer + 1}: kept down to depth {depth:g}"
        )
        rows.append((cells, last if len(levels) > 1 else None))
    key = [
        (
            heat_colour(_rank_share(steps, width)),
            f"only at width {width:g}" if width == widest else f"down to {width:g}",
        )
        for width in steps
    ]
    return HeatTable(rows, key)


def _stage_panels(record: ElasticMetadata, stage: str, rows: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """Return the training curves of a stage; empty if its log has neither losses nor scores."""
    losses = column([row for row in rows if row.get("kind") == "training"], "loss", keep_gaps=True)
    held_out = [row for row in rows if row.get("kind") == "held_out"]
    evaluated = [subnet for subnet in record.subnets if any(subnet_name(subnet) in row for row in held_out)]
    scores = [Series("mean", column(held_out, "score"))]
    if len(evaluated) > 1:
        ends = sorted(evaluated, key=lambda subnet: (subnet.depth, subnet.width))
        scores += [Series(_size_name(subnet), column(held_out, subnet_name(subnet))) for subnet in (ends[-1], ends[0])]
    name, metric, panels = STAGES.get(stage, stage), metric_name(record.metric), []
    if scores[0].points:
        chart = line_chart(
            scores,
            x_label="step",
            y_label=metric,
            reference=_teacher(record),
            height=220,
            x_from_zero=True,
            label_at_start=True,
        )
        panels.append(Panel(f"{name}: {metric} on dev", chart))
    if losses:
        series = [Series("training", losses)]
        chart = line_chart(series, x_label="step", y_label="loss", height=220, y_from_zero=True, x_from_zero=True)
        panels.append(Panel(f"{name}: training loss", chart))
    return panels


def _teacher(record: ElasticMetadata) -> Reference | None:
    score = record.teacher_score
    return (f"fine-tuned {score:.2f}", score) if math.isfinite(score) else None


def _size_name(size: SubnetworkMetadata | Subnet) -> str:
    return f"width {size.width:g}, depth {size.depth:g}"


def _retained(record: ElasticMetadata, score: float) -> str:
    share = retained_share(record, score)
    return "" if share is None else f"{100 * share:.1f}\u00a0%"


def _ratio(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}\u00a0%" if whole else "–"


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f} M" if count >= 1e7 else f"{count / 1e6:.2f} M"


def _giga(flops: float) -> str:
    return f"{flops / 1e9:.2f} GFLOP" if flops >= 1e9 else f"{flops / 1e9:.3g} GFLOP"


def _rank_share(steps: Sequence[float], value: float) -> float:
    """Return the relative rank of a value among descending steps: 0 for the first, 1 for the last."""
    return steps.index(value) / (len(steps) - 1) if len(steps) > 1 else 0.5


def _short_share(share: float) -> str:
    """Format a share for a narrow cell.

    >>> _short_share(0.25), _short_share(1.0), _short_share(2 / 3)
    ('.25', '1', '.67')
    """
    return f"{share:.2f}".rstrip("0").rstrip(".").removeprefix("0")


def _beginning(model: Model, text: str) -> str:
    """Return the first words that fit into MAX_TOKENS, or the first characters if the first word alone is too long."""
    tokenizer, words = model.require_tokenizer(), text.split()
    limit = min(MAX_TOKENS, model.config.encoder.embedding.max_length)

    def is_long(beginning: str) -> bool:
        return int(tokenizer.encode([beginning])["input_ids"].shape[1]) > limit

    words = words[:limit]
    while len(words) > 1 and is_long(" ".join(words)):
        words.pop()
    beginning = " ".join(words)
    while len(beginning) > 1 and is_long(beginning):
        beginning = beginning[: len(beginning) // 2]
    return beginning

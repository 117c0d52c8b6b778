"""Typed results of the shrink methods, with their console output and report."""

import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from bertsmith.checkpoint.store import load
from bertsmith.report.elastic import (
    ElasticReport,
    cheapest_with,
    compare_heads,
    depths,
    largest,
    render_elastic_page,
    retained_share,
    smallest,
    subnetwork_at,
    widths,
)
from bertsmith.report.page import format_duration
from bertsmith.runs.output import REPORT
from bertsmith.runs.result import Result, print_plain, spread
from bertsmith.shrinking.decoder_exits import ChosenDepth
from bertsmith.shrinking.elastic import ElasticModel, ElasticSettings
from bertsmith.shrinking.elastic_metadata import ElasticMetadata, SubnetworkMetadata
from bertsmith.shrinking.exits import ChosenExits
from bertsmith.shrinking.prune import CutScore, PrunedModel, PrunedSizes
from bertsmith.shrinking.pruned_units import PruningMetadata
from bertsmith.shrinking.vocabulary import VocabularyCut
from bertsmith.shrinking.weights import MatrixCount, SparseStorage, WeightPrunedModel
from bertsmith.toml import to_toml
from bertsmith.training.log import read_log
from bertsmith.training.summary import TrainingSummary

MAX_INLINE_DEPTHS = 4
"""With more depths, score and share do not fit on one line of 80 columns."""
GOOD_SHARE = 0.95
"""Share of the teacher's score that a recommended sub-network must keep."""


@dataclass(frozen=True)
class RowCounts:
    """Number of training examples."""

    train: int
    with_augmented: int
    """Including augmented rows."""


@dataclass(frozen=True, kw_only=True)
class ElasticResult(Result):
    """Result of making a model elastic."""

    metric: str
    score: float
    """Mean over all sub-networks."""
    teacher_score: float
    grid: tuple[SubnetworkMetadata, ...]
    length: int
    """Sequence length that the costs were computed for, in tokens."""
    order: str
    rows: RowCounts
    seed: int
    seconds: float

    @classmethod
    def of(
        cls, metadata: ElasticMetadata, *, order: str, rows: RowCounts, seed: int, seconds: float
    ) -> "ElasticResult":
        """Return the result of a run from the metadata of its model."""
        return cls(
            metric=metadata.metric,
            score=fmean(subnetwork.score for subnetwork in metadata.grid),
            teacher_score=metadata.teacher_score,
            grid=metadata.grid,
            length=metadata.length,
            order=order,
            rows=rows,
            seed=seed,
            seconds=seconds,
        )


@dataclass(frozen=True, kw_only=True)
class PruneResult(Result):
    """Result of pruning a model."""

    metric: str
    score: float
    teacher_score: float
    cut_score: float
    """Score after the last cut, before training."""
    metrics: dict[str, float] = spread()
    sizes: PrunedSizes = spread()
    heads: tuple[int, ...]
    """Number of heads in every layer."""
    neurons: tuple[int, ...]
    cuts: tuple[CutScore, ...]
    seed: int
    seconds: float

    @classmethod
    def of(cls, pruned: PrunedModel, seed: int) -> "PruneResult":
        """Return the result of a run."""
        metadata = pruned.metadata
        return cls(
            metric=metadata.metric,
            score=metadata.score,
            teacher_score=metadata.teacher_score,
            cut_score=pruned.cuts[-1].score,
            metrics=dict(pruned.evaluation.metrics),
            sizes=pruned.sizes,
            heads=tuple(map(len, metadata.heads)),
            neurons=tuple(map(len, metadata.neurons)),
            cuts=pruned.cuts,
            seed=seed,
            seconds=round(pruned.seconds, 1),
        )


@dataclass(frozen=True, kw_only=True)
class WeightPruningResult(Result):
    """Result of pruning single weights of a model."""

    metric: str
    score: float
    teacher_score: float
    pruned_score: float
    """Score with the final masks, before training with them fixed."""
    metrics: dict[str, float] = spread()
    sparsity: float
    """Share of the weights of all masked matrices that is pruned."""
    storage: SparseStorage = spread()
    note: str
    """What pruning single weights saves, and what it does not."""
    matrices: tuple[MatrixCount, ...]
    seed: int
    seconds: float

    @classmethod
    def of(cls, pruned: WeightPrunedModel, *, note: str, seed: int) -> "WeightPruningResult":
        """Return the result of a run."""
        return cls(
            metric=pruned.evaluation.metric,
            score=pruned.evaluation.score,
            teacher_score=pruned.teacher_score,
            pruned_score=pruned.pruned_score,
            metrics=dict(pruned.evaluation.metrics),
            sparsity=pruned.sparsity,
            storage=pruned.storage,
            note=note,
            matrices=pruned.matrices,
            seed=seed,
            seconds=round(pruned.seconds, 1),
        )


@dataclass(frozen=True, kw_only=True)
class ExitResult(Result):
    """Result of adding early exits to a model."""

    exits: ChosenExits = spread()
    tolerance: float
    seed: int
    training: TrainingSummary = spread()


@dataclass(frozen=True, kw_only=True)
class DecoderExitResult(Result):
    """Result of adding exits to a decoder."""

    exits: ChosenDepth = spread()
    choose: str
    seed: int
    training: TrainingSummary = spread()


@dataclass(frozen=True, kw_only=True)
class VocabularyResult(Result):
    """Result of cutting a vocabulary."""

    metric: str
    score: float
    score_before: float
    cut: VocabularyCut = spread()


def print_elastic(metadata: ElasticMetadata, out: Path, data: str | None = None) -> None:
    """Print the scores of all sub-networks, the costs of the largest and smallest, and the next command."""

    def cell(subnetwork: SubnetworkMetadata | None) -> str:
        if subnetwork is None:
            return "–"
        share = retained_share(metadata, subnetwork.score)
        between = " " if len(depths(metadata)) <= MAX_INLINE_DEPTHS else "\n"
        return f"{subnetwork.score:.2f}" + ("" if share is None else f"{between}{share:6.1%}")

    title = f"dev: {metadata.metric}; fine-tuned model: {metadata.teacher_score:.2f}"
    table = Table("width", title=title)
    for depth in depths(metadata):
        table.add_column(f"depth {depth:g}", justify="right")
    for width in widths(metadata):
        table.add_row(f"{width:g}", *(cell(subnetwork_at(metadata, width, depth)) for depth in depths(metadata)))
    Console().print(table)
    ends = {"largest": largest(metadata), "smallest": smallest(metadata)}
    for name, subnetwork in ends.items() if len(metadata.grid) > 1 else ():
        print_plain(
            f"{name}: {subnetwork.parameters / 1e6:.2f} M parameters, {subnetwork.flops / 1e9:.3g} GFLOP, "
            f"{subnetwork.latency_ms:.2f} ms for {metadata.length} tokens"
        )
    print_plain(f"written to {out}, see report.html; to fit a budget, run: {fit_command(metadata, out, data)}")


def fit_command(metadata: ElasticMetadata, out: Path, data: str | None = None) -> str:
    """Return the command that fits an elastic model to half the latency of the whole one."""
    budget = f"{float(f'{largest(metadata).latency_ms / 2:.2g}'):g}"
    where = "DATA" if data is None else shlex.quote(data)
    target = shlex.quote(f"{out}-fit")
    return f"bertsmith fit {shlex.quote(str(out))} --data {where} --latency-ms {budget} --out {target}"


def load_line(metadata: ElasticMetadata, out: Path) -> str:
    """Return Python code that loads the cheapest sub-network with GOOD_SHARE of the score, or else the smallest."""
    subnetwork = cheapest_with(metadata, GOOD_SHARE) or smallest(metadata)
    subnet = f"bertsmith.Subnet(width={subnetwork.width:g}, depth={subnetwork.depth:g}"
    rule = "" if metadata.depth_rule == "keep_last" else f', depth_rule="{metadata.depth_rule}"'
    return f"bertsmith.load({json.dumps(str(out), ensure_ascii=False)}, subnet={subnet}{rule}))"


def write_elastic_report(
    settings: ElasticSettings, elastic: ElasticModel, out: Path, texts: Iterable[str] = ()
) -> None:
    """Write report.html; attention maps are computed on the first non-empty text."""
    metadata, run = elastic.metadata, settings.run
    task = settings.task.kind + (f" ({settings.task.name})" if settings.task.name else "")
    text = next((text for text in texts if text.strip()), None)
    facts = {
        "Fine-tuned model": settings.model.name,
        "Data": settings.data or "given in Python",
        "Task": task,
        "Stages": ", ".join(settings.stages),
        "Order of units": settings.order,
        "Depth rule": metadata.depth_rule,
        "Learning rate": f"{settings.optimizer.learning_rate:g}",
        "Epochs per stage": f"{run.epochs:g}",
        "Examples per step": f"{settings.batch.examples}",
        "Importance from": f"up to {settings.importance.examples:,} training examples",
        "Seed": f"{run.seed}",
        "Time": format_duration(elastic.seconds),
    }
    report = ElasticReport(
        title=out.resolve().name,
        model=Path(settings.model.name).name,
        task=task,
        record=metadata,
        order=settings.order,
        stages={stage: read_log(out / stage / "log.jsonl") for stage in settings.stages},
        heads=None if text is None else compare_heads(load(out), metadata, text),
        facts=facts,
        commands=(fit_command(metadata, out, settings.data), load_line(metadata, out)),
        settings=to_toml(settings.plain()),
        alerts=elastic.notices,
    )
    (out / REPORT).write_text(render_elastic_page(report), encoding="utf-8")


def print_pruned(result: PruneResult, metadata: PruningMetadata, out: Path) -> None:
    """Print scores and sizes before and after pruning."""
    heads, neurons, sizes = sum(result.heads), sum(result.neurons), result.sizes
    print_plain(f"dev: {result.metric} {result.score:.2f} (unpruned: {result.teacher_score:.2f})")
    print_plain(
        f"heads {heads} of {sum(metadata.heads_before)}, neurons {neurons:,} of {sum(metadata.neurons_before):,}; "
        f"parameters {sizes.parameters:,} of {sizes.parameters_before:,}; "
        f"FLOPs {sizes.flops / sizes.flops_before:.1%}"
    )
    print_plain(f"written to {out}; pruned.json lists the remaining heads and neurons")


def print_weights(result: WeightPruningResult, out: Path) -> None:
    """Print scores, the number of kept weights and the storage they need."""
    weights, kept = (sum(getattr(one, name) for one in result.matrices) for name in ("weights", "kept"))
    storage = result.storage
    print_plain(f"dev: {result.metric} {result.score:.2f} (unpruned: {result.teacher_score:.2f})")
    print_plain(
        f"weights {kept:,} of {weights:,} in {len(result.matrices)} matrices; stored as dense "
        f"{storage.dense_bytes / 1e6:.2f} MB, bit mask and values {storage.bitmask_bytes / 1e6:.2f} MB, "
        f"compressed rows {storage.csr_bytes / 1e6:.2f} MB"
    )
    print_plain(result.note)
    print_plain(f"written to {out}; masks.safetensors keeps the pruned weights at 0 in later training")


def print_exits(measure: str, chosen: ChosenExits, out: Path) -> None:
    """Print the table of thresholds and the chosen one."""
    title = f"dev: {chosen.metric}; all {chosen.layers} layers: {chosen.full_score:.2f}"
    table = Table(measure, "score", "layers", "GFLOP", "saved", "", title=title)
    for index, row in enumerate(chosen.table):
        table.add_row(
            f"{row.threshold:g}",
            f"{row.score:.2f}",
            f"{row.mean_layers:.2f}",
            f"{row.flops / 1e9:.3f}",
            f"{row.saving:.1%}",
            "chosen" if index == chosen.chosen_index else "",
        )
    Console().print(table)
    outcome = "no threshold saves computation within the tolerance, so early exits are disabled"
    if chosen.rule is not None:
        outcome = f"{chosen.metric} {chosen.score:.2f} with {chosen.mean_layers:.2f} layers on average"
    print_plain(f"{outcome}; written to {out}")


def print_depth(chosen: ChosenDepth, out: Path) -> None:
    """Print the table of rules and the chosen one."""
    title = f"dev ({chosen.examples} rows): {chosen.metric}; all {chosen.blocks} blocks: {chosen.full_score:.2f}"
    table = Table("blocks", "score", f"loss, {chosen.confidence:.0%}", "saved", "texts/s", "", title=title)
    for index, row in enumerate(chosen.table):
        table.add_row(
            f"{row.mean_blocks:.2f}",
            f"{row.score:.2f}",
            f"≤ {row.loss_bound:.2f}",
            f"{1 - row.flops / chosen.full_flops:.1%}",
            f"{row.texts_per_second:.1f}",
            "chosen" if index == chosen.chosen_index else "",
        )
    Console().print(table)
    scores = ", ".join(f"{score:.2f} after {block}" for block, score in chosen.exit_scores.items())
    print_plain(f"all tokens at one exit: {scores}; before the exits were trained: {chosen.score_before:.2f}")
    outcome = (
        f"no rule saves operations and loses at most {chosen.tolerance:g} with {chosen.confidence:.0%} confidence, so "
        "all blocks are computed"
    )
    if chosen.rule is not None:
        outcome = (
            f"{chosen.metric} {chosen.score:.2f} with {chosen.mean_blocks:.2f} blocks per token, "
            f"{chosen.texts_per_second / chosen.full_texts_per_second:.2f} times the texts per second of all blocks"
        )
    print_plain(f"{outcome}; written to {out}")


def print_vocabulary(result: VocabularyResult, out: Path) -> None:
    """Print scores and sizes before and after the cut."""
    cut = result.cut
    print_plain(
        f"dev: {result.metric} {result.score:.2f} (before: {result.score_before:.2f}); vocabulary "
        f"{cut.tokens_before:,} → {cut.tokens_after:,} tokens, size {cut.megabytes_before:.1f} → "
        f"{cut.megabytes_after:.1f} MB; written to {out}"
    )

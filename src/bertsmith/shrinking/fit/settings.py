"""Settings of a search: budget, candidates and measurements."""

from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from bertsmith.checkpoint.source import FineTunedSource
from bertsmith.engines.base import Precision
from bertsmith.errors import InputError
from bertsmith.settings import Record


class Costs(NamedTuple):
    """Costs and score of a candidate; None if not measured."""

    latency_ms: float | None = None
    """Latency at the budget's percentile, for the slowest of its lengths."""
    size_mb: float | None = None
    memory_mb: float | None = None
    score: float | None = None


class Miss(NamedTuple):
    """A limit of the budget that a candidate misses."""

    name: str
    limit: float
    value: float

    @property
    def excess(self) -> float:
        """Relative excess over the limit."""
        return abs(self.value - self.limit) / max(abs(self.limit), 1e-9)

    @property
    def description(self) -> str:
        """The value, the limit and the difference as text."""
        if self.name == "score":
            return f"score {self.value:.2f} instead of {self.limit:g} ({self.limit - self.value:.2f} too low)"
        unit = "ms" if self.name == "latency" else "MB"
        return f"{self.name} {self.value:.3g} {unit} instead of {self.limit:g} {unit} ({self.excess:.0%} over)"


class BudgetConfig(Record):
    """Limits on the cost of inference on this machine; None for no limit."""

    latency_ms: float | None = Field(default=None, gt=0)
    """Maximum latency in milliseconds, from token ids to the outputs of the head."""
    percentile: Literal[50, 95] = 95
    """Percentile of the latency that must meet the limit."""
    lengths: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Sequence lengths in tokens, each of which must meet the limit; () for the lengths of the data."""
    batch: int = Field(default=1, ge=1)
    """Sequences per batch."""
    threads: int | None = Field(default=None, ge=1)
    """Threads; None for one per usable core."""
    size_mb: float | None = Field(default=None, gt=0)
    """Maximum size of all files of the artefact, in megabytes (1,000,000 bytes)."""
    memory_mb: float | None = Field(default=None, gt=0)
    """Maximum resident memory of a fresh process that runs the model, including Python and engine, in megabytes."""
    at_least: float | None = None
    """Minimum score on dev; the fastest or smallest candidate that meets it is chosen (`prefer`)."""

    def require_any(self) -> None:
        """Raise InputError if nothing is limited."""
        if all(limit is None for limit in (self.latency_ms, self.size_mb, self.memory_mb, self.at_least)):
            raise InputError(
                "no budget is set; pass one or more of --latency-ms, --size-mb, --memory-mb and --at-least"
            )

    def misses(self, costs: Costs, slack: float = 0.0) -> list[Miss]:
        """Return the limits that known costs miss; costs may exceed limits by the share `slack`."""
        limits = (
            ("latency", self.latency_ms, costs.latency_ms),
            ("size", self.size_mb, costs.size_mb),
            ("memory", self.memory_mb, costs.memory_mb),
        )
        misses = [
            Miss(name, limit, value)
            for name, limit, value in limits
            if limit is not None and value is not None and not value <= limit * (1 + slack)
        ]
        if self.at_least is not None and costs.score is not None and not costs.score >= self.at_least:
            misses.append(Miss("score", self.at_least, costs.score))
        return misses

    @property
    def description(self) -> str:
        """The limits as text."""
        limits = []
        if self.latency_ms is not None:
            where = " and ".join(map(str, self.lengths)) + " tokens" if self.lengths else "the lengths of the data"
            batch = "" if self.batch == 1 else f" in batches of {self.batch}"
            limits.append(f"p{self.percentile} ≤ {self.latency_ms:g} ms at {where}{batch}")
        if self.size_mb is not None:
            limits.append(f"size ≤ {self.size_mb:g} MB")
        if self.memory_mb is not None:
            limits.append(f"memory ≤ {self.memory_mb:g} MB")
        if self.at_least is not None:
            limits.append(f"score ≥ {self.at_least:g}")
        return ", ".join(limits)


def excess(misses: list[Miss]) -> float:
    """Relative excess of the worst miss; 0 for an empty list."""
    return max((miss.excess for miss in misses), default=0.0)


class SearchConfig(Record):
    """The candidates of a search."""

    engines: tuple[str, ...] = ()
    """Engines: torch, compiled, onnxruntime; () for all that are installed."""
    precisions: tuple[Precision, ...] = ()
    """Precisions of weights and products; () for all that an engine supports."""
    subnets: Literal["even", "layers"] | None = None
    """Only uniform widths and depths, or also sub-networks with unequal layers, found by evolutionary search; None for
    "layers" if the model is elastic."""
    vocabulary: Literal["keep", "cut", "auto"] = "auto"
    """Whether tokens that the training texts do not use are removed; "auto" does so if no other candidate is small
    enough."""
    population: int = Field(default=24, ge=4)
    """Sub-networks per generation."""
    generations: int = Field(default=6, ge=1)
    ranking_examples: int = Field(default=1000, ge=1)
    """Number of dev examples for ranking candidates; the best ones are scored on all of dev."""
    seed: int = 0


class MeasureConfig(Record):
    """Length and number of the measurements."""

    runs: int = Field(default=200, ge=1)
    """Forward passes per measurement and workload."""
    seconds: float = Field(default=10.0, gt=0)
    """Maximum seconds per measurement and workload, after at least 20 forward passes."""
    table_runs: int = Field(default=60, ge=1)
    """Forward passes of every small network of the latency table."""
    repeats: int = Field(default=5, ge=1)
    """Fresh processes in which a candidate must meet the budget."""
    finalists: int = Field(default=12, ge=1)
    """Maximum number of candidates that are written and measured, once one meets the budget."""


class FitSettings(Record):
    """All settings of a search for the best model within a budget."""

    model: FineTunedSource
    """Folder of a fine-tuned model, preferably an elastic one."""
    data: str
    """Folder with the split that candidates are scored on."""
    split: str = "dev"
    columns: tuple[str, ...] = ()
    """Names of columns that differ from the training data, as role=name, such as "label=stars"."""
    prefer: Literal["fast", "small"] = "fast"
    """Criterion among candidates that meet the minimum score."""
    budget: BudgetConfig = BudgetConfig()
    search: SearchConfig = SearchConfig()
    measure: MeasureConfig = MeasureConfig()

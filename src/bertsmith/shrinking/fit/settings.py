"""Settings of a search: the budget, the candidates and the measurements."""

from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from bertsmith.checkpoint.source import FineTunedSource
from bertsmith.engines.base import Precision
from bertsmith.errors import InputError
from bertsmith.settings import Record


class Costs(NamedTuple):
    """Costs and score of a candidate; None for what was not measured."""

    latency_ms: float | None = None
    """At the percentile of the budget, for the slowest of its lengths."""
    size_mb: float | None = None
    memory_mb: float | None = None
    score: float | None = None


class Miss(NamedTuple):
    """One limit that is missed."""

    name: str
    limit: float
    value: float

    @property
    def excess(self) -> float:
        """Share of the limit by which it is missed."""
        return abs(self.value - self.limit) / max(abs(self.limit), 1e-9)

    @property
    def description(self) -> str:
        """The miss in words."""
        if self.name == "score":
            return f"score {self.value:.2f} instead of {self.limit:g} ({self.limit - self.value:.2f} too low)"
        unit = "ms" if self.name == "latency" else "MB"
        return f"{self.name} {self.value:.3g} {unit} instead of {self.limit:g} {unit} ({self.excess:.0%} over)"


class BudgetConfig(Record):
    """Limits on the costs of answering on this machine; None for no limit."""

    latency_ms: float | None = Field(default=None, gt=0)
    """Milliseconds from token ids to the head's answer."""
    percentile: Literal[50, 95] = 95
    """The share of calls, in percent, that must be answered within the latency."""
    lengths: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Tokens of the sequences it holds for, each by itself; () for sequences as long as those of the data."""
    batch: int = Field(default=1, ge=1)
    """Sequences that are answered at a time."""
    threads: int | None = Field(default=None, ge=1)
    """Threads for the products; None for as many as this machine gives."""
    size_mb: float | None = Field(default=None, gt=0)
    """Megabytes of 1,000,000 bytes of all files that are needed to answer."""
    memory_mb: float | None = Field(default=None, gt=0)
    """The most resident memory, in such megabytes, of a fresh process that answers, Python and engine counted in."""
    at_least: float | None = None
    """The lowest score on dev that is still good enough; then the fastest or smallest one that has it is wanted."""

    def require_any(self) -> None:
        """Raise InputError if nothing is limited."""
        if all(limit is None for limit in (self.latency_ms, self.size_mb, self.memory_mb, self.at_least)):
            raise InputError(
                "no budget is given: pass one or more of --latency-ms, --size-mb, --memory-mb and --at-least"
            )

    def misses(self, costs: Costs, slack: float = 0.0) -> list[Miss]:
        """Return the limits that known costs miss; with `slack` costs may be higher by this share."""
        most = (
            ("latency", self.latency_ms, costs.latency_ms),
            ("size", self.size_mb, costs.size_mb),
            ("memory", self.memory_mb, costs.memory_mb),
        )
        found = [
            Miss(name, limit, value)
            for name, limit, value in most
            if limit is not None and value is not None and not value <= limit * (1 + slack)
        ]
        if self.at_least is not None and costs.score is not None and not costs.score >= self.at_least:
            found.append(Miss("score", self.at_least, costs.score))
        return found

    @property
    def description(self) -> str:
        """The budget in words."""
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
    """Excess of the worst miss; 0 if there is none."""
    return max((miss.excess for miss in misses), default=0.0)


class SearchConfig(Record):
    """Which candidates are searched."""

    engines: tuple[str, ...] = ()
    """What runs the model: torch, compiled, onnxruntime; () for all that this machine has."""
    precisions: tuple[Precision, ...] = ()
    """Of weights and products; () for all that an engine has."""
    subnets: Literal["even", "layers"] | None = None
    """Even widths and depths alone, or also sub-networks whose layers differ, found by evolution; None for "layers" if
    the model is elastic."""
    vocabulary: Literal["keep", "cut", "auto"] = "auto"
    """Whether pieces that the training texts do not use are dropped; "auto" does so where no other candidate is small
    enough."""
    population: int = Field(default=24, ge=4)
    """Sub-networks of a generation."""
    generations: int = Field(default=6, ge=1)
    ranking_examples: int = Field(default=1000, ge=1)
    """Examples of dev that candidates are compared on; the best ones are scored on all of it."""
    seed: int = 0


class MeasureConfig(Record):
    """How long and how often to measure."""

    runs: int = Field(default=200, ge=1)
    """Calls of one measurement at each length …"""
    seconds: float = Field(default=10.0, gt=0)
    """… unless that takes longer; at least 20 are made."""
    table_runs: int = Field(default=60, ge=1)
    """Calls of every small network of the latency table."""
    repeats: int = Field(default=5, ge=1)
    """Fresh processes that must find the budget kept before a candidate is taken."""
    finalists: int = Field(default=12, ge=1)
    """Candidates that are written and measured for real, once one has been found that keeps the budget."""


class FitSettings(Record):
    """A search for the best model that keeps a budget."""

    model: FineTunedSource
    """The folder of a fine-tuned model, best an elastic one."""
    data: str
    """A folder with the split that candidates are scored on."""
    split: str = "dev"
    prefer: Literal["fast", "small"] = "fast"
    """What is wanted of the models that are good enough, where a score is the budget."""
    budget: BudgetConfig = BudgetConfig()
    search: SearchConfig = SearchConfig()
    measure: MeasureConfig = MeasureConfig()

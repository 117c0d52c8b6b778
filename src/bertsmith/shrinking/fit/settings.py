"""All settings of a search for a budget."""

from typing import Literal

from pydantic import Field

from bertsmith.engines.base import Precision
from bertsmith.settings import Record
from bertsmith.shrinking.fit.budget import BudgetConfig


class SearchConfig(Record):
    """Which candidates there are."""

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
    """How long and how often is measured."""

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

    model: str
    """The folder of a fine-tuned model, best an elastic one."""
    data: str
    """What it is scored on."""
    part: str = "dev"
    prefer: Literal["fast", "small"] = "fast"
    """What is wanted of the models that are good enough, where a score is the budget."""
    budget: BudgetConfig = BudgetConfig()
    search: SearchConfig = SearchConfig()
    measure: MeasureConfig = MeasureConfig()

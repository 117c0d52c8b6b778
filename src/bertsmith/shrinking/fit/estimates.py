"""What candidates will cost, from the tables, and from what was found of others that are run in the same way."""

import statistics
from collections.abc import Sequence

from bertsmith.layers.subnet import Subnet
from bertsmith.models.model import Model
from bertsmith.shrinking.fit.budget import MEGABYTE, Costs
from bertsmith.shrinking.fit.candidates import Candidate
from bertsmith.shrinking.fit.table import Kind, WayTables, first_alike, layer_kinds
from bertsmith.shrinking.fit.ways import Way

SLACK, SLACK_KNOWN = 0.2, 0.07  # by which an estimate may be off: from the table alone, and once a way was measured


class Estimates:
    """The tables of all ways."""

    def __init__(self, model: Model, percentile: int) -> None:
        self.percentile = percentile
        self.units, self.alike = model.encoder.units, first_alike(model.config.encoder)
        self.tables: dict[Way, WayTables] = {}

    def kinds(self, subnet: Subnet) -> tuple[Kind, ...]:
        """The kinds of layers of a sub-network."""
        return layer_kinds(self.alike, self.units, subnet)

    def of(self, subnet: Subnet, way: Way) -> Costs:
        """The latency and the size that the tables tell."""
        kinds, tables = self.kinds(subnet), self.tables[way]
        return Costs(tables.latency_ms(kinds, self.percentile), tables.size.estimate(kinds) / MEGABYTE)

    def correct(self, candidates: Sequence[Candidate], way: Way) -> None:
        """Puts what was found of one way's candidates into the estimates of the others."""
        known = [one for one in candidates if one.way == way and one.measured is not None]
        ratios = [(one.costs.latency_ms or 0.0) / self._table(one) for one in known]
        for candidate in candidates:
            if candidate.way != way or candidate.measured is not None:
                continue
            size = candidate.estimate.size_mb or 0.0
            near = min(known, key=lambda one: abs((one.costs.size_mb or 0.0) - size))
            memory = (near.costs.memory_mb or 0.0) + size - (near.costs.size_mb or 0.0)
            candidate.estimate = Costs(statistics.median(ratios) * self._table(candidate), size, memory)

    def slack(self, candidates: Sequence[Candidate], way: Way) -> float:
        """By which share the estimates of a way may be too high."""
        is_known = any(one.way == way and one.measured is not None for one in candidates)
        return SLACK_KNOWN if is_known else SLACK

    def _table(self, candidate: Candidate) -> float:
        return max(1e-9, self.tables[candidate.way].latency_ms(candidate.kinds, self.percentile))

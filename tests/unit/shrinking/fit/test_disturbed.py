"""Measurements that other programs disturbed are repeated and never reused."""

from pathlib import Path

from bertsmith.shrinking.fit.measure import Conditions, Timing, Workload, least_disturbed
from bertsmith.shrinking.fit.store import Measurements

CONDITIONS = Conditions(workloads=(Workload(name="8", lengths=(8,)),))


def test_disturbed_measurement_is_repeated() -> None:
    shares = iter([0.1, 0.95, 0.99])

    def measure(*_: object) -> Timing:
        return Timing([], 1.0, 1.0, next(shares))

    assert least_disturbed(measure, [], CONDITIONS, 1, 1.0).processor_share == 0.95


def test_disturbed_measurement_is_not_reused(tmp_path: Path) -> None:
    own, cache = tmp_path / "own.jsonl", tmp_path / "cache.jsonl"
    store = Measurements(own, copies=[cache])
    store.get_or_measure({"a": 1}, lambda: {"latency": 251.0, "processor_share": 0.2})
    store.get_or_measure({"b": 1}, lambda: {"latency": 10.0, "processor_share": 1.0})
    assert store.get({"a": 1})  # within the run
    for again in (Measurements(own), Measurements(tmp_path / "new.jsonl", earlier=[cache])):
        assert again.get({"a": 1}) is None
        assert again.get({"b": 1}) == {"latency": 10.0, "processor_share": 1.0}

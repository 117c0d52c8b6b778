"""What Prometheus reads: requests, times and tokens as they come, and the state of every engine when it is asked."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bertsmith.serving.requests import RequestResult, SchedulerStats
from bertsmith.serving.scheduler import Scheduler

if TYPE_CHECKING:
    from bertsmith.serving.model import ServedModel

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_STATES: dict[str, str] = {
    "waiting_sequences": "Sequences that wait to be worked on",
    "waiting_tokens": "Tokens that wait to be worked on",
    "running_tokens": "Tokens that are being worked on",
}
_COUNTS: dict[str, str] = {
    "answered": "Calls the engine answered",
    "refused": "Calls the engine refused because its queue was full",
    "late": "Calls whose answer was not there in time",
    "batches": "Batches run",
    "batched_sequences": "Sequences in the batches run",
    "batched_tokens": "Tokens in the batches run",
}


class Metrics:
    """The figures of one service, in a registry of its own, so that several in one process do not mix."""

    def __init__(self, models: "Mapping[str, tuple[ServedModel, Scheduler]]") -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Engines(models))
        self._requests = Counter(
            "bertsmith_requests", "Requests answered", ["endpoint", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            "bertsmith_request_seconds",
            "From the head of a request to the end of its answer",
            ["endpoint"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._queued, self._computed = (
            Histogram(f"bertsmith_{name}_seconds", text, ["model"], buckets=_SECONDS, registry=self.registry)
            for name, text in (("queue", "How long calls waited"), ("compute", "How long calls were worked on"))
        )
        self._tokens = Counter("bertsmith_tokens", "Tokens worked on", ["model"], registry=self.registry)
        self._sizes = Counter(
            "bertsmith_calls_by_size",
            "Calls answered, by the size of the network that answered",
            ["model", "width", "depth"],
            registry=self.registry,
        )

    def request(self, endpoint: str, status: int | None, seconds: float) -> None:
        """Counts a request; no status means that the client went away before its answer."""
        self._requests.labels(endpoint, "gone" if status is None else str(status)).inc()
        self._seconds.labels(endpoint).observe(seconds)

    def call(self, model: str, tokens: int, answered: RequestResult) -> None:
        """Counts what an engine answered."""
        self._tokens.labels(model).inc(tokens)
        self._queued.labels(model).observe(answered.queued_seconds)
        self._computed.labels(model).observe(answered.computed_seconds)
        self._sizes.labels(model, *size_of(answered)).inc()

    def text(self) -> bytes:
        """All figures in Prometheus' text form."""
        return generate_latest(self.registry)


def size_of(answered: RequestResult | SchedulerStats) -> tuple[str, str]:
    """Width and depth of the network that answered, or answers now, as shares of the whole one."""
    subnet = answered.subnet
    return ("1", "1") if subnet is None else (f"{subnet.width:g}", f"{subnet.depth:g}")


class _Engines(Collector):
    """The state of every engine at the moment somebody asks."""

    def __init__(self, models: "Mapping[str, tuple[ServedModel, Scheduler]]") -> None:
        self.models = models

    def collect(self) -> Iterator[Metric]:
        states = {name: engine.stats() for name, (_, engine) in self.models.items()}
        for field, text in _STATES.items():
            gauge = GaugeMetricFamily(f"bertsmith_{field}", text, labels=["model"])
            for name, state in states.items():
                gauge.add_metric([name], getattr(state, field))
            yield gauge
        for field, text in _COUNTS.items():
            counter = CounterMetricFamily(f"bertsmith_engine_{field}", text, labels=["model"])
            for name, state in states.items():
                counter.add_metric([name], getattr(state, field))
            yield counter
        for place, side in enumerate(("width", "depth")):
            gauge = GaugeMetricFamily(f"bertsmith_{side}", f"The {side} that answers now", labels=["model"])
            for name, state in states.items():
                gauge.add_metric([name], float(size_of(state)[place]))
            yield gauge

"""Prometheus metrics: counters of requests, latencies and tokens, and the state of every scheduler when scraped."""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bertsmith.layers.subnet import Subnet
from bertsmith.serving.requests import RequestResult
from bertsmith.serving.scheduler import Scheduler

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_GAUGES = {
    "waiting_sequences": "Sequences in the queue",
    "waiting_tokens": "Tokens in the queue",
    "running_tokens": "Tokens being computed",
}
_COUNTERS = {
    "answered": "Requests answered by the scheduler",
    "refused": "Requests rejected because the queue was full",
    "late": "Requests that exceeded their deadline",
    "batches": "Batches computed",
    "batched_sequences": "Sequences in the computed batches",
    "batched_tokens": "Tokens in the computed batches",
}


class Metrics:
    """The metrics of one service, in a registry of its own."""

    def __init__(self, schedulers: Mapping[str, Scheduler]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_SchedulerCollector(schedulers))
        self._requests = Counter(
            "bertsmith_requests", "HTTP requests answered", ["endpoint", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            "bertsmith_request_seconds",
            "From the header of a request to the end of its response",
            ["endpoint"],
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self._queued, self._computed = (
            Histogram(f"bertsmith_{name}_seconds", text, ["model"], buckets=_BUCKETS, registry=self.registry)
            for name, text in (("queue", "Time in the queue"), ("compute", "Time in the model"))
        )
        self._tokens = Counter("bertsmith_tokens", "Tokens computed", ["model"], registry=self.registry)
        self._sizes = Counter(
            "bertsmith_calls_by_size",
            "Requests answered, by the size of the network",
            ["model", "width", "depth"],
            registry=self.registry,
        )

    def count_request(self, endpoint: str, status: int | None, seconds: float) -> None:
        """Count an HTTP request; status None means that the client disconnected."""
        self._requests.labels(endpoint, "gone" if status is None else str(status)).inc()
        self._seconds.labels(endpoint).observe(seconds)

    def count_result(self, model: str, tokens: int, result: RequestResult) -> None:
        """Count the result of a scheduler."""
        self._tokens.labels(model).inc(tokens)
        self._queued.labels(model).observe(result.queued_seconds)
        self._computed.labels(model).observe(result.computed_seconds)
        self._sizes.labels(model, *format_size(result.subnet)).inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


def format_size(subnet: Subnet | None) -> tuple[str, str]:
    """Return width and depth of a network as shares of the whole one."""
    return ("1", "1") if subnet is None else (f"{subnet.width:g}", f"{subnet.depth:g}")


class _SchedulerCollector(Collector):
    """Reads the state of every scheduler when the metrics are scraped."""

    def __init__(self, schedulers: Mapping[str, Scheduler]) -> None:
        self.schedulers = schedulers

    def collect(self) -> Iterator[Metric]:
        stats = {name: scheduler.stats() for name, scheduler in self.schedulers.items()}
        for field, text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"bertsmith_{field}", text, labels=["model"])
            for name, state in stats.items():
                gauge.add_metric([name], getattr(state, field))
            yield gauge
        for field, text in _COUNTERS.items():
            counter = CounterMetricFamily(f"bertsmith_engine_{field}", text, labels=["model"])
            for name, state in stats.items():
                counter.add_metric([name], getattr(state, field))
            yield counter
        for index, side in enumerate(("width", "depth")):
            gauge = GaugeMetricFamily(f"bertsmith_{side}", f"The {side} of the network in use", labels=["model"])
            for name, state in stats.items():
                gauge.add_metric([name], float(format_size(state.subnet)[index]))
            yield gauge

"""The scheduler of one model: asyncio submits requests, worker threads take batches from the queue and run them.

A free worker never waits for a batch to fill: it takes all queued requests that fit, and the next ones queue up while
it computes. The higher the load, the fuller the batches. On a CPU every worker has a core, and free workers share the
queue. On a GPU a worker takes the whole queue; two workers keep the GPU busy, because one prepares its batch while the
GPU computes the other's.
"""

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from bertsmith.data.progress import Watch
from bertsmith.layers.subnet import Subnet
from bertsmith.serving.graphs import IN_FLIGHT, CapturedModel, CaptureFailed, capture_graphs
from bertsmith.serving.model import ServedModel
from bertsmith.serving.queue import Batch, Queue, QueuedRequest, cost
from bertsmith.serving.requests import (
    BatchFailed,
    DeadlineExceeded,
    Operation,
    QueueFull,
    RequestResult,
    SchedulerStats,
    ShuttingDown,
    TokenSequence,
)
from bertsmith.serving.settings import SchedulerLimits, cores
from bertsmith.serving.size_schedule import SizeController
from bertsmith.serving.throughput import Throughput

_LOG = logging.getLogger(__name__)
_MIN_FILL = 0.25  # share of a full batch; emptier ones are not used to estimate the speed
_MIN_SHARE = 64  # tokens; fewer are not divided among workers, because two small batches take longer than one
_CPU_TOKENS, _GPU_TOKENS = 1024, 16_384
_CALIBRATION_TOKENS = 512  # maximum size of the batch with which `start` measures the speed of a CPU


class Scheduler:
    """Batches the requests of one model; call `start` before `submit`."""

    def __init__(
        self,
        served: ServedModel,
        limits: SchedulerLimits | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.served, self.limits, self._clock = served, limits or SchedulerLimits(), clock
        is_cpu = served.runner.device.type == "cpu"
        self.batch_tokens = self.limits.batch_tokens or (_CPU_TOKENS if is_cpu else _GPU_TOKENS)
        self.workers = self.limits.workers or (max(1, cores() // served.threads) if is_cpu else IN_FLIGHT)
        self.captured: CapturedModel | None = None
        """CUDA graphs, which `start` captures on a GPU."""
        self.why_eager: str | None = None
        """Why a model on a GPU has no CUDA graphs."""
        self._has_cores = is_cpu
        self._changed = threading.Condition()
        self._queue = Queue()
        self._throughput = Throughput(clock)
        self._controller = self._new_controller(tokens_per_second=1000.0)
        self._running: dict[int, int] = {}
        self._unanswered = 0
        self._is_draining = self._is_closed = False
        self._threads: list[threading.Thread] = []

    def start(self, watch: Watch = lambda done, total: None) -> None:
        """Capture CUDA graphs on a GPU, measure the speed of the model, and start the workers.

        `watch` is called with the number of captured graphs and of all.
        """
        if self._threads:
            return
        if not self._has_cores:
            try:
                self.captured = capture_graphs(self.served, self.batch_tokens, watch)
            except CaptureFailed as reason:
                self.why_eager = str(reason)
        self._controller = self._new_controller(self._measure_speed())
        for index in range(self.workers):
            thread = threading.Thread(target=self._work, name=f"{self.served.name}-{index}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Stop the workers after their current batches and reject the requests in the queue."""
        with self._changed:
            self._is_draining = self._is_closed = True
            while len(self._queue):
                request = self._queue.first()
                self._queue.drop(request)
                self._finish([request], ShuttingDown("the service is shutting down"))
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._threads = []

    async def submit(
        self,
        operation: Operation,
        sequences: Sequence[TokenSequence],
        *,
        timeout: float | None = None,
        subnet: Subnet | None = None,
    ) -> RequestResult:
        """Return the outputs of one request; raise SchedulerError if it is rejected or fails, InputError if invalid.

        `subnet` requests a sub-network; None leaves the size to the scheduler.
        """
        for sequence in sequences:
            self.served.check(operation, sequence, subnet)
        if not sequences:
            return RequestResult([], subnet, 0.0, 0.0)
        vocabulary = self.served.runner.config.encoder.vocabulary
        loop = asyncio.get_running_loop()
        costs = [cost(operation, sequence, vocabulary) for sequence in sequences]
        request = QueuedRequest(operation, sequences, costs, subnet, loop.create_future(), self._clock())
        self._enqueue(request)
        # wake workers after the other callbacks of this loop iteration, so that simultaneous requests share a batch
        loop.call_soon(self._wake)
        try:
            await asyncio.wait_for(request.future, timeout)
        except TimeoutError:
            if self._cancel(request, is_late=True):
                message = f"the model did not answer within {timeout:g} s"
                raise DeadlineExceeded(message, self.expected_wait()) from None
        except asyncio.CancelledError:
            self._cancel(request, is_late=False)
            raise
        if request.error is not None:
            raise request.error
        outputs = [output for output in request.outputs if output is not None]
        used = subnet if request.level is None else self.served.schedule.sizes[request.level].subnet
        queued, computed = request.started_at - request.submitted_at, request.ended_at - request.started_at
        return RequestResult(outputs, used, queued, computed)

    def check_room(self) -> None:
        """Raise QueueFull or ShuttingDown if `submit` would reject a request of average size."""
        with self._changed:
            self._check_room(self._throughput.mean_tokens, 1)

    def expected_wait(self) -> float:
        """Return the seconds that a new request would wait: by the speed of the model, or as recent ones did."""
        with self._changed:
            return self._expected_wait()

    def _expected_wait(self) -> float:
        by_speed = self._controller.expected_wait(self._queue.tokens + sum(self._running.values()))
        return max(by_speed, self._throughput.recent_latency())

    def stats(self) -> SchedulerStats:
        """Return the current state."""
        with self._changed:
            sequences, tokens = self._throughput.per_second()
            median, slowest = self._throughput.latency_percentiles() or (None, None)
            counts, level = self._throughput, self._controller.relax(self._queue.tokens)
            return SchedulerStats(
                waiting_sequences=self._queue.sequences,
                waiting_tokens=self._queue.tokens,
                running_tokens=sum(self._running.values()),
                sequences_per_second=sequences,
                tokens_per_second=tokens,
                median_seconds=median,
                slowest_seconds=slowest,
                subnet=self.served.schedule.sizes[level].subnet,
                answered=counts.answered,
                refused=counts.refused,
                late=counts.late,
                batches=counts.batches,
                batched_sequences=counts.batched_sequences,
                batched_tokens=counts.batched_tokens,
            )

    async def drain(self) -> None:
        """Reject new requests and return when all accepted ones are answered."""
        with self._changed:
            self._is_draining = True
        await asyncio.to_thread(self._wait_until_done)

    def _wait_until_done(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._unanswered or self._is_closed)

    def _enqueue(self, request: QueuedRequest) -> None:
        with self._changed:
            tokens = sum(request.costs)
            self._check_room(tokens, len(request.sequences))
            self._controller.count_demand(tokens)
            self._queue.put(request)
            self._unanswered += 1

    def _check_room(self, tokens: int, sequences: int) -> None:
        if self._is_draining:
            raise ShuttingDown("the service is shutting down and accepts no new requests")
        queue, limits = self._queue, self.limits
        is_full = queue.tokens + tokens > limits.waiting_tokens
        is_full = is_full or queue.sequences + sequences > limits.waiting_sequences
        if is_full and len(queue):  # a request larger than the whole queue may wait alone
            self._throughput.refused += 1
            self._controller.count_demand(tokens)
            self._controller.count_refusal()
            raise QueueFull(self._expected_wait())

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _cancel(self, request: QueuedRequest, *, is_late: bool) -> bool:
        """Drop a request that nobody waits for; sequences in a running batch are computed and discarded.

        Return False if the request was already finished.
        """
        with self._changed:
            if request.is_finished:
                return False
            request.is_finished = True
            self._queue.drop(request)
            self._unanswered -= 1
            self._throughput.late += is_late
            self._throughput.cancelled += not is_late
            self._changed.notify_all()
            return True

    def _work(self) -> None:
        """Take batches from the queue and run them, until the scheduler is closed."""
        thread = threading.get_ident()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: len(self._queue) or self._is_closed)
                if self._is_closed:
                    return
                batch = self._next_batch()
                self._running[thread] = batch.tokens
            started_at = self._clock()
            outputs: list[np.ndarray] | None = None
            error: Exception | None = None
            try:
                outputs = self._run(batch.operation, batch.sequences, batch.subnet)
            except Exception as problem:  # any failure is reported to the requests of this batch; the worker continues
                _LOG.exception("a batch of %d sequences failed", len(batch.members))
                error = BatchFailed(f"the model failed on the batch of this request: {type(problem).__name__}")
            with self._changed:
                active_workers = len(self._running)
                del self._running[thread]
                if outputs is None:
                    self._finish(list(dict.fromkeys(request for request, _ in batch.members)), error)
                else:
                    self._store(batch, outputs, started_at, active_workers)

    def _run(
        self, operation: Operation, sequences: list[TokenSequence], subnet: Subnet | None = None
    ) -> list[np.ndarray]:
        """Return the outputs of a batch, from CUDA graphs where they were captured."""
        if self.captured is not None and self.captured.supports(operation, subnet):
            return self.captured.run(operation, sequences, subnet)
        return self.served.run(operation, sequences, subnet)

    def _next_batch(self) -> Batch:
        """Take the next batch from the queue, on a CPU leaving a fair share to other free workers."""
        first, free = self._queue.first(), self.workers - len(self._running) if self._has_cores else 1
        max_tokens = min(self.batch_tokens, max(_MIN_SHARE, -(-self._queue.tokens // free)))
        if first.subnet is not None:
            return self._queue.take(max_tokens, None, first.subnet)
        level = first.level
        if level is None:
            level = self._controller.choose(self._queue.tokens) if self.served.is_elastic(first.operation) else 0
        return self._queue.take(max_tokens, level, self.served.schedule.sizes[level].subnet)

    def _store(self, batch: Batch, outputs: list[np.ndarray], started_at: float, active_workers: int) -> None:
        """Store the outputs of a batch in its requests and finish the complete requests."""
        now = self._clock()
        self._throughput.count_batch(len(batch.members), batch.tokens)
        if batch.level is not None and batch.tokens >= _MIN_FILL * self.batch_tokens:
            self._controller.update_speed(batch.level, batch.tokens * active_workers, now - started_at)
        complete = []
        for (request, index), output in zip(batch.members, outputs, strict=True):
            request.outputs[index] = output
            request.started_at = request.started_at or started_at
            request.ended_at = now
            request.computed += 1
            if request.computed == len(request.sequences) and not request.is_finished:
                complete.append(request)
                self._throughput.count_answer(now - request.submitted_at)
        self._finish(complete, None)

    def _finish(self, requests: Sequence[QueuedRequest], error: Exception | None) -> None:
        """Resolve the futures of requests, each in its own event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[QueuedRequest]] = defaultdict(list)
        for request in requests:
            self._queue.drop(request)
            if not request.is_finished:
                request.is_finished, request.error = True, error
                self._unanswered -= 1
                self._throughput.failed += error is not None
                by_loop[request.future.get_loop()].append(request)
        for loop, finished in by_loop.items():
            try:
                loop.call_soon_threadsafe(_resolve, finished)
            except RuntimeError:  # the loop is closed, so nobody waits
                continue
        self._changed.notify_all()

    def _new_controller(self, tokens_per_second: float) -> SizeController:
        return SizeController(
            self.served.schedule,
            target=self.limits.wait_target,
            quiet=self.limits.quiet_seconds,
            tokens_per_second=tokens_per_second,
            clock=self._clock,
        )

    def _measure_speed(self) -> float:
        """Return the tokens per second of all workers, measured on the second of two batches with the whole model."""
        length = max(1, min(32, self.served.encoding.length))
        sequence = TokenSequence(np.full(length, self.served.tokenizer.start, dtype=np.int64))
        # a GPU is at its speed for full batches only, and workers do not add to it
        tokens = min(_CALIBRATION_TOKENS, self.batch_tokens) if self._has_cores else self.batch_tokens
        sequences = [sequence] * max(1, tokens // length)
        operation: Operation = "task" if "task" in self.served.operations else "vectors"
        self._run(operation, sequences)
        started_at = time.perf_counter()
        self._run(operation, sequences)
        seconds = max(1e-6, time.perf_counter() - started_at)
        return (self.workers if self._has_cores else 1) * length * len(sequences) / seconds


def _resolve(requests: Sequence[QueuedRequest]) -> None:
    for request in requests:
        if not request.future.done():
            request.future.set_result(None)

"""The engine of one model: calls come in by asyncio, worker threads take what waits as batches and answer.

There is no time for which a batch is kept open: a worker that is free takes at once whatever waits, and while it works
the next batch gathers. The more is asked, the fuller are the batches.
"""

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
from pydantic import Field

from bertsmith.layers.subnet import Subnet
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
from bertsmith.serving.settings import cores
from bertsmith.serving.size_schedule import SizeController
from bertsmith.serving.throughput import Throughput
from bertsmith.settings import Record

_LOG = logging.getLogger(__name__)
_FILLED = 0.25  # of a batch's tokens: a batch below tells little of how fast full ones are
_SHARED = 64  # tokens that are not divided among workers: two small batches take longer than one
_CPU_TOKENS, _GPU_TOKENS = 1024, 16_384
_MEASURED = 512  # the most tokens of the batch by which a new engine learns how fast its model is


class SchedulerLimits(Record):
    """How large batches are, how much may wait, and when an elastic model answers in a smaller size."""

    batch_tokens: int | None = Field(default=None, ge=1)
    """The most tokens of a batch; a sequence that has more by itself is a batch alone. None: 1024 on a CPU, which
    gains nothing by more, and 16384 on a GPU."""
    waiting_tokens: int = Field(default=65_536, ge=1)
    """The most tokens that may wait; what comes then is refused."""
    waiting_sequences: int = Field(default=4096, ge=1)
    """The most sequences that may wait."""
    workers: int | None = Field(default=None, ge=1)
    """Threads that each work on a batch of their own. None: on a CPU as many as have cores for all their products,
    one on a GPU."""
    wait_target: float = Field(default=0.25, gt=0)
    """Seconds: when what waits would take longer than this, an elastic model goes down one size."""
    quiet_seconds: float = Field(default=5.0, gt=0)
    """How long it must be quiet before an elastic model goes up one size."""


class Scheduler:
    """Works on the calls of one model. `start` it before it is asked."""

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
        self.workers = self.limits.workers or (max(1, cores() // served.threads) if is_cpu else 1)
        self._changed = threading.Condition()
        self._queue = Queue()
        self._rates = Throughput(clock)
        self._switch = self._new_switch(tokens_per_second=1000.0)
        self._running: dict[int, int] = {}
        self._unanswered = 0
        self._is_closing = self._is_closed = False
        self._workers: list[threading.Thread] = []

    def start(self) -> None:
        """Measures how fast the model is, and lets the workers begin."""
        if self._workers:
            return
        self._switch = self._new_switch(self._measured())
        for number in range(self.workers):
            worker = threading.Thread(target=self._work, name=f"{self.served.name}-{number}", daemon=True)
            self._workers.append(worker)
            worker.start()

    def close(self) -> None:
        """Ends the workers after the batches they are at; what waits is refused."""
        with self._changed:
            self._is_closing = self._is_closed = True
            while len(self._queue):
                call = self._queue.first()
                self._queue.drop(call)
                self._finish([call], ShuttingDown("the service is ending"))
            self._changed.notify_all()
        for worker in self._workers:
            worker.join()
        self._workers = []

    async def submit(
        self,
        work: Operation,
        asked: Sequence[TokenSequence],
        *,
        timeout: float | None = None,
        subnet: Subnet | None = None,
    ) -> RequestResult:
        """Return the outputs of one request; raise SchedulerError if there are none, InputError if it is invalid."""
        for own in asked:
            self.served.check(work, own, subnet)
        if not asked:
            return RequestResult([], subnet, 0.0, 0.0)
        vocabulary = self.served.runner.config.encoder.vocabulary
        loop = asyncio.get_running_loop()
        costs = [cost(work, own, vocabulary) for own in asked]
        call = QueuedRequest(work, asked, costs, subnet, loop.create_future(), self._clock())
        self._take_in(call)
        # after what else this turn of the loop brings, so that calls made together stand in one batch
        loop.call_soon(self._wake)
        try:
            await asyncio.wait_for(call.future, timeout)
        except TimeoutError:
            if self._forget(call, is_late=True):
                raise DeadlineExceeded(f"the answer was not there in {timeout:g} s") from None
        except asyncio.CancelledError:
            self._forget(call, is_late=False)
            raise
        if call.error is not None:
            raise call.error
        outputs = [own for own in call.outputs if own is not None]
        sizes = self.served.schedule.sizes
        size = subnet if call.level is None else sizes[call.level].subnet
        return RequestResult(outputs, size, call.began - call.came, call.ended - call.began)

    def check_room(self) -> None:
        """Raise QueueFull or ShuttingDown where `submit` would for a request of average size."""
        with self._changed:
            self._check_room(self._rates.usual_tokens, 1)

    def stats(self) -> SchedulerStats:
        """How the engine fares right now."""
        with self._changed:
            sequences, tokens = self._rates.per_second()
            times = self._rates.percentiles()
            rates, level = self._rates, self._switch.relax(self._queue.tokens)
            return SchedulerStats(
                waiting_sequences=self._queue.sequences,
                waiting_tokens=self._queue.tokens,
                running_tokens=sum(self._running.values()),
                sequences_per_second=sequences,
                tokens_per_second=tokens,
                median_seconds=None if times is None else times[0],
                slowest_seconds=None if times is None else times[1],
                subnet=self.served.schedule.sizes[level].subnet,
                answered=rates.answered,
                refused=rates.refused,
                late=rates.late,
                batches=rates.batches,
                batched_sequences=rates.batched_sequences,
                batched_tokens=rates.batched_tokens,
            )

    async def drain(self) -> None:
        """Takes nothing new, and returns when all that was taken is answered."""
        with self._changed:
            self._is_closing = True
        await asyncio.to_thread(self._wait_until_done)

    def _wait_until_done(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._unanswered or self._is_closed)

    def _take_in(self, call: QueuedRequest) -> None:
        """Puts a call into the queue, or raises why not."""
        with self._changed:
            tokens = sum(call.costs)
            self._check_room(tokens, len(call.asked))
            self._switch.ask(tokens)
            self._queue.put(call)
            self._unanswered += 1

    def _check_room(self, tokens: int, sequences: int) -> None:
        """Raises why so much cannot wait."""
        if self._is_closing:
            raise ShuttingDown("the service is ending and takes nothing new")
        queue, limits = self._queue, self.limits
        is_full = queue.tokens + tokens > limits.waiting_tokens
        is_full = is_full or queue.sequences + sequences > limits.waiting_sequences
        if is_full and len(queue):  # what is larger than the whole queue may wait alone
            self._rates.refused += 1
            self._switch.ask(tokens)
            self._switch.refuse()
            raise QueueFull(self._switch.expected_wait(queue.tokens + sum(self._running.values())))

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _forget(self, call: QueuedRequest, *, is_late: bool) -> bool:
        """Drops what waits of a call whose caller is gone or waits no longer; what is in a batch is thrown away then.

        False if the answer was there already.
        """
        with self._changed:
            if call.is_settled:
                return False
            call.is_settled = True
            self._queue.drop(call)
            self._unanswered -= 1
            if is_late:
                self._rates.late += 1
            else:
                self._rates.dropped += 1
            self._changed.notify_all()
            return True

    def _work(self) -> None:
        """What a worker does from start to close."""
        own = threading.get_ident()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: len(self._queue) or self._is_closed)
                if self._is_closed:
                    return
                batch = self._next_batch()
                self._running[own] = batch.tokens
            began = self._clock()
            outputs: list[np.ndarray] | None = None
            error: Exception | None = None
            try:
                outputs = self.served.answers(batch.work, batch.asked, batch.subnet)
            except Exception as problem:  # whatever it is, its callers must hear of it and the others be served
                _LOG.exception("a batch of %d sequences failed", len(batch.members))
                error = BatchFailed(f"the model failed on the batch of this call: {type(problem).__name__}")
            with self._changed:
                at_work = len(self._running)
                del self._running[own]
                if outputs is None:
                    self._finish(list(dict.fromkeys(call for call, _ in batch.members)), error)
                else:
                    self._take_out(batch, outputs, began, at_work)

    def _next_batch(self) -> Batch:
        """What a worker that is free does next; where others are free as well, it leaves them their share."""
        head, free = self._queue.first(), self.workers - len(self._running)
        most = min(self.batch_tokens, max(_SHARED, -(-self._queue.tokens // free)))
        if head.subnet is not None:
            return self._queue.take(most, None, head.subnet)
        level = head.level
        if level is None:
            level = self._switch.choose(self._queue.tokens) if self._is_elastic(head.work) else 0
        return self._queue.take(most, level, self.served.schedule.sizes[level].subnet)

    def _is_elastic(self, work: Operation) -> bool:
        """Whether the record's scores speak of this work: they are of the task's head."""
        return work == "task" or (work == "vectors" and self.served.has_embedder)

    def _take_out(self, batch: Batch, outputs: list[np.ndarray], began: float, at_work: int) -> None:
        """Hands every output to its own call."""
        now = self._clock()
        self._rates.batch(len(batch.members), batch.tokens)
        if batch.level is not None and batch.tokens >= _FILLED * self.batch_tokens:
            self._switch.learn(batch.level, batch.tokens * at_work, now - began)
        done = []
        for (call, index), output in zip(batch.members, outputs, strict=True):
            call.outputs[index] = output
            call.began = call.began or began
            call.ended = now
            call.answered += 1
            if call.answered == len(call.asked) and not call.is_settled:
                done.append(call)
                self._rates.answer(now - call.came)
        self._finish(done, None)

    def _finish(self, calls: Sequence[QueuedRequest], error: Exception | None) -> None:
        """Tells the callers, each in the loop it waits in."""
        by_loop: dict[asyncio.AbstractEventLoop, list[QueuedRequest]] = defaultdict(list)
        for call in calls:
            self._queue.drop(call)
            if not call.is_settled:
                call.is_settled, call.error = True, error
                self._unanswered -= 1
                self._rates.failed += error is not None
                by_loop[call.future.get_loop()].append(call)
        for loop, own in by_loop.items():
            try:
                loop.call_soon_threadsafe(_resolve, own)
            except RuntimeError:  # the loop has ended, and its callers with it
                continue
        self._changed.notify_all()

    def _new_switch(self, tokens_per_second: float) -> SizeController:
        return SizeController(
            self.served.schedule,
            target=self.limits.wait_target,
            quiet=self.limits.quiet_seconds,
            tokens_per_second=tokens_per_second,
            clock=self._clock,
        )

    def _measured(self) -> float:
        """Tokens per second of all workers, from the second of two batches of the whole model."""
        length = max(1, min(32, self.served.encoding.length))
        one = TokenSequence(np.full(length, self.served.tokenizer.start, dtype=np.int64))
        asked = [one] * max(1, min(_MEASURED, self.batch_tokens) // length)
        work: Operation = "task" if "task" in self.served.works else "vectors"
        self.served.answers(work, asked)
        began = time.perf_counter()
        self.served.answers(work, asked)
        seconds = max(1e-6, time.perf_counter() - began)
        return self.workers * length * len(asked) / seconds


def _resolve(calls: Sequence[QueuedRequest]) -> None:
    for call in calls:
        if not call.future.done():
            call.future.set_result(None)

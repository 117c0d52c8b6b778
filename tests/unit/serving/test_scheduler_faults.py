"""The scheduler under faults: overload, cancelled requests, failing batches, shutdown."""

import asyncio
import logging
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from scheduler_cases import BlockingModel, of_length, tiny_folder

from bertsmith.serving.model import ServedModel
from bertsmith.serving.requests import BatchFailed, DeadlineExceeded, QueueFull, RequestResult, ShuttingDown
from bertsmith.serving.scheduler import Scheduler
from bertsmith.serving.settings import SchedulerLimits


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return ServedModel.open(tiny_folder(tmp_path_factory.mktemp("models") / "model", "classification"))


@pytest.fixture
def blocking(served: ServedModel) -> BlockingModel:
    return BlockingModel(served)


@pytest.fixture
def scheduler(blocking: BlockingModel) -> Iterator[Scheduler]:
    """One worker, batches of 10 tokens, room for 40 tokens in 8 sequences."""
    running = Scheduler(blocking, SchedulerLimits(workers=1, batch_tokens=10, waiting_tokens=40, waiting_sequences=8))
    running.start()
    yield running
    blocking.unblock()
    running.close()


async def submit_and_block(
    blocking: BlockingModel, scheduler: Scheduler, error: Exception | None = None
) -> "asyncio.Task[RequestResult]":
    """Submit a request and return once its batch runs, which then waits until the model is unblocked."""
    blocking.block(error)
    call = asyncio.create_task(scheduler.submit("task", [of_length(1)]))
    assert await asyncio.to_thread(blocking.started.acquire, timeout=10)
    return call


def test_full_queue_rejects_with_retry_after(blocking: BlockingModel, scheduler: Scheduler) -> None:
    async def scenario() -> None:
        first = await submit_and_block(blocking, scheduler)
        scheduler._controller.update_speed(0, 1.0, 1.0)
        waiting = [asyncio.create_task(scheduler.submit("task", [of_length(10)])) for _ in range(4)]
        await asyncio.sleep(0.01)
        with pytest.raises(QueueFull):
            scheduler.check_room()
        with pytest.raises(QueueFull) as refused:
            await scheduler.submit("task", [of_length(1)])
        assert refused.value.retry_after == pytest.approx(41 / scheduler._controller.tokens_per_second)
        blocking.unblock()
        await asyncio.gather(first, *waiting)
        scheduler.check_room()
        await scheduler.submit("task", [of_length(1)])

    asyncio.run(scenario())
    assert scheduler.stats().refused == 2
    assert scheduler.stats().answered == 6


def test_queue_is_limited_by_sequences_as_well(blocking: BlockingModel, scheduler: Scheduler) -> None:
    async def scenario() -> None:
        first = await submit_and_block(blocking, scheduler)
        waiting = asyncio.create_task(scheduler.submit("task", [of_length(1)] * 8))
        await asyncio.sleep(0.01)
        with pytest.raises(QueueFull):
            await scheduler.submit("task", [of_length(1)])
        blocking.unblock()
        await asyncio.gather(first, waiting)

    asyncio.run(scenario())


def test_request_larger_than_the_queue_may_wait_alone(scheduler: Scheduler) -> None:
    assert len(asyncio.run(scheduler.submit("task", [of_length(10)] * 20)).outputs) == 20


def test_late_request_in_the_queue_is_dropped(blocking: BlockingModel, scheduler: Scheduler) -> None:
    async def scenario() -> None:
        first = await submit_and_block(blocking, scheduler)
        late = asyncio.create_task(scheduler.submit("task", [of_length(7)] * 2, timeout=0.02))
        patient = asyncio.create_task(scheduler.submit("task", [of_length(3)], timeout=10))
        with pytest.raises(DeadlineExceeded, match=r"within 0\.02 s"):
            await late
        assert scheduler.stats().waiting_tokens == 3
        assert scheduler.stats().waiting_sequences == 1
        blocking.unblock()
        results = await asyncio.gather(first, patient)
        assert [len(one.outputs[0]) for one in results] == [1, 3]

    asyncio.run(scenario())
    assert scheduler.stats().late == 1
    assert scheduler.stats().batched_tokens == 4


def test_late_request_in_a_batch_does_not_affect_others(blocking: BlockingModel, scheduler: Scheduler) -> None:
    async def scenario() -> None:
        blocking.block()
        late = asyncio.create_task(scheduler.submit("task", [of_length(2)], timeout=0.02))
        other = asyncio.create_task(scheduler.submit("task", [of_length(3)]))
        with pytest.raises(DeadlineExceeded):
            await late
        blocking.unblock()
        np.testing.assert_array_equal((await other).outputs[0], np.ones(3))
        await asyncio.wait_for(scheduler.drain(), 10)

    asyncio.run(scenario())


def test_cancelled_request_is_dropped(blocking: BlockingModel, scheduler: Scheduler) -> None:
    async def scenario() -> None:
        first = await submit_and_block(blocking, scheduler)
        cancelled = [asyncio.create_task(scheduler.submit("task", [of_length(5)] * 2)) for _ in range(3)]
        other = asyncio.create_task(scheduler.submit("task", [of_length(4)]))
        await asyncio.sleep(0.01)
        for call in cancelled:
            call.cancel()
        await asyncio.sleep(0.01)
        assert scheduler.stats().waiting_tokens == 4
        first.cancel()  # during its batch
        await asyncio.sleep(0.01)
        blocking.unblock()
        assert len((await other).outputs[0]) == 4
        assert all(call.cancelled() for call in cancelled)
        await asyncio.wait_for(scheduler.drain(), 10)

    asyncio.run(scenario())
    assert scheduler.stats().answered == 1


def test_failed_batch_affects_only_its_own_requests(
    blocking: BlockingModel, scheduler: Scheduler, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> list[RequestResult | BaseException]:
        first = await submit_and_block(blocking, scheduler, MemoryError("no room"))
        spread = asyncio.create_task(scheduler.submit("task", [of_length(6)] * 3))
        other = asyncio.create_task(scheduler.submit("vectors", [of_length(2)]))
        await asyncio.sleep(0.01)
        blocking.permits.release()
        assert await asyncio.to_thread(blocking.started.acquire, timeout=10)
        blocking.permits.release()
        assert await asyncio.to_thread(blocking.started.acquire, timeout=10)
        blocking.unblock()  # the rest of a request with a failed batch is not run
        return await asyncio.gather(first, spread, other, return_exceptions=True)

    with caplog.at_level(logging.CRITICAL):
        first, spread, other = asyncio.run(scenario())
    assert isinstance(first, BatchFailed)
    assert str(first) == "the model failed on the batch of this request: MemoryError"
    assert isinstance(spread, BatchFailed)
    assert isinstance(other, RequestResult)
    assert [lengths for _, lengths, _ in blocking.batches] == [[1], [6], [2]]
    assert len(asyncio.run(scheduler.submit("task", [of_length(9)])).outputs[0]) == 9


def test_drain_finishes_accepted_requests_and_rejects_new_ones(blocking: BlockingModel, scheduler: Scheduler) -> None:
    async def scenario() -> None:
        first = await submit_and_block(blocking, scheduler)
        waiting = [asyncio.create_task(scheduler.submit("task", [of_length(6)])) for _ in range(3)]
        await asyncio.sleep(0.01)
        drained = asyncio.create_task(scheduler.drain())
        await asyncio.sleep(0.01)
        with pytest.raises(ShuttingDown):
            await scheduler.submit("task", [of_length(1)])
        assert not drained.done()
        blocking.unblock()
        await asyncio.wait_for(drained, 10)
        assert all(call.done() for call in (first, *waiting))
        assert [len((await call).outputs[0]) for call in waiting] == [6] * 3

    asyncio.run(scenario())


def test_close_rejects_waiting_requests(blocking: BlockingModel, scheduler: Scheduler) -> None:
    async def scenario() -> None:
        first = await submit_and_block(blocking, scheduler)
        waiting = asyncio.create_task(scheduler.submit("task", [of_length(6)]))
        await asyncio.sleep(0.01)
        closing = asyncio.create_task(asyncio.to_thread(scheduler.close))
        with pytest.raises(ShuttingDown):
            await waiting
        blocking.unblock()
        await closing
        assert len((await first).outputs[0]) == 1

    before = threading.active_count()
    asyncio.run(scenario())
    assert threading.active_count() < before


def test_requests_of_a_closed_event_loop_are_ignored(blocking: BlockingModel, scheduler: Scheduler) -> None:
    async def leave() -> None:
        await submit_and_block(blocking, scheduler)

    asyncio.run(leave())
    blocking.unblock()
    assert len(asyncio.run(scheduler.submit("task", [of_length(2)])).outputs[0]) == 2

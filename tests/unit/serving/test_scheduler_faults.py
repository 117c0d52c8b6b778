"""The engine in trouble: too much is asked, callers leave, batches break, the service ends."""

import asyncio
import logging
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from scheduler_cases import Held, of_length, tiny_folder

from bertsmith.serving.model import ServedModel
from bertsmith.serving.requests import BatchFailed, DeadlineExceeded, QueueFull, RequestResult, ShuttingDown
from bertsmith.serving.scheduler import Scheduler, SchedulerLimits


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return ServedModel.open(tiny_folder(tmp_path_factory.mktemp("models") / "model", "classification"))


@pytest.fixture
def held(served: ServedModel) -> Held:
    return Held(served)


@pytest.fixture
def engine(held: Held) -> Iterator[Scheduler]:
    """One worker, batches of 10 tokens, room for 40 tokens in 8 sequences."""
    made = Scheduler(held, SchedulerLimits(workers=1, batch_tokens=10, waiting_tokens=40, waiting_sequences=8))
    made.start()
    yield made
    held.free()
    made.close()


async def begun(held: Held, engine: Scheduler, error: Exception | None = None) -> "asyncio.Task[RequestResult]":
    """A call that is being worked on, and stays so until the model is let."""
    held.hold(error)
    call = asyncio.create_task(engine.submit("task", [of_length(1)]))
    assert await asyncio.to_thread(held.began.acquire, timeout=10)
    return call


def test_a_full_queue_refuses_and_says_when_to_come_back(held: Held, engine: Scheduler) -> None:
    async def play() -> None:
        first = await begun(held, engine)
        engine._switch.learn(0, 1.0, 1.0)
        waiting = [asyncio.create_task(engine.submit("task", [of_length(10)])) for _ in range(4)]
        await asyncio.sleep(0.01)
        with pytest.raises(QueueFull):
            engine.check_room()
        with pytest.raises(QueueFull) as refused:
            await engine.submit("task", [of_length(1)])
        assert refused.value.retry_after == pytest.approx(41 / engine._switch.tokens_per_second)
        held.free()
        await asyncio.gather(first, *waiting)
        engine.check_room()
        await engine.submit("task", [of_length(1)])  # and then there is room again

    asyncio.run(play())
    assert engine.stats().refused == 2
    assert engine.stats().answered == 6


def test_sequences_are_counted_besides_tokens(held: Held, engine: Scheduler) -> None:
    async def play() -> None:
        first = await begun(held, engine)
        waiting = asyncio.create_task(engine.submit("task", [of_length(1)] * 8))
        await asyncio.sleep(0.01)
        with pytest.raises(QueueFull):
            await engine.submit("task", [of_length(1)])
        held.free()
        await asyncio.gather(first, waiting)

    asyncio.run(play())


def test_what_is_larger_than_the_queue_may_wait_alone(engine: Scheduler) -> None:
    assert len(asyncio.run(engine.submit("task", [of_length(10)] * 20)).outputs) == 20


def test_late_work_that_was_not_begun_is_dropped(held: Held, engine: Scheduler) -> None:
    async def play() -> None:
        first = await begun(held, engine)
        late = asyncio.create_task(engine.submit("task", [of_length(7)] * 2, timeout=0.02))
        patient = asyncio.create_task(engine.submit("task", [of_length(3)], timeout=10))
        with pytest.raises(DeadlineExceeded, match=r"in 0\.02 s"):
            await late
        assert engine.stats().waiting_tokens == 3
        assert engine.stats().waiting_sequences == 1
        held.free()
        answered = await asyncio.gather(first, patient)
        assert [len(one.outputs[0]) for one in answered] == [1, 3]

    asyncio.run(play())
    assert engine.stats().late == 1
    assert engine.stats().batched_tokens == 4


def test_a_call_that_is_late_in_its_batch_leaves_the_others_alone(held: Held, engine: Scheduler) -> None:
    async def play() -> None:
        held.hold()
        late = asyncio.create_task(engine.submit("task", [of_length(2)], timeout=0.02))
        other = asyncio.create_task(engine.submit("task", [of_length(3)]))
        with pytest.raises(DeadlineExceeded):
            await late
        held.free()
        np.testing.assert_array_equal((await other).outputs[0], np.ones(3))
        await asyncio.wait_for(engine.drain(), 10)

    asyncio.run(play())


def test_a_caller_who_left_is_dropped(held: Held, engine: Scheduler) -> None:
    async def play() -> None:
        first = await begun(held, engine)
        gone = [asyncio.create_task(engine.submit("task", [of_length(5)] * 2)) for _ in range(3)]
        stays = asyncio.create_task(engine.submit("task", [of_length(4)]))
        await asyncio.sleep(0.01)
        for call in gone:
            call.cancel()
        await asyncio.sleep(0.01)
        assert engine.stats().waiting_tokens == 4
        first.cancel()  # while it is worked on
        await asyncio.sleep(0.01)
        held.free()
        assert len((await stays).outputs[0]) == 4
        assert all(call.cancelled() for call in gone)
        await asyncio.wait_for(engine.drain(), 10)

    asyncio.run(play())
    assert engine.stats().answered == 1


def test_a_broken_batch_reaches_its_callers_and_nobody_else(
    held: Held, engine: Scheduler, caplog: pytest.LogCaptureFixture
) -> None:
    async def play() -> list[RequestResult | BaseException]:
        first = await begun(held, engine, MemoryError("no room"))
        spread = asyncio.create_task(engine.submit("task", [of_length(6)] * 3))
        other = asyncio.create_task(engine.submit("vectors", [of_length(2)]))
        await asyncio.sleep(0.01)
        held.let.release()
        assert await asyncio.to_thread(held.began.acquire, timeout=10)
        held.let.release()
        assert await asyncio.to_thread(held.began.acquire, timeout=10)
        held.free()  # of the call that was spread no batch may follow the broken one
        return await asyncio.gather(first, spread, other, return_exceptions=True)

    with caplog.at_level(logging.CRITICAL):
        first, spread, other = asyncio.run(play())
    assert isinstance(first, BatchFailed)
    assert str(first) == "the model failed on the batch of this call: MemoryError"
    assert isinstance(spread, BatchFailed)
    assert isinstance(other, RequestResult)
    assert [lengths for _, lengths, _ in held.batches] == [[1], [6], [2]]
    assert len(asyncio.run(engine.submit("task", [of_length(9)])).outputs[0]) == 9


def test_draining_answers_what_was_taken_and_takes_nothing_new(held: Held, engine: Scheduler) -> None:
    async def play() -> None:
        first = await begun(held, engine)
        waiting = [asyncio.create_task(engine.submit("task", [of_length(6)])) for _ in range(3)]
        await asyncio.sleep(0.01)
        drained = asyncio.create_task(engine.drain())
        await asyncio.sleep(0.01)
        with pytest.raises(ShuttingDown):
            await engine.submit("task", [of_length(1)])
        assert not drained.done()
        held.free()
        await asyncio.wait_for(drained, 10)
        assert all(call.done() for call in (first, *waiting))
        assert [len((await call).outputs[0]) for call in waiting] == [6] * 3

    asyncio.run(play())


def test_closing_refuses_what_waits(held: Held, engine: Scheduler) -> None:
    async def play() -> None:
        first = await begun(held, engine)
        waiting = asyncio.create_task(engine.submit("task", [of_length(6)]))
        await asyncio.sleep(0.01)
        closing = asyncio.create_task(asyncio.to_thread(engine.close))
        with pytest.raises(ShuttingDown):
            await waiting
        held.free()
        await closing
        assert len((await first).outputs[0]) == 1  # what was begun is finished

    before = threading.active_count()
    asyncio.run(play())
    assert threading.active_count() < before


def test_callers_whose_loop_has_ended_do_no_harm(held: Held, engine: Scheduler) -> None:
    async def leave() -> None:
        await begun(held, engine)

    asyncio.run(leave())
    held.free()
    assert len(asyncio.run(engine.submit("task", [of_length(2)])).outputs[0]) == 2

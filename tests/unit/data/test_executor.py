"""Workers of this machine: order of the results, groups, errors and lost workers."""

import os
import time
from collections.abc import Callable, Iterator

import pytest

from bertsmith.data.executor import LocalWorkers, LostWorker, ThisProcess, open_executor
from bertsmith.errors import InputError


def test_results_are_in_the_order_of_the_inputs_and_few_are_read_ahead() -> None:
    read: list[int] = []

    def inputs() -> Iterator[int]:
        for number in range(20):
            read.append(number)
            yield number

    with LocalWorkers(make_worker, 2) as executor:
        results = executor.results(inputs())
        assert next(results) == (0, 0)
        assert len(read) == 4
        assert list(results) == [(number, 2 * number) for number in range(1, 20)]


def make_worker() -> Callable[[str | int], int]:
    return run


def run(order: str | int) -> int:
    if isinstance(order, int):
        return 2 * order
    if order == "input":
        raise InputError("bad input")
    if order == "fault":
        raise KeyError("fault")
    if order == "die":
        os._exit(3)
    if order == "sleep":
        time.sleep(1000)
    return os.getpid()


def test_one_process_is_this_one() -> None:
    executor = open_executor(lambda: lambda _: os.getpid())
    assert isinstance(executor, ThisProcess)
    assert list(executor.results("a")) == [("a", os.getpid())]


def test_worker_is_reused_by_its_group_only() -> None:
    with LocalWorkers(make_worker, 1, spare=1) as executor:
        first, again, other = (executor.submit("pid", group).result() for group in ("a", "a", "b"))
        assert first == again != other
        assert executor.submit("pid", "a").result() == first, "a spare process stays"
        assert executor.submit("pid", "c").result() not in (first, other)
        assert executor.submit("pid", "b").result() != other, "the longest idle process has ended"


def test_errors_and_lost_workers_reach_the_caller_and_cost_nothing_else() -> None:
    with LocalWorkers(make_worker, 2) as executor:
        with pytest.raises(InputError, match=r"^bad input$"):
            executor.submit("input").result()
        with pytest.raises(RuntimeError, match="KeyError: 'fault'") as caught:
            executor.submit("fault").result()
        assert "in a worker process" in caught.value.__notes__[0]
        with pytest.raises(LostWorker, match="exit code 3"):
            executor.submit("die").result()
        assert executor.submit("pid").result() != os.getpid()


def test_close_ends_busy_workers() -> None:
    executor = LocalWorkers(make_worker, 1)
    future = executor.submit("sleep")
    while not executor._busy:
        time.sleep(0.01)
    executor.close()
    assert isinstance(future.exception(), LostWorker)

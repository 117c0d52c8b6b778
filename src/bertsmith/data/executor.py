"""Run one function over many inputs: in this process, or by workers on a Ray cluster. Imports no PyTorch."""

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from typing import Any, Generic, TypeVar

from bertsmith.errors import InputError, first_line

Input = TypeVar("Input")
Output = TypeVar("Output")
Work = Callable[[Input], Output]

_RETRIES = 4  # an input that ends its worker more often, for want of memory, ends the command
_AHEAD = 2  # inputs that wait at each worker, so that no worker waits for the reader


class MapExecutor(ABC, Generic[Input, Output]):
    """A function that is applied to a stream of inputs; results come in the order of the inputs."""

    @abstractmethod
    def results(self, inputs: Iterable[Input]) -> Iterator[tuple[Input, Output]]:
        """Yield every input with its result, reading few inputs ahead."""


class LocalExecutor(MapExecutor[Input, Output]):
    """The function in this process."""

    def __init__(self, work: Work[Input, Output]) -> None:
        self.work = work

    def results(self, inputs: Iterable[Input]) -> Iterator[tuple[Input, Output]]:
        for one in inputs:
            yield one, self.work(one)


class RayExecutor(MapExecutor[Input, Output]):
    """Workers on a Ray cluster, each with `cores` cores; every worker makes the function once, with `make`.

    The cluster needs this package on every machine, and folders that all machines share. Ray restarts lost workers and
    repeats their unfinished inputs, so `make` and the function must be repeatable.
    """

    def __init__(self, make: Callable[[], Work[Input, Output]], address: str, *, cores: int = 1, gpus: int = 0) -> None:
        self.make, self.cores, self.gpus = make, cores, gpus
        self.ray = connect(address)

    def results(self, inputs: Iterable[Input]) -> Iterator[tuple[Input, Output]]:
        worker = self.ray.remote(RayWorker).options(
            num_cpus=self.cores, num_gpus=self.gpus, max_restarts=-1, max_task_retries=_RETRIES
        )
        room = self._room()
        workers: list[Any] = []
        running: deque[tuple[Input, Any]] = deque()
        try:
            for number, one in enumerate(inputs):
                if len(workers) < room:  # not more workers than inputs
                    workers.append(worker.remote(self.make, os.getcwd()))
                running.append((one, workers[number % len(workers)].run.remote(one)))
                if len(running) >= _AHEAD * len(workers):
                    yield self._finish(running.popleft())
            while running:
                yield self._finish(running.popleft())
        finally:
            for one_worker in workers:
                self.ray.kill(one_worker)

    def _room(self) -> int:
        """Return the number of workers that the cluster has room for."""
        there = self.ray.cluster_resources()
        room = int(there.get("CPU", 1)) // self.cores
        room = min(room, int(there.get("GPU", 0)) // self.gpus) if self.gpus else room
        if room < 1:
            needed = f"{self.cores} cores" + (f" and {self.gpus} GPU" if self.gpus else "")
            raise InputError(f"--ray: a worker needs {needed}, which no part of the cluster has; it has {there}")
        return room

    def _finish(self, waiting: tuple[Input, Any]) -> tuple[Input, Output]:
        one, reference = waiting
        try:
            return one, self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            cause = error.cause  # the exception of the function
            raise (cause if isinstance(cause, InputError) else error) from None
        except self.ray.exceptions.RayActorError as error:
            reason = str(error).strip().splitlines()[-1]
            raise InputError(
                f"--ray: a worker could not start, or was lost {_RETRIES + 1} times at the same input ({reason}); "
                "check its memory, and that bertsmith is installed on every machine"
            ) from None


def open_executor(
    make: Callable[[], Work[Input, Output]], ray: str | None, *, cores: int = 1, gpus: int = 0
) -> MapExecutor[Input, Output]:
    """Return the executor of a function: in this process, or on the Ray cluster with this address."""
    return LocalExecutor(make()) if ray is None else RayExecutor(make, ray, cores=cores, gpus=gpus)


class RayWorker:
    """An actor that holds the function."""

    def __init__(self, make: Callable[[], Work[Any, Any]], folder: str) -> None:
        os.chdir(folder)  # relative paths mean the same as for the user
        self.work = make()

    def run(self, one: Any) -> Any:
        return self.work(one)


def connect(address: str) -> Any:
    """Connect to a Ray cluster, or start one on this machine with "local"; return the module."""
    if find_spec("ray") is None:
        raise InputError("--ray needs ray, which is not installed: pip install 'bertsmith[ray]'")
    import ray

    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False, logging_level="error", include_dashboard=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise InputError(
                f"--ray is {address!r}, which cannot be reached ({first_line(error)}); "
                "allowed: local, auto, or HOST:PORT"
            ) from None
    return ray

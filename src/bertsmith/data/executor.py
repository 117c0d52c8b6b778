"""Run one function over many inputs: in this process, in local worker processes, or on a Ray cluster.

An `Executor` takes inputs and returns futures of the results. Two kinds of workers compute them, processes of this
machine and actors of a Ray cluster; with one process and no cluster, the function is called here. No PyTorch import.
"""

import logging
import os
import subprocess
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Generic, Protocol, Self, TypeVar

from bertsmith.data.parent import exit_with_parent
from bertsmith.errors import InputError, first_line

Input = TypeVar("Input")
Output = TypeVar("Output")
Work = Callable[[Input], Output]
MakeWork = Callable[[], Work[Input, Output]]

RAY_RETRIES = 4
"""Repetitions of an input whose worker on a cluster is lost; one that loses more, for want of memory, fails."""
_START = "import sys; sys.path[:] = {path!r}; from bertsmith.data.executor import serve; serve({descriptor})"
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")


class LostWorker(InputError):
    """A worker that ended before it had finished its input."""


class Executor(ABC, Generic[Input, Output]):
    """A function that workers apply to inputs."""

    slots: int
    """Number of inputs that are computed at the same time."""

    @abstractmethod
    def submit(self, one: Input, group: str = "") -> Future[Output]:
        """Return the future of a result; inputs of one group go to the same workers, which keep what they compiled."""

    @abstractmethod
    def close(self) -> None:
        """End all workers, also busy ones."""

    def first_finished(self, futures: Iterable[Future[Output]]) -> Future[Output]:
        """Wait until at least one of the futures has a result, and return it."""
        return next(iter(wait(futures, return_when=FIRST_COMPLETED).done))

    def results(self, inputs: Iterable[Input]) -> Iterator[tuple[Input, Output]]:
        """Yield every input with its result, in the order of the inputs, of which few are read ahead."""
        ahead = 0 if self.slots == 1 else 2 * self.slots - 1  # so that no worker waits for the reader
        running: deque[tuple[Input, Future[Output]]] = deque()
        for one in inputs:
            running.append((one, self.submit(one)))
            if len(running) > ahead:
                first, future = running.popleft()
                yield first, future.result()
        for first, future in running:
            yield first, future.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_executor(
    make: MakeWork[Input, Output],
    *,
    ray: str | None = None,
    processes: int = 1,
    cores: int = 1,
    gpus: float = 0,
    spare: int = 0,
) -> Executor[Input, Output]:
    """Return the executor of the function that `make` returns, which every worker calls once.

    `ray` is the address of a cluster; otherwise there are `processes` on this machine. `cores` is the number of threads
    of a worker, `gpus` its share of GPUs on a cluster, and `spare` the number of idle processes to keep for their
    groups.
    """
    if ray is not None:
        return RayWorkers(make, ray, cores=cores, gpus=gpus)
    return ThisProcess(make()) if processes == 1 else LocalWorkers(make, processes, threads=cores, spare=spare)


class ThisProcess(Executor[Input, Output]):
    """The function in this process; `submit` returns when it has finished and raises its exceptions."""

    slots = 1

    def __init__(self, work: Work[Input, Output]) -> None:
        self.work = work

    def submit(self, one: Input, group: str = "") -> Future[Output]:
        future: Future[Output] = Future()
        future.set_result(self.work(one))
        return future

    def close(self) -> None:
        pass


class Worker(Protocol):
    """One worker of a pool."""

    group: str
    """Group of its last input."""

    def run(self, one: Any) -> Any:
        """Return the result of an input; raise LostWorker if the worker ends."""

    def is_alive(self) -> bool: ...

    def end(self) -> None:
        """End the worker, also in the middle of an input."""


class WorkerPool(Executor[Input, Output]):
    """Workers that are started when they are needed; a lost one fails its own input only."""

    def __init__(self, start: Callable[[], Worker], slots: int, spare: int = 0) -> None:
        self.slots, self.most = slots, slots + spare
        self._start = start
        self._threads = ThreadPoolExecutor(slots)  # each waits for one worker
        self._lock = threading.Lock()
        self._idle: list[Worker] = []
        self._busy: list[Worker] = []
        self._is_closed = False

    def submit(self, one: Input, group: str = "") -> Future[Output]:
        return self._threads.submit(self._run, one, group)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            workers = [*self._idle, *self._busy]
        for worker in workers:
            worker.end()
        self._threads.shutdown(cancel_futures=True)

    def _run(self, one: Input, group: str) -> Output:
        worker = self._take(group)
        try:
            output: Output = worker.run(one)
            return output
        finally:
            with self._lock:
                self._busy.remove(worker)
                is_kept = worker.is_alive() and not self._is_closed
                if is_kept:
                    self._idle.append(worker)
            if not is_kept:
                worker.end()

    def _take(self, group: str) -> Worker:
        """Return an idle worker of a group, or a new one, for which the longest idle one may have to end."""
        surplus = None
        with self._lock:
            if self._is_closed:
                raise LostWorker("the workers have ended")
            self._idle = [worker for worker in self._idle if worker.is_alive()]
            chosen = next((worker for worker in self._idle if worker.group == group), None)
            if chosen is not None:
                self._idle.remove(chosen)
            else:
                if len(self._idle) + len(self._busy) >= self.most:
                    surplus = self._idle.pop(0)
                chosen = self._start()
                chosen.group = group
            self._busy.append(chosen)
        if surplus is not None:
            surplus.end()
        return chosen


class LocalWorkers(WorkerPool[Input, Output]):
    """Worker processes on this machine."""

    def __init__(self, make: MakeWork[Input, Output], processes: int, *, threads: int = 1, spare: int = 0) -> None:
        super().__init__(partial(LocalWorker, make, threads), processes, spare)


class LocalWorker:
    """A process that computes inputs from a pipe; it ends with this process."""

    def __init__(self, make: MakeWork[Any, Any], threads: int) -> None:
        self.group = ""
        self.is_busy = False
        self.connection, there = Pipe()
        # not `multiprocessing`, which would import the program of a user, who need not guard it for that
        path = [entry or os.getcwd() for entry in sys.path]
        command = [sys.executable, "-c", _START.format(path=path, descriptor=there.fileno())]
        # for libraries that use all cores by default
        environment = {**os.environ, **dict.fromkeys(_THREAD_VARIABLES, str(threads))}
        if threads == 1:
            environment["TOKENIZERS_PARALLELISM"] = "false"
        self.process = subprocess.Popen(command, env=environment, pass_fds=[there.fileno()])
        there.close()
        self._message: Any = make

    def run(self, one: Any) -> Any:
        self.is_busy = True
        try:
            if self._message is not None:
                self.connection.send(self._message)
                self._message = None
            self.connection.send(one)
            output, error = self.connection.recv()
        except (EOFError, OSError):  # OSError: the connection is reset
            status = self.process.wait()
            self.connection.close()
            raise LostWorker(f"its process ended with exit code {status}") from None
        self.is_busy = False
        if error is not None:
            raise error
        return output

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def end(self) -> None:
        if self.is_busy:
            self.process.terminate()  # the thread that waits for its result closes the connection
        else:
            self.connection.close()  # at which the process ends
        self.process.wait()


def serve(descriptor: int) -> None:
    """Compute the inputs from a pipe until its other end is closed."""
    exit_with_parent()
    connection: Connection[Any, Any] = Connection(descriptor)
    work: Work[Any, Any] | None = None
    with suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        make: MakeWork[Any, Any] = connection.recv()
        while True:
            one = connection.recv()
            try:
                work = work or make()
                answer: tuple[Any, Exception | None] = work(one), None
            except InputError as error:
                answer = None, InputError(str(error))
            except Exception as error:
                failure = RuntimeError(f"{type(error).__name__}: {error}")
                failure.add_note(f"in a worker process:\n{traceback.format_exc()}")
                answer = None, failure
            connection.send(answer)


class RayWorkers(WorkerPool[Input, Output]):
    """Actors on a Ray cluster, each with `cores` cores and a number of GPUs.

    The cluster needs this package on every machine, and folders that all machines share. Ray restarts lost workers and
    repeats their unfinished inputs, so `make` and the function must be repeatable.
    """

    def __init__(self, make: MakeWork[Input, Output], address: str, *, cores: int = 1, gpus: float = 0) -> None:
        ray = connect(address)
        super().__init__(partial(RayWorker, ray, make, cores, gpus), _room(ray, cores, gpus))


class RayWorker:
    """A worker of a cluster."""

    def __init__(self, ray: Any, make: MakeWork[Any, Any], cores: int, gpus: float) -> None:
        self.group = ""
        self.ray = ray
        actor = ray.remote(_Actor).options(num_cpus=cores, num_gpus=gpus, max_restarts=-1, max_task_retries=RAY_RETRIES)
        self.actor = actor.remote(make, os.getcwd())

    def run(self, one: Any) -> Any:
        try:
            return self.ray.get(self.actor.run.remote(one))
        except self.ray.exceptions.RayTaskError as error:
            cause = error.cause  # the exception of the function
            raise (cause if isinstance(cause, InputError) else error) from None
        except self.ray.exceptions.RayActorError as error:
            reason = str(error).strip().splitlines()[-1]
            raise LostWorker(
                f"--ray: a worker could not start, or was lost {RAY_RETRIES + 1} times at the same input ({reason}); "
                "check its memory, and that bertsmith is installed on every machine"
            ) from None

    def is_alive(self) -> bool:
        return True  # Ray restarts it

    def end(self) -> None:
        self.ray.kill(self.actor)


class _Actor:
    """The function on a machine of a cluster."""

    def __init__(self, make: MakeWork[Any, Any], folder: str) -> None:
        os.chdir(folder)  # relative paths mean the same as for the user
        self.work = make()

    def run(self, one: Any) -> Any:
        return self.work(one)


def _room(ray: Any, cores: int, gpus: float) -> int:
    """Return the number of workers that a cluster has room for."""
    there = ray.cluster_resources()
    room = int(there.get("CPU", 1)) // cores
    if gpus:
        room = min(room, int(there.get("GPU", 0) / gpus + 1e-6))
    if room < 1:
        needed = f"{cores} cores" + (f" and {gpus:g} GPU" if gpus else "")
        raise InputError(f"--ray: a worker needs {needed}, which no part of the cluster has; it has {there}")
    return room


def connect(address: str) -> Any:
    """Connect to a Ray cluster, or start one on this machine with "local"; return the module."""
    if find_spec("ray") is None:
        raise InputError("--ray needs ray, which is not installed: pip install 'bertsmith[ray]'")
    import ray

    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise InputError(
                f"--ray is {address!r}, which cannot be reached ({first_line(error)}); "
                "allowed: local, auto, or HOST:PORT"
            ) from None
    return ray

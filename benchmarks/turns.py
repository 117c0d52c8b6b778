"""Turns on one GPU: several benchmarks compile at the same time, and each is timed while it has the device alone.

    turn = Turn("turn.lock", pause=[1234])
    ...                # build, compile, first calls
    with turn:
        ...            # timed calls

A turn begins when no other process has a turn of the same file, and when the device has finished the work of the
processes in `pause`, which are stopped (SIGSTOP) until the turn ends, also by an error. A process that is killed during
its turn leaves them stopped; `kill -CONT` continues them. Without a file and processes a turn does nothing.
"""

import argparse
import atexit
import fcntl
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TextIO

import torch

SIZE, PRODUCTS = 8192, 5
"""Matrices whose products show whether another process uses the device; about 7 ms on an H200."""
MIN_SETTLING, MAX_SETTLING = 0.5, 2.0
"""Seconds to wait for the device after the other processes are stopped."""
SPREAD = 1.15
"""Largest ratio of the times of equal products on a device without other work; its clock varies a little."""


class Turn:
    """Exclusive use of the device by one process; a context manager that can be entered repeatedly."""

    def __init__(self, file: str | None = None, pause: Sequence[int] = (), *, device: str = "cuda") -> None:
        self.file, self.pause, self.device = file, tuple(pause), device
        self.waited = 0.0
        """Seconds between the requests for turns and their beginnings."""
        self.tflops: float | None = None
        """TFLOP/s of a large bfloat16 product at the beginning of the last turn."""
        self._lock: TextIO | None = None
        self._is_begun = False
        atexit.register(self.end)

    @classmethod
    def of(cls, options: argparse.Namespace) -> "Turn":
        """Return the turn that the options of `add_options` describe."""
        return cls(options.turn, options.pause, device=options.device)

    @property
    def is_shared(self) -> bool:
        return self.file is not None or bool(self.pause)

    def begin(self) -> None:
        """Wait for the turn, stop the other processes and wait until the device has finished their work."""
        if self._is_begun or not self.is_shared:
            return
        start = time.perf_counter()
        if self.file is not None:
            self._lock = open(self.file, "a+", encoding="utf-8")  # noqa: SIM115 - open until the end of the turn
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            self._lock.truncate(0)
            self._lock.write(json.dumps({"process": os.getpid(), "begin": time.time()}))
            self._lock.flush()
        self._is_begun = True
        self._signal(signal.SIGSTOP)
        if self.device == "cuda":
            self.tflops = _wait_for_device()
        self.waited += time.perf_counter() - start

    def end(self) -> None:
        """Continue the other processes and leave the turn to the next process."""
        if not self._is_begun:
            return
        self._signal(signal.SIGCONT)
        self._is_begun = False
        if self._lock is not None:
            self._lock.truncate(0)
            # explicitly: worker processes may hold copies of the file
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            self._lock.close()
            self._lock = None

    @contextmanager
    def ended(self) -> Iterator[None]:
        """End a turn that is begun inside."""
        try:
            yield
        finally:
            self.end()

    def __enter__(self) -> "Turn":
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()

    def _signal(self, number: signal.Signals) -> None:
        for process in self.pause:
            with suppress(ProcessLookupError):  # it may have ended
                os.kill(process, number)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a turn to those of a benchmark."""
    parser.add_argument("--turn", metavar="FILE", help="time only while no other benchmark with this file does")
    parser.add_argument(
        "--pause", metavar="PID", nargs="+", default=[], type=int, help="stop these processes during a turn"
    )


def _wait_for_device() -> float:
    """Wait until the device does no other work, so that equal products take equal times; return their TFLOP/s."""
    generator = torch.Generator("cuda").manual_seed(0)
    left, right = (torch.randn(SIZE, SIZE, generator=generator, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(left)
    times: list[float] = []
    begin = time.perf_counter()
    while (spent := time.perf_counter() - begin) < MAX_SETTLING:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        for _ in range(PRODUCTS):
            torch.mm(left, right, out=out)
        marks[1].record()
        marks[1].synchronize()
        times.append(marks[0].elapsed_time(marks[1]))
        last = times[-4:]
        if spent >= MIN_SETTLING and len(last) == 4 and max(last) <= SPREAD * min(times):
            break
    return round(PRODUCTS * 2 * SIZE**3 / min(times[-4:]) / 1e9, 1)

"""Load generators: closed loops of clients, and an open loop at a fixed rate."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from bertsmith.serving.requests import DeadlineExceeded, QueueFull, TokenSequence
from bertsmith.serving.scheduler import Scheduler


@dataclass(frozen=True)
class Outcome:
    """Outcome of one request: "answered", "refused" or "late", with the scores of its texts and the size that answered.

    Shape: scores (texts, labels).
    """

    end: str
    scores: np.ndarray = field(default_factory=lambda: np.empty((0, 0)))
    size: tuple[float, float] = (1.0, 1.0)


class Target(Protocol):
    """Send a request for the texts of these indices."""

    async def send(self, numbers: Sequence[int]) -> Outcome: ...
    async def close(self) -> None: ...


class SchedulerTarget:
    """The scheduler itself, in this process."""

    def __init__(self, scheduler: Scheduler, sequences: Sequence[TokenSequence], timeout: float) -> None:
        self.scheduler, self.sequences, self.timeout = scheduler, sequences, timeout

    async def send(self, numbers: Sequence[int]) -> Outcome:
        try:
            sequences = [self.sequences[number] for number in numbers]
            answered = await self.scheduler.submit("task", sequences, timeout=self.timeout)
        except QueueFull:
            return Outcome("refused")
        except DeadlineExceeded:
            return Outcome("late")
        subnet = answered.subnet
        size = (1.0, 1.0) if subnet is None else (subnet.width, subnet.depth)
        return Outcome("answered", softmax(np.stack(answered.outputs)), size)

    async def close(self) -> None:
        await self.scheduler.drain()


class HttpTarget:
    """POST /predict over keep-alive connections, with little client overhead."""

    def __init__(self, host: str, port: int, texts: Sequence[str], labels: Sequence[str]) -> None:
        self.host, self.port, self.labels, self.texts = host, port, labels, texts
        self.free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def send(self, numbers: Sequence[int]) -> Outcome:
        is_new = not self.free
        reader, writer = await asyncio.open_connection(self.host, self.port) if is_new else self.free.pop()
        try:
            writer.write(self._request([self.texts[number] for number in numbers]))
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()
            if is_new:
                raise
            return await self.send(numbers)  # the server closed an idle connection
        status, *lines = head.split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if headers.get("connection") == "close":
            writer.close()
        else:
            self.free.append((reader, writer))
        code = int(status.split()[1])
        if code == 429:
            return Outcome("refused")
        if code in (503, 504):
            return Outcome("late")
        if code != 200:
            return Outcome(f"status {code}")
        by_label = [{one["label"]: one["score"] for one in row} for row in json.loads(body)]
        size = float(headers["x-bertsmith-width"]), float(headers["x-bertsmith-depth"])
        return Outcome("answered", np.array([[row[label] for label in self.labels] for row in by_label]), size)

    async def close(self) -> None:
        for _, writer in self.free:
            writer.close()
        self.free = []

    def _request(self, texts: Sequence[str]) -> bytes:
        # a list in a list is a text alone: a list of two texts would be a pair
        body = json.dumps({"inputs": [[text] for text in texts]}).encode()
        head = f"POST /predict HTTP/1.1\r\nHost: {self.host}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@dataclass
class Load:
    """Outcomes of a load test."""

    seconds: float = 0.0
    """Time from the first request to the last answer."""
    ends: Counter[str] = field(default_factory=Counter)
    times: list[float] = field(default_factory=list)
    """Latencies of answered requests in seconds."""
    sizes: Counter[tuple[float, float]] = field(default_factory=Counter)
    computed: float = 0.0
    """CPU seconds of the serving process."""
    answers: list[tuple[Sequence[int], Outcome]] = field(default_factory=list)
    """Texts and outcome of answered requests."""
    wrong: int = 0
    """Requests with an answer that differs from the output of the model for the text alone."""

    @property
    def per_second(self) -> float:
        return self.ends["answered"] / self.seconds

    def percentile(self, share: float) -> float:
        """Return a percentile of the latencies in milliseconds."""
        return 1e3 * float(np.percentile(self.times, share)) if self.times else float("nan")


Known = dict[tuple[float, float], np.ndarray]
"""Outputs of the model for every text alone, by size: (texts, labels)."""


class LoadGenerator:
    """Send requests of `size` texts to a target and check every answer when the load has ended."""

    def __init__(self, target: Target, texts: int, known: Known, *, size: int = 1, tolerance: float = 1e-3) -> None:
        self.target, self.texts, self.known, self.size, self.tolerance = target, texts, known, size, tolerance

    async def closed(self, clients: int, seconds: float) -> Load:
        """Run a closed loop: each client sends its next request when the previous one is answered."""
        load, begin = Load(), time.perf_counter()

        async def client(number: int) -> None:
            while time.perf_counter() - begin < seconds:
                await self._once(number, load)
                number += clients

        await asyncio.gather(*(client(number) for number in range(clients)))
        load.seconds = time.perf_counter() - begin
        self._check(load)
        return load

    async def at_rate(self, rate: float, seconds: float) -> Load:
        """Run an open loop: send requests at random times with this rate per second, without waiting for answers."""
        load, begin, random = Load(), time.perf_counter(), np.random.default_rng(0)
        due, number, made = 0.0, 0, set()
        while due < seconds:
            wait = begin + due - time.perf_counter()
            # also if the schedule is late, so that other tasks can run
            await asyncio.sleep(max(0.0, wait))
            task = asyncio.create_task(self._once(number, load))
            made.add(task)
            task.add_done_callback(made.discard)
            number, due = number + 1, due + float(random.exponential(1 / rate))
        if made:
            await asyncio.wait(made)
        load.seconds = time.perf_counter() - begin
        assert sum(load.ends.values()) == number, "a request was lost"
        self._check(load)
        return load

    async def _once(self, number: int, load: Load) -> None:
        begin = time.perf_counter()
        numbers = [(number * self.size + offset) % self.texts for offset in range(self.size)]
        outcome = await self.target.send(numbers)
        load.ends[outcome.end] += 1
        if outcome.end == "answered":
            load.times.append(time.perf_counter() - begin)
            load.sizes[outcome.size] += 1
            load.answers.append((numbers, outcome))

    def _check(self, load: Load) -> None:
        """Count wrong answers; afterwards, because it takes longer than sending a request."""
        for numbers, outcome in load.answers:
            expected = self.known[outcome.size][numbers]
            load.wrong += not np.allclose(outcome.scores, expected, rtol=self.tolerance, atol=self.tolerance / 10)
        load.answers.clear()


def softmax(outputs: np.ndarray) -> np.ndarray:
    shares = np.exp(outputs - outputs.max(-1, keepdims=True))
    found: np.ndarray = shares / shares.sum(-1, keepdims=True)
    return found

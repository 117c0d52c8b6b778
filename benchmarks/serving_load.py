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
class Said:
    """Outcome of one request: "answered", "refused" or "late", with the scores by label and the size that answered."""

    end: str
    scores: tuple[float, ...] = ()
    size: tuple[float, float] = (1.0, 1.0)


class Target(Protocol):
    """Send a request for the text of this index."""

    async def ask(self, number: int) -> Said: ...
    async def close(self) -> None: ...


class SchedulerTarget:
    """The scheduler itself, in this process."""

    def __init__(self, scheduler: Scheduler, asked: Sequence[TokenSequence], timeout: float) -> None:
        self.scheduler, self.asked, self.timeout = scheduler, asked, timeout

    async def ask(self, number: int) -> Said:
        try:
            answered = await self.scheduler.submit("task", [self.asked[number]], timeout=self.timeout)
        except QueueFull:
            return Said("refused")
        except DeadlineExceeded:
            return Said("late")
        subnet = answered.subnet
        size = (1.0, 1.0) if subnet is None else (subnet.width, subnet.depth)
        return Said("answered", tuple(softmax(answered.outputs[0]).tolist()), size)

    async def close(self) -> None:
        await self.scheduler.drain()


class HttpTarget:
    """POST /predict over keep-alive connections, with little client overhead."""

    def __init__(self, host: str, port: int, texts: Sequence[str], labels: Sequence[str]) -> None:
        self.host, self.port, self.labels = host, port, labels
        self.requests = [self._request(text) for text in texts]
        self.free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, number: int) -> Said:
        is_new = not self.free
        reader, writer = await asyncio.open_connection(self.host, self.port) if is_new else self.free.pop()
        try:
            writer.write(self.requests[number])
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()
            if is_new:
                raise
            return await self.ask(number)  # the server closed an idle connection
        status, *lines = head.split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if headers.get("connection") == "close":
            writer.close()
        else:
            self.free.append((reader, writer))
        code = int(status.split()[1])
        if code == 429:
            return Said("refused")
        if code in (503, 504):
            return Said("late")
        if code != 200:
            return Said(f"status {code}")
        scores = {one["label"]: one["score"] for one in json.loads(body)}
        size = float(headers["x-bertsmith-width"]), float(headers["x-bertsmith-depth"])
        return Said("answered", tuple(scores[label] for label in self.labels), size)

    async def close(self) -> None:
        for _, writer in self.free:
            writer.close()
        self.free = []

    def _request(self, text: str) -> bytes:
        body = json.dumps({"inputs": text}).encode()
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
    wrong: int = 0
    """Answers that differ from the output of the model for the text alone."""

    @property
    def per_second(self) -> float:
        return self.ends["answered"] / self.seconds

    def percentile(self, share: float) -> float:
        """Return a percentile of the latencies in milliseconds."""
        return 1e3 * float(np.percentile(self.times, share)) if self.times else float("nan")


Known = dict[tuple[float, float], np.ndarray]
"""Outputs of the model for every text alone, by size: (texts, labels)."""


class Asking:
    """Send requests to a target and check every answer."""

    def __init__(self, target: Target, texts: int, known: Known) -> None:
        self.target, self.texts, self.known = target, texts, known

    async def closed(self, callers: int, seconds: float) -> Load:
        """Run a closed loop: each client sends its next request when the previous one is answered."""
        load, begin = Load(), time.perf_counter()

        async def caller(number: int) -> None:
            while time.perf_counter() - begin < seconds:
                await self._once(number % self.texts, load)
                number += callers

        await asyncio.gather(*(caller(number) for number in range(callers)))
        load.seconds = time.perf_counter() - begin
        return load

    async def at_rate(self, rate: float, seconds: float) -> Load:
        """Run an open loop: send requests at random times with this rate per second, without waiting for answers."""
        load, begin, random = Load(), time.perf_counter(), np.random.default_rng(0)
        due, number, made = 0.0, 0, set()
        while due < seconds:
            wait = begin + due - time.perf_counter()
            # also if the schedule is late, so that other tasks can run
            await asyncio.sleep(max(0.0, wait))
            task = asyncio.create_task(self._once(number % self.texts, load))
            made.add(task)
            task.add_done_callback(made.discard)
            number, due = number + 1, due + float(random.exponential(1 / rate))
        if made:
            await asyncio.wait(made)
        load.seconds = time.perf_counter() - begin
        assert sum(load.ends.values()) == number, "a request was lost"
        return load

    async def _once(self, number: int, load: Load) -> None:
        begin = time.perf_counter()
        said = await self.target.ask(number)
        load.ends[said.end] += 1
        if said.end == "answered":
            load.times.append(time.perf_counter() - begin)
            load.sizes[said.size] += 1
            load.wrong += not np.allclose(said.scores, self.known[said.size][number], rtol=1e-3, atol=1e-4)


def softmax(outputs: np.ndarray) -> np.ndarray:
    shares = np.exp(outputs - outputs.max())
    found: np.ndarray = shares / shares.sum()
    return found

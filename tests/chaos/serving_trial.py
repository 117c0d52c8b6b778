"""The service under load and hostile clients: `python tests/chaos/serving_trial.py --seconds 20`.

Every answer is compared with the vectors of the model outside the service. Loads go to 127.0.0.1 only. Ten minutes of
overload: `--only loads --overload 600`; a soak of an hour: `--only soak --soak 3600`.
"""

import argparse
import asyncio
import json
import os
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import bertsmith
from bertsmith.bundled import model_folder

TEXTS = [f"the smith forges {'an iron gate ' * (count % 7)}number {count}" for count in range(64)]
HOSTILE = {
    "398,000 nulls": ("/embed", b'{"inputs": [' + b"null," * 397_999 + b"null]}"),
    "600,000 empty lists": ("/embed", b'{"inputs": [' + b"[]," * 599_999 + b"[]]}"),
    "1.9 MB of text": ("/embed", json.dumps({"inputs": "iron gate " * 190_000, "truncate": True}).encode()),
    "1.9 MB of one word": ("/embed", json.dumps({"inputs": "a" * 1_900_000, "truncate": True}).encode()),
    "1.9 MB to /tokenize": ("/tokenize", json.dumps({"inputs": "iron gate " * 190_000}).encode()),
}
_TOLERANCE = 1e-4
_MAX_GROWTH = 5.0  # MB, within the noise of the allocator
_SETTLING_MINUTES = 5  # the allocator keeps buffers of new shapes at first
_KEEP_ALIVE = 4.0  # seconds; the service closes a connection that was idle for 5 s
_MAX_OPEN = 800  # connections of the load generator
_LINGER_RESET = struct.pack("ii", 1, 0)


@dataclass
class Counts:
    """Responses by status, requests without a response, wrong answers, and latencies of right answers in seconds."""

    statuses: Counter[int] = field(default_factory=Counter)
    lost: int = 0
    repeated: int = 0
    """Requests that met the closing of their idle connection, which clients send again on a new one."""
    wrong: int = 0
    seconds: list[float] = field(default_factory=list)
    started_at: float = field(default_factory=time.monotonic)

    @property
    def goodput(self) -> float:
        """Right answers per second since the start."""
        return (self.statuses[200] - self.wrong) / (time.monotonic() - self.started_at)

    def percentile(self, share: float) -> float:
        return float(np.percentile(self.seconds, 100 * share)) if self.seconds else float("nan")

    def __str__(self) -> str:
        refused = sum(count for status, count in self.statuses.items() if status in (429, 503))
        other = {status: count for status, count in self.statuses.items() if status not in (200, 429, 503)}
        latency = f"p50 {self.percentile(0.5):.2f} s, p99 {self.percentile(0.99):.2f} s"
        return (
            f"{self.statuses[200]} answered ({latency}), {refused} refused, {self.lost} lost, {self.wrong} wrong"
            f"{f', {self.repeated} repeated' if self.repeated else ''}{f', other: {other}' if other else ''}"
        )


class Service:
    """A `bertsmith serve` process and a client for it."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder = folder
        vectors = bertsmith.load(folder).encode(TEXTS, batch_size=64).numpy()
        self.vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        command = [sys.executable, "-m", "bertsmith", "serve", str(folder), "--port", "0", "--threads", "1", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        url = self.process.stdout.readline().split()[2]
        self.host, self.port = "127.0.0.1", int(url.rpartition(":")[2])

    def memory(self) -> float:
        """Return the resident memory in MB."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.host, self.port)


def request(path: str, body: bytes | None = None, *headers: str) -> bytes:
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", "Host: localhost", *headers]
    lines += [] if body is None else ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + (body or b"")


async def read_response(reader: asyncio.StreamReader) -> tuple[int, bytes, bool]:
    """Return status, body, and whether the connection stays open."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
    body = await reader.readexactly(int(fields.get("content-length", "0")))
    return int(head.split()[1]), body, fields.get("connection") != "close"


class Client:
    """One connection that sends requests one after the other and checks the answers."""

    def __init__(self, service: Service, counts: Counts, number: int) -> None:
        self.service, self.counts = service, counts
        self.random = np.random.default_rng(number)
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.answered_at: float | None = None  # on this connection

    async def ask(self) -> None:
        chosen = self.random.integers(0, len(TEXTS), 4)
        body = json.dumps({"inputs": [TEXTS[index] for index in chosen]}).encode()
        started_at = time.monotonic()
        if self.streams is not None and self.streams[0].at_eof():  # closed after some seconds without a request
            self.close()
        try:
            self.streams = self.streams or await self.service.connect()
            self.streams[1].write(request("/embed", body))
            status, answer, stays_open = await asyncio.wait_for(read_response(self.streams[0]), 90)
        except (OSError, EOFError, TimeoutError) as error:
            is_expired = self.answered_at is not None and started_at - self.answered_at > _KEEP_ALIVE
            self.close()
            if is_expired and not isinstance(error, TimeoutError):
                self.counts.repeated += 1
                await self.ask()
            else:
                self.counts.lost += 1
            return
        self.answered_at = time.monotonic()
        self.counts.statuses[status] += 1
        if status == 200:
            difference = np.abs(np.array(json.loads(answer)) - self.service.vectors[chosen]).max()
            self.counts.wrong += bool(difference > _TOLERANCE)
            self.counts.seconds.append(time.monotonic() - started_at)
        if not stays_open:
            self.close()

    def close(self) -> None:
        if self.streams is not None:
            self.streams[1].close()
            self.streams = self.answered_at = None


async def closed_load(service: Service, clients: int, seconds: float) -> Counts:
    """Send requests from a number of clients, each as fast as it gets answers."""
    counts, end = Counts(), time.monotonic() + seconds

    async def loop(number: int) -> None:
        client = Client(service, counts, number)
        while time.monotonic() < end:
            await client.ask()
        client.close()

    await asyncio.gather(*(loop(number) for number in range(clients)))
    return counts


async def open_load(service: Service, per_second: float, seconds: float) -> Counts:
    """Send requests at a rate, whether or not they are answered."""
    counts, idle = Counts(), [Client(service, Counts(), number) for number in range(_MAX_OPEN)]
    for client in idle:
        client.counts = counts
    tasks: set[asyncio.Task[None]] = set()

    async def ask(client: Client) -> None:
        await client.ask()
        idle.append(client)

    started_at, sent = time.monotonic(), 0
    while (passed := time.monotonic() - started_at) < seconds:
        while sent < passed * per_second and idle:
            tasks.add(asyncio.create_task(ask(idle.pop())))
            sent += 1
        tasks = {task for task in tasks if not task.done()}
        await asyncio.sleep(0.01)
    await asyncio.gather(*tasks)
    for client in idle:
        client.close()
    return counts


@asynccontextmanager
async def beside(make: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Run something hostile beside the body of a with statement."""
    task = asyncio.ensure_future(make())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def slow_clients(service: Service, count: int = 300) -> None:
    """Keep connections that send a byte of a head or of a body now and then."""

    async def drip(number: int) -> None:
        text = request("/embed", b'{"inputs": "a"}' + b" " * 2000)
        while True:
            try:
                _, writer = await service.connect()
                for start in range(0, len(text), 1 if number % 2 else 200):
                    writer.write(text[start : start + (1 if number % 2 else 200)])
                    await writer.drain()
                    await asyncio.sleep(0.5)
            except OSError:
                await asyncio.sleep(0.1)

    await asyncio.gather(*(drip(number) for number in range(count)))


async def resets(service: Service) -> None:
    """Open connections, send a part of a request, and reset them."""
    text = request("/embed", json.dumps({"inputs": TEXTS}).encode())
    random = np.random.default_rng(0)
    while True:
        for _ in range(20):
            line = socket.create_connection((service.host, service.port))
            line.sendall(text[: int(random.integers(1, len(text)))])
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
            line.close()
        await asyncio.sleep(0.1)


async def hostile_bodies(service: Service, path: str, body: bytes, clients: int = 3) -> None:
    """Send large bodies one after the other."""

    async def send() -> None:
        while True:
            reader, writer = await service.connect()
            writer.write(request(path, body))
            await read_response(reader)
            writer.close()

    await asyncio.gather(*(send() for _ in range(clients)))


async def idle_connections(service: Service, count: int) -> str:
    """Open connections that send nothing; return the slowest of ten /health requests meanwhile."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    lines = [await service.connect() for _ in range(count)]
    slowest = 0.0
    for _ in range(10):
        started_at = time.monotonic()
        reader, writer = await service.connect()
        writer.write(request("/health"))
        status, _, _ = await read_response(reader)
        assert status == 200
        slowest = max(slowest, time.monotonic() - started_at)
        writer.close()
    still_open = sum(not reader.at_eof() for reader, _ in lines)
    for _, writer in lines:
        writer.close()
    return f"/health within {slowest:.2f} s; {still_open} still open"


@dataclass
class Memory:
    """Resident memory of a service while a load runs."""

    service: Service
    samples: list[tuple[float, float]] = field(default_factory=list)

    async def sample(self, every: float) -> None:
        while True:
            self.samples.append((time.monotonic() / 60, self.service.memory()))
            await asyncio.sleep(every)

    @property
    def slope(self) -> float:
        """MB per minute in the second half."""
        times, memory = np.array(self.samples[len(self.samples) // 2 :]).T
        return float(np.polyfit(times, memory, 1)[0])

    @property
    def minutes(self) -> float:
        return self.samples[-1][0] - self.samples[0][0]

    @property
    def growth(self) -> float:
        """MB that the slope adds in the second half."""
        half = self.samples[len(self.samples) // 2 :]
        return self.slope * (half[-1][0] - half[0][0])

    def __str__(self) -> str:
        return f"memory {self.samples[-1][1]:.0f} MB, {self.slope:+.2f} MB/min"


async def with_memory(service: Service, load: Awaitable[Counts], seconds: float) -> tuple[Counts, Memory]:
    """Run a load; return its counts and the memory meanwhile."""
    memory = Memory(service)
    async with beside(lambda: memory.sample(seconds / 120)):
        counts = await load
    return counts, memory


async def signal_under_load(folder: Path, number: signal.Signals) -> tuple[Counts, int]:
    """Send a signal under load; return the counts up to the end of the process, and its exit code."""
    service, counts = Service(folder), Counts()

    async def loop(client: Client) -> None:
        while True:
            try:
                client.streams = client.streams or await service.connect()
            except OSError:
                return  # the service accepts no connections any more
            await client.ask()

    tasks = [asyncio.ensure_future(loop(Client(service, counts, index))) for index in range(8)]
    await asyncio.sleep(2)
    service.process.send_signal(number)
    code = await asyncio.to_thread(service.process.wait, 60)
    await asyncio.gather(*tasks)
    return counts, code


@dataclass
class Trial:
    """The parts of the trial, and the faults that they found."""

    options: argparse.Namespace
    home: Path
    faults: list[str] = field(default_factory=list)

    def report(self, name: str, counts: Counts, extra: str = "") -> None:
        print(f"| {name} | {counts}{extra} |", flush=True)
        if counts.wrong or counts.lost or not counts.statuses[200]:
            self.faults.append(f"{name}: {counts}")

    def report_memory(self, name: str, counts: Counts, memory: Memory, extra: str = "") -> None:
        self.report(name, counts, f", {memory}{extra}")
        if memory.minutes > _SETTLING_MINUTES and memory.growth > _MAX_GROWTH:
            self.faults.append(f"{name}: memory grew by {memory.growth:.1f} MB in the second half")

    async def run(self) -> None:
        parts = {"loads": self.loads, "hostile": self.hostile, "idle": self.idle, "soak": self.soak}
        for name in self.options.only or [*parts, "signals"]:
            if name == "signals":
                await self.signals()
                continue
            folder = shutil.copytree(model_folder("small"), self.home / name)
            service = Service(folder, "--max-requests", "128")
            try:
                await parts[name](service)
            finally:
                code = service.stop()
                if code != 0:
                    self.faults.append(f"{name}: exit code {code}")

    async def loads(self, service: Service) -> None:
        """Measure the capacity, then send more than it."""
        seconds = self.options.seconds
        steady = await closed_load(service, 16, seconds)
        rate = steady.goodput
        self.report("16 clients", steady, f", {rate:.1f} answers/s")
        for times, duration in ((3, seconds), (10, self.options.overload or seconds)):
            counts, memory = await with_memory(service, open_load(service, times * rate, duration), duration)
            self.report_memory(
                f"{times} × overload, {duration:.0f} s", counts, memory, f", {counts.goodput:.1f} answers/s"
            )

    async def hostile(self, service: Service) -> None:
        """Ask for right answers beside hostile clients."""
        beside_what = {
            **{
                name: lambda path=path, body=body: hostile_bodies(service, path, body)
                for name, (path, body) in HOSTILE.items()
            },
            "300 slow clients": lambda: slow_clients(service),
            "connection resets": lambda: resets(service),
        }
        for name, attack in beside_what.items():
            async with beside(attack):
                self.report(f"beside {name}", await closed_load(service, 4, self.options.seconds / 2))

    async def idle(self, service: Service) -> None:
        """Open many connections that send nothing."""
        print(
            f"| {self.options.idle} idle connections | {await idle_connections(service, self.options.idle)} |",
            flush=True,
        )

    async def soak(self, service: Service) -> None:
        """Send a steady load after the folder of the model is gone."""
        shutil.rmtree(service.folder)
        seconds = self.options.soak or 2 * self.options.seconds
        counts, memory = await with_memory(service, open_load(service, self.options.soak_rate, seconds), seconds)
        self.report_memory(f"soak of {seconds / 60:.0f} min, model folder deleted", counts, memory)

    async def signals(self) -> None:
        """Send signals under load."""
        for number in (signal.SIGTERM, signal.SIGHUP):
            for _ in range(self.options.signals):
                counts, code = await signal_under_load(model_folder("small"), number)
                self.report(f"{number.name} under load", counts, f", exit code {code}")
                if code != 0 or set(counts.statuses) != {200}:
                    self.faults.append(f"{number.name}: exit code {code}, {counts}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", nargs="*", choices=["loads", "hostile", "idle", "soak", "signals"], help="parts to run"
    )
    parser.add_argument("--seconds", type=float, default=20, help="duration of each load")
    parser.add_argument("--overload", type=float, help="duration of the load of ten times the capacity, in seconds")
    parser.add_argument("--soak", type=float, help="duration of the soak in seconds; twice --seconds by default")
    parser.add_argument("--soak-rate", type=float, default=10, help="requests per second of the soak")
    parser.add_argument("--signals", type=int, default=5, help="shutdowns by each signal")
    parser.add_argument("--idle", type=int, default=10_000, help="idle connections")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-") as home:
        trial = Trial(options, Path(home))
        asyncio.run(trial.run())
    for fault in trial.faults:
        print(f"FAULT {fault}")
    sys.exit(bool(trial.faults))


if __name__ == "__main__":
    main()

"""Load test of the service: batching against one request at a time, and behaviour under overload.

    python benchmarks/serving.py                    # the scheduler in this process
    python benchmarks/serving.py --http             # the whole service over loopback, in a process of its own
    python benchmarks/serving.py --http --size base --rounds 5
    python benchmarks/serving.py --device cuda      # one table: precisions, CUDA graphs, several loads; a minute

Texts have a long-tailed mix of 4 to 256 tokens. (1) One client sends one request at a time, to a scheduler with one
thread per product and to one that uses all cores; then many clients send requests concurrently. (2) Requests arrive at
five times the rate of the batched service, first with the whole model alone, then with an elastic size schedule. Every
answer is compared with the output of the model for the same text alone, in the size that answered.

On a GPU a request has `--request-texts` texts. Closed loops of 1 to 256 clients compare eager computation, CUDA graphs
with one batch in flight, and with two; open loops at shares of the highest throughput compare the whole model with the
elastic size schedule. With --turn, each series of loads is in a turn of this process, and the graphs are captured
before it (benchmarks/turns.py).
"""

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from bertsmith.serving.model import ServedModel
from bertsmith.serving.requests import TokenSequence
from bertsmith.serving.scheduler import Scheduler
from bertsmith.serving.settings import SchedulerLimits, cores
from bertsmith.shrinking.fit.measure import fingerprint
from serving_load import HttpTarget, Known, Load, LoadGenerator, SchedulerTarget, Target, softmax
from serving_model import SIZES, make_texts, write_folder
from turns import Turn, add_options

BFLOAT16_TOLERANCE = 0.1  # relative, of probabilities, besides a tenth of it absolute
CLIENTS = (1, 8, 64, 256)
SHARES = (0.3, 0.7, 1.5, 4.0)  # of the highest throughput
FLOOR = 0.9  # share of the whole model's score; all sizes of the test model keep it
TIMEOUT = 10.0  # seconds


class Bench:
    """A folder, its texts, and the outputs of its model for each text alone in every size."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        write_folder(folder, options.size)
        self.texts = make_texts(options.texts, options.median)
        # opened once each, because freed memory is not returned to the system immediately
        self.opened = {floor: ServedModel.open(folder, device=options.device, floor=floor) for floor in (None, FLOOR)}
        self.tolerance = BFLOAT16_TOLERANCE if self.opened[None].is_half else 1e-3
        served = self.opened[FLOOR]
        made = served.tokenizer.encode(self.texts, None, served.encoding.length, padding=False)
        self.sequences = [TokenSequence(*own) for own in zip(made["input_ids"], made["token_type_ids"], strict=True)]
        self.known: Known = {}
        for entry in served.schedule.sizes:
            size = (1.0, 1.0) if entry.subnet is None else (entry.subnet.width, entry.subnet.depth)
            alone = [softmax(served.run("task", [own], entry.subnet)[0]) for own in self.sequences]
            self.known[size] = np.stack(alone)
        self.speeds = {size: entry.speed for size, entry in zip(self.known, served.schedule.sizes, strict=True)}

    @asynccontextmanager
    async def serving(
        self,
        *,
        floor: float | None = None,
        waiting: int = 10**6,
        threads: int = 1,
        workers: int | None = None,
        has_graphs: bool = True,
    ) -> AsyncIterator[tuple[LoadGenerator, int]]:
        """The running service and its process, with one worker per core, or two on a GPU."""
        workers = workers or (max(1, cores() // threads) if self.options.device == "cpu" else 2)
        if self.options.http:
            async with _service(self, floor, waiting, threads, workers) as (target, process):
                yield self._generator(target), process
            return
        torch.set_num_threads(threads)
        limits = SchedulerLimits(
            batch_tokens=self.options.batch_tokens, waiting_tokens=waiting, waiting_sequences=10**5, workers=workers
        )
        scheduler = Scheduler(self.opened[floor], limits)
        scheduler.start()
        if not has_graphs:
            scheduler.captured = None
        try:
            yield self._generator(SchedulerTarget(scheduler, self.sequences, TIMEOUT)), os.getpid()
        finally:
            scheduler.close()

    def _generator(self, target: Target) -> LoadGenerator:
        return LoadGenerator(
            target, len(self.texts), self.known, size=self.options.request_texts, tolerance=self.tolerance
        )


@asynccontextmanager
async def _service(
    bench: Bench, floor: float | None, waiting: int, threads: int, workers: int
) -> AsyncIterator[tuple[Target, int]]:
    """`bertsmith serve` on a free port."""
    given = ["--port", "0", "--threads", str(threads), "--workers", str(workers)]
    given += ["--device", bench.options.device]
    given += ["--queue-tokens", str(waiting), "--queue-sequences", "100000", "--max-requests", "100000"]
    given += ["--batch-tokens", str(bench.options.batch_tokens), "--timeout", str(TIMEOUT)]
    given += [] if floor is None else ["--floor", str(floor)]
    command = [sys.executable, "-m", "bertsmith", "serve", str(bench.folder), *given]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            host, port = await asyncio.to_thread(_address, process)
            target = HttpTarget(host, port, bench.texts, ("a", "b", "c"))
            yield target, process.pid
            await target.close()
        finally:
            process.terminate()


def _address(process: "subprocess.Popen[str]") -> tuple[str, int]:
    """Return the address that the service prints."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        found = re.search(r"http://([\d.]+):(\d+)", line)
        if found:
            return found[1], int(found[2])
    raise SystemExit("the service did not start:\n" + "".join(lines))


def main() -> None:
    options = _options()
    print(json.dumps({**fingerprint(), "size": options.size, "over": "http" if options.http else "scheduler"}))
    with TemporaryDirectory() as folder:
        bench = Bench(options, Path(folder) / "model")
        lengths = [len(own.tokens) for own in bench.sequences]
        print(
            f"{len(lengths)} texts, {min(lengths)} to {max(lengths)} tokens, median {statistics.median(lengths):g}, "
            f"mean {statistics.mean(lengths):.1f}; load average {os.getloadavg()[0]:.1f}"
        )
        metrics = asyncio.run(_run(bench) if options.device == "cpu" else _run_on_gpu(bench))
    if options.metrics:
        Path(options.metrics).write_text(json.dumps(metrics, indent=2), encoding="utf-8")


async def _run_on_gpu(bench: Bench) -> dict[str, Any]:
    """Print one table of throughput and latency at several loads."""
    options, per_request, turn = bench.options, bench.options.request_texts, Turn.of(bench.options)
    ways: dict[str, dict[str, Any]] = {"graphs, one in flight": {"workers": 1}, "graphs": {}}
    if not options.http:  # the service has no flag against graphs
        ways = {"eager": {"has_graphs": False}, **ways}
    print(f"\n{torch.cuda.get_device_name()}, {bench.opened[None].precision}, {per_request} texts per request")
    print("| | load | texts/s | p50 ms | p99 ms | refused | sizes in use | wrong |\n|---|---|---|---|---|---|---|---|")
    rows: list[dict[str, Any]] = []

    def add(way: str, name: str, load: Load) -> None:
        row = {"way": way, "load": name, "texts_per_second": per_request * load.per_second, "wrong": load.wrong}
        row |= {"p50": load.percentile(50), "p99": load.percentile(99), "refused": load.ends["refused"]}
        rows.append(row)
        print(
            f"| {way} | {name} | {row['texts_per_second']:,.0f} | {row['p50']:.2f} | {row['p99']:.2f} | "
            f"{row['refused']} | {len(load.sizes)} | {load.wrong} |",
            flush=True,
        )

    for way, settings in ways.items():
        async with bench.serving(**settings) as (generator, _):
            await generator.closed(64, 0.1)
            with turn:
                await generator.closed(64, 0.3)
                for clients in options.clients:
                    add(way, f"{clients} clients", await generator.closed(clients, options.seconds))
    highest = max(row["texts_per_second"] for row in rows) / per_request
    mean = per_request * statistics.mean(len(own.tokens) for own in bench.sequences)
    waiting = max(100_000, int(highest * mean * options.queue_seconds))
    for way, floor in (("whole", None), ("elastic", FLOOR)):
        async with bench.serving(floor=floor, waiting=waiting) as (generator, _):
            await generator.closed(64, 0.1)
            with turn:
                await generator.closed(64, 0.3)
                for share in options.shares:
                    load = await generator.at_rate(share * highest, options.seconds)
                    add(way, f"{100 * share:.0f} % of {highest:,.0f} requests/s", load)
    return {"rows": rows}


async def _run(bench: Bench) -> dict[str, Any]:
    options, all_cores = bench.options, cores()
    ways = {
        "one at a time": (1, 1),
        f"one at a time, {all_cores} threads": (1, all_cores),
        "batched": (max(options.clients), 1),
    }
    rounds: dict[str, list[Load]] = {way: [] for way in ways}
    for _ in range(options.rounds):
        for way, (clients, threads) in ways.items():
            async with bench.serving(threads=threads) as (generator, process):
                await generator.closed(clients, 0.3)
                before = _computed(process)
                rounds[way].append(await generator.closed(clients, options.seconds))
                rounds[way][-1].computed = _computed(process) - before
    print(f"\n{'':28} {'answers/s':>10} {'p50 ms':>8} {'p99 ms':>8} {'CPU ms':>8} {'wrong':>6}")
    rates = {}
    for way, loads in rounds.items():
        rates[way] = statistics.median(load.per_second for load in loads)
        middle = sorted(loads, key=lambda load: load.per_second)[len(loads) // 2]
        wrong = sum(load.wrong for load in loads)
        computed = 1e3 * statistics.median(load.computed / load.ends["answered"] for load in loads)
        print(
            f"{way:28} {rates[way]:10.1f} {middle.percentile(50):8.1f} {middle.percentile(99):8.1f} "
            f"{computed:8.1f} {wrong:6}"
        )
    batched = rates.pop("batched")
    for way, rate in rates.items():
        print(f"batched is {batched / rate:.2f}x {way}")
    metrics: dict[str, Any] = {"closed": {**rates, "batched": batched}}
    metrics["overload"] = await _overloaded(bench, batched)
    return metrics


async def _overloaded(bench: Bench, capacity: float) -> dict[str, Any]:
    """Send requests at five times the capacity, with a fixed size and with the size schedule."""
    options = bench.options
    mean = statistics.mean(len(own.tokens) for own in bench.sequences)
    waiting = max(1000, int(capacity * mean * options.queue_seconds))
    rate = options.overload * capacity
    print(f"\noverload: {rate:.0f} requests/s for {options.open_seconds:g} s, room for {waiting} tokens")
    print(
        f"{'':10} {'sent':>6} {'answered':>9} {'refused':>8} {'late':>5} {'other':>6} {'wrong':>6} "
        f"{'p50 ms':>8} {'p99 ms':>8} {'RSS MB':>16}"
    )
    found: dict[str, Any] = {}
    for name, floor in (("whole", None), ("elastic", FLOOR)):
        async with bench.serving(floor=floor, waiting=waiting) as (generator, process):
            await generator.closed(max(options.clients), 0.5)
            before = _resident(process)
            load = await generator.at_rate(rate, options.open_seconds)
            after = _resident(process)
        ends, sent = load.ends, sum(load.ends.values())
        other = sent - ends["answered"] - ends["refused"] - ends["late"]
        print(
            f"{name:10} {sent:6} {ends['answered']:9} {ends['refused']:8} {ends['late']:5} {other:6} {load.wrong:6} "
            f"{load.percentile(50):8.0f} {load.percentile(99):8.0f} {f'{before:.0f} -> {after:.0f}':>16}"
        )
        found[name] = {**ends, "wrong": load.wrong, "seconds": load.seconds, "rss_mb": [before, after]}
        for size, count in load.sizes.most_common():
            print(f"{'':10} {count:6} by width {size[0]:g} depth {size[1]:g} ({bench.speeds[size]:.1f}x alone)")
    ratio = found["elastic"]["answered"] / found["whole"]["answered"]
    print(f"with the size schedule {ratio:.2f}x as many are answered")
    return {**found, "ratio": ratio}


def _resident(process: int) -> float:
    """Return the resident memory of a process in MB."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def _computed(process: int) -> float:
    """Return the CPU time of a process on all cores in seconds, which other load affects little."""
    parts = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--http", action="store_true", help="over loopback instead of in this process")
    parser.add_argument("--size", choices=list(SIZES), default="minilm")
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--median", type=float, default=20, help="median length of the texts in tokens")
    parser.add_argument("--clients", type=int, nargs="+", help="32 on a CPU, 1 8 64 256 on a GPU by default")
    parser.add_argument(
        "--shares", type=float, nargs="+", default=SHARES, help="of the highest throughput, of the open loops on a GPU"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--request-texts", type=int, help="texts of a request; 1 on a CPU, 8 on a GPU by default")
    parser.add_argument("--batch-tokens", type=int, help="1024 on a CPU, 16384 on a GPU by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each closed loop")
    parser.add_argument("--overload", type=float, default=5.0)
    parser.add_argument("--open-seconds", type=float, default=6.0)
    parser.add_argument("--queue-seconds", type=float, default=1.0, help="of work that may wait")
    parser.add_argument("--metrics", help="write all metrics to this JSON file")
    add_options(parser)
    options = parser.parse_args()
    is_cpu = options.device == "cpu"
    options.clients = options.clients or ((32,) if is_cpu else CLIENTS)
    options.request_texts = options.request_texts or (1 if is_cpu else 8)
    options.batch_tokens = options.batch_tokens or (1024 if is_cpu else 16_384)
    return options


if __name__ == "__main__":
    main()

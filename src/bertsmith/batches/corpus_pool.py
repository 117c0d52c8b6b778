"""Worker processes that turn blocks into shards, fed no faster than they work.

Each worker is a fresh interpreter that imports nothing but what tokenising needs, whatever the calling program has
loaded; multiprocessing would import the caller's main module, and torch with it, into every one.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import Any, NamedTuple, Self

from bertsmith.batches.corpus_worker import Block, Job, Worker, receive, send

_START = "import sys; sys.path[:] = {path!r}; from bertsmith.batches.corpus_worker import serve; serve()"


class Result(NamedTuple):
    """What became of one block."""

    block: int
    text_bytes: int
    documents: int
    records: dict[str, Any]


class WorkerPool:
    """A number of workers; with one, blocks are built in this process."""

    def __init__(self, job: Job, workers: int) -> None:
        self.local = Worker(job) if workers == 1 else None
        self.workers = 0 if self.local else workers
        self.processes: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        self.all: list[subprocess.Popen[bytes]] = []
        self.memory: dict[int, float] = {}
        self.job = job

    def __enter__(self) -> Self:
        command = [sys.executable, "-c", _START.format(path=[path or os.getcwd() for path in sys.path])]
        # the workers are the parallel part; threads of the tokenizer library inside each would fight for the cores
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1"}
        for _ in range(self.workers):
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            self.all.append(process)
            self.processes.put(process)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        for process in self.all:
            if kind:
                process.kill()
            assert process.stdin
            assert process.stdout
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.wait()
            process.stdout.close()

    @property
    def peak_memory_mb(self) -> float:
        """The peaks of all worker processes together; the calling process is not among them."""
        return sum(self.memory.values())

    def results(self, blocks: Iterator[Block]) -> Iterator[Result]:
        """The result of every block, in the order they finish."""
        if self.local:
            for block in blocks:
                yield Result(block.number, len(block.text), len(block.ends), self.local.build(block))
            return
        # a thread per worker waits for its answer; one block more than workers is read ahead
        threads = ThreadPoolExecutor(self.workers)
        running: set[Future[Result]] = set()
        try:
            for block in blocks:
                running.add(threads.submit(self._build, block))
                if len(running) > self.workers:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    yield from (future.result() for future in done)
            for future in running:
                yield future.result()
        except BaseException:
            # threads that wait for an answer are freed by the end of the processes
            for process in self.all:
                process.kill()
            raise
        finally:
            threads.shutdown(cancel_futures=True)

    def _build(self, block: Block) -> Result:
        process = self.processes.get()
        assert process.stdin
        assert process.stdout
        try:
            if process.pid not in self.memory:
                self.memory[process.pid] = 0.0
                send(process.stdin, self.job)
            send(process.stdin, block)
            records, self.memory[process.pid] = receive(process.stdout)
        except (EOFError, BrokenPipeError):
            raise RuntimeError(
                f"a tokenising process ended with status {process.wait()} in the middle of its work; "
                "run the same command again to continue, with fewer workers if memory ran out"
            ) from None
        finally:
            # a dead one too: a thread that waits for a process must get one to fail with
            self.processes.put(process)
        if isinstance(records, str):
            raise RuntimeError(f"block {block.number} could not be tokenised: {records}")
        return Result(block.number, len(block.text), len(block.ends), records)

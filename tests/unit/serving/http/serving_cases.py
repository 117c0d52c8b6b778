"""Folders of tiny models, and a service of them on loopback."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from task_cases import TASK_CASES, TaskCase

import bertsmith
from bertsmith.data.examples import ExampleConfig
from bertsmith.models.attach_heads import with_task_head
from bertsmith.models.build import build
from bertsmith.models.published import preset
from bertsmith.serving.http.app import make_app
from bertsmith.serving.model import ServedModel
from bertsmith.serving.requests import Operation, RequestResult, SchedulerStats, TokenSequence
from bertsmith.serving.scheduler import Scheduler
from bertsmith.serving.server import Server, base_url, bind_socket
from bertsmith.serving.settings import SchedulerLimits, ServeSettings
from bertsmith.settings import Record
from bertsmith.shrinking.elastic_metadata import ElasticMetadata, SubnetworkMetadata, write_elastic_metadata
from bertsmith.tasks import AnyTask
from bertsmith.tasks.data_source import recognise
from bertsmith.tasks.predictor import TaskRecord, write_task_record
from bertsmith.text.learn import learn_tokenizer
from bertsmith.text.rows import table_of
from bertsmith.text.tokenizer import Tokenizer

TEXTS = ["the smith forges an iron gate", "no", "a broken clock, by the river", "seven old lanterns near the harbour"]
LENGTH = 48
_PAIRS = TASK_CASES["classification of pairs"]
RELEVANCE = replace(_PAIRS, rows=[{**row, "label": index % 2} for index, row in enumerate(_PAIRS.rows)])
"""Pairs with two labels, for reranking."""


class _TaskSettings(Record):
    task: AnyTask


def tokenizer() -> Tokenizer:
    texts = [*TEXTS, "Anna forges gates in New Rome , Bert Smith forgets Oslo . which? what? again"] * 2
    return learn_tokenizer(texts, "wordpiece", 300, progress=False)


def write_encoder(folder: Path, *, length: int = LENGTH, seed: int = 0) -> Path:
    """Write a pre-trained model: it embeds and fills masks."""
    bertsmith.save(_encoder(length, seed), folder)
    return folder


def write_task(folder: Path, case: str | TaskCase, *, seed: int = 0, elastic: bool = False) -> Path:
    """Write a model with the head of a task."""
    sample = TASK_CASES[case] if isinstance(case, str) else case
    table = table_of(sample.rows, "rows")
    plain = recognise(table, None if sample.is_recognised else sample.kind, [], sample.task)
    task = _TaskSettings.parse({"task": plain}).task.resolve(table)
    encoder = _encoder(LENGTH, seed)
    model = with_task_head(encoder, task.head(encoder.config), seed=seed)
    model.tokenizer = encoder.tokenizer
    bertsmith.save(model, folder)
    write_task_record(TaskRecord(task=task, sequences=ExampleConfig(length=LENGTH)), folder)
    if elastic:
        sizes = ((1.0, 90.0, 8.0), (0.5, 89.0, 2.0))
        grid = tuple(
            SubnetworkMetadata(width=width, depth=1.0, score=score, parameters=1, flops=1.0, latency_ms=milliseconds)
            for width, score, milliseconds in sizes
        )
        write_elastic_metadata(
            ElasticMetadata(
                metric="accuracy",
                teacher_score=90.0,
                depth_rule="keep_last",
                length=16,
                grid=grid,
                head_scores=((1.0, 1.0),) * 2,
                head_order=((0, 1),) * 2,
                neuron_order=(tuple(range(64)),) * 2,
            ),
            folder,
        )
    return folder


def _encoder(length: int, seed: int) -> bertsmith.Model:
    learned = tokenizer()
    config = preset(
        "bert-tiny", layers=2, width=16, heads=2, dropout=0.0, init_std=0.3, vocabulary=learned.size, max_length=length
    )
    model = build(config, seed=seed).eval()
    model.tokenizer = learned
    return model


@contextmanager
def schedulers(
    folders: Mapping[str, Path], limits: SchedulerLimits | None = None, floor: float | None = None
) -> Iterator[dict[str, Scheduler]]:
    """Open the models of some folders and yield their schedulers, started."""
    opened = {name: ServedModel.open(path, name=name, device="cpu", floor=floor) for name, path in folders.items()}
    running = {name: Scheduler(served, limits or SchedulerLimits()) for name, served in opened.items()}
    for scheduler in running.values():
        scheduler.start()
    try:
        yield running
    finally:
        for scheduler in running.values():
            scheduler.close()


@contextmanager
def serving(models: Mapping[str, Scheduler], settings: ServeSettings | None = None) -> Iterator[str]:
    """Run a service in a thread and yield its URL."""
    settings = settings or ServeSettings()
    listener = bind_socket("127.0.0.1", 0)
    is_ready = threading.Event()
    server = Server(make_app(models, settings), settings, is_ready.set)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        assert is_ready.wait(20)
        yield base_url(listener)
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()
        assert not thread.is_alive()


class FakeScheduler:
    """A scheduler whose results the test sets: exceptions, awaitables or results."""

    captured = None

    def __init__(self, served: ServedModel, does: Any = None) -> None:
        self.served, self.does = served, does
        self.waits = 0.0

    async def submit(
        self,
        operation: Operation,
        sequences: Sequence[TokenSequence],
        *,
        timeout: float | None = None,
        subnet: Any = None,
    ) -> RequestResult:
        result = self.does(operation, sequences, timeout)
        if isinstance(result, Exception):
            raise result
        return await result if hasattr(result, "__await__") else result

    def check_room(self) -> None:
        return None

    def expected_wait(self) -> float:
        return self.waits

    def stats(self) -> SchedulerStats:
        return SchedulerStats(0, 0, 0, 0.0, 0.0, None, None, None, 0, 0, 0)

    async def drain(self) -> None:
        return


def until(condition: Any, seconds: float = 10) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)

"""Folders of tiny models, random sequences, and a model whose batches the test controls."""

import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

import bertsmith
from bertsmith.layers.subnet import Subnet
from bertsmith.models.attach_heads import with_task_head
from bertsmith.serving.model import ServedModel
from bertsmith.serving.requests import Operation, TokenSequence
from bertsmith.shrinking.elastic_metadata import ElasticMetadata, SubnetworkMetadata, write_elastic_metadata
from bertsmith.tasks.predictor import TaskRecord, write_task_record
from bertsmith.text.learn import learn_tokenizer
from bertsmith.text.tokenizer import Tokenizer

WORDS = ["good", "bad", "fine", "awful", "words", "day"]
TASKS = {
    "classification": {"kind": "classification", "text": "text", "label": "label", "labels": ["a", "b", "c"]},
    "tagging": {"kind": "tagging", "labels": ["A", "O"], "tags": "tags"},
    "embedding": {"kind": "embedding"},
}
LENGTH = 24
GRID = ((1.0, 1.0, 90.0, 8.0), (0.5, 1.0, 89.0, 5.0), (1.0, 0.5, 85.0, 6.0), (0.5, 0.5, 86.0, 3.0))
"""Width, depth, score and latency of sub-networks; the third is dominated by the last."""


def record_of(grid: Sequence[tuple[float, float, float, float]] = GRID) -> ElasticMetadata:
    """Return a record with these scores and latencies."""
    entries = [
        SubnetworkMetadata(width=width, depth=depth, score=score, latency_ms=latency, parameters=1, flops=1.0)
        for width, depth, score, latency in grid
    ]
    return ElasticMetadata(
        metric="accuracy",
        teacher_score=91.0,
        depth_rule="keep_last",
        length=16,
        grid=tuple(entries),
        head_scores=(),
        head_order=(),
        neuron_order=(),
    )


def tiny_folder(folder: Path, task: str | None = None, *, is_elastic: bool = False, preset: str = "bert-tiny") -> Path:
    """Write the folder of a tiny model, pre-trained or with a task head."""
    tokenizer = _tokenizer()
    sizes = {"vocabulary": tokenizer.size, "width": 32, "heads": 4, "layers": 2, "max_length": 32, "init_std": 0.2}
    model = bertsmith.build(bertsmith.preset(preset, **sizes), seed=0).eval()
    model.tokenizer = tokenizer
    task_record = None
    if task is not None:
        task_record = TaskRecord.parse({"task": TASKS[task], "sequences": {"length": LENGTH}})
        model = with_task_head(model, task_record.task.head(model.config), seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    bertsmith.save(model, folder)
    if task_record is not None:
        write_task_record(task_record, folder)
    if is_elastic:
        write_elastic_metadata(record_of(), folder)
    return folder


def sequences(count: int, seed: int = 0, max_length: int = LENGTH) -> list[TokenSequence]:
    """Return random sequences of random lengths, half of them with types."""
    random, size = np.random.default_rng(seed), _tokenizer().size
    generated = []
    for index in range(count):
        tokens = random.integers(0, size, size=int(random.integers(1, max_length + 1)))
        generated.append(TokenSequence(tokens, random.integers(0, 2, size=len(tokens)) if index % 2 else None))
    return generated


def of_length(length: int, token: int = 1) -> TokenSequence:
    return TokenSequence(np.full(length, token, dtype=np.int64))


class BlockingModel(ServedModel):
    """A model that, once blocked, records batches and runs each only after `permits.release()`, or fails.

    The output of a sequence is its tokens.
    """

    def __init__(self, served: ServedModel) -> None:
        super().__init__(**vars(served))
        self.__dict__.update(permits=threading.Semaphore(0), started=threading.Semaphore(0), batches=[], error=None)
        self.__dict__["is_open"] = True

    permits: threading.Semaphore
    started: threading.Semaphore
    batches: list[tuple[Operation, list[int], Subnet | None]]
    error: Exception | None
    is_open: bool

    def block(self, error: Exception | None = None) -> None:
        """Make every batch wait for `permits.release()` and then raise the error, if there is one."""
        self.__dict__.update(is_open=False, error=error)

    def unblock(self) -> None:
        self.__dict__.update(is_open=True, error=None)
        self.permits.release(100)

    def run(
        self, operation: Operation, sequences: list[TokenSequence], subnet: Subnet | None = None
    ) -> list[np.ndarray]:
        if not self.is_open:
            self.batches.append((operation, [len(sequence.tokens) for sequence in sequences], subnet))
            self.started.release()
            self.permits.acquire()
            if self.error is not None:
                raise self.error
        return [sequence.tokens.astype(np.float32) for sequence in sequences]


@lru_cache(maxsize=1)
def _tokenizer() -> Tokenizer:
    return learn_tokenizer([" ".join(WORDS)] * 4, "wordpiece", 80, progress=False)

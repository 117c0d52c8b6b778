"""A fine-tuned model with its task: texts in, answers out; and the file that keeps the task beside the model."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from bertsmith.answers.sequences import Answer, Features
from bertsmith.bundled import model_folder, namesake_hint
from bertsmith.checkpoint.files import read_json, write_json
from bertsmith.data.examples import EvaluationPlan, ExampleConfig, ExampleReader, TaskBatch
from bertsmith.engines.artefact import open_runner
from bertsmith.engines.base import Inputs, Runner
from bertsmith.errors import InputError
from bertsmith.settings import Record
from bertsmith.tasks import AnyTask
from bertsmith.tasks.base import Encoding, Evaluation
from bertsmith.text.rows import Table, table_of

EVALUATION_TOKENS = 8192
"""Tokens of one batch during evaluation and prediction."""
WatchBatch = Callable[[TaskBatch, Tensor], None]
"""Called with each batch and the outputs for it."""


@torch.no_grad()
def item_outputs(
    model: Runner, features: Features, sequences: ExampleConfig, watch: WatchBatch | None = None
) -> list[np.ndarray]:
    """The outputs of every item, as a task's `answers` reads them; `watch` sees each batch and what was said of it."""
    found: list[np.ndarray] = [np.empty(0)] * len(features)
    reader = ExampleReader(features, sequences, model.require_tokenizer().pad)
    with model.evaluating():
        for plan in EvaluationPlan(features, EVALUATION_TOKENS).one_epoch():
            batch = reader[plan].batch
            assert isinstance(batch, TaskBatch)
            batch = batch.to(model.device)
            sizes = torch.from_numpy(_sequences(features, batch.item.cpu().numpy())).to(model.device)
            outputs = model.outputs(batch.tokens, batch.layout, batch.types, sizes=sizes)
            if watch is not None:
                watch(batch, outputs)
            for item, own in zip(plan.sequences.tolist(), _split(model, features, batch, outputs), strict=True):
                found[item] = own
    return found


def _sequences(features: Features, items: np.ndarray) -> np.ndarray:
    """How many sequences each of some items has."""
    counts: np.ndarray = features.items[items + 1] - features.items[items]
    return counts


def _split(model: Runner, features: Features, batch: TaskBatch, outputs: Tensor) -> Sequence[np.ndarray]:
    """The outputs of a batch item by item.

    Shape: (outputs,) each, (sequences, outputs) where an item has several, (tokens, outputs) from a head for tokens.
    """
    values, items = outputs.float().cpu().numpy(), batch.item.cpu().numpy()
    if model.is_for_tokens:
        lengths = batch.layout.lengths().tolist()
        if batch.layout.is_packed:
            return np.split(values, np.cumsum(lengths)[:-1])
        return [row[:length] for row, length in zip(values, lengths, strict=True)]
    parts = np.split(values, np.cumsum(_sequences(features, items))[:-1])
    return [part[0] if len(part) == 1 else part for part in parts]


TASK_FILE = "task.json"

Watch = Callable[[int, int], None]
"""Called with how many items were answered, of how many."""


class TaskRecord(Record):
    """What the folder of a fine-tuned model says of its task."""

    task: AnyTask
    sequences: ExampleConfig = ExampleConfig()


class Predictor:
    """Answers a task's questions with a fine-tuned model."""

    def __init__(self, model: Runner, record: TaskRecord) -> None:
        self.model, self.record, self.task = model, record, record.task
        self.watch: Watch | None = None
        self.encoding = Encoding.of(model, record.sequences.length)

    @classmethod
    def load(cls, folder: str | Path, *, device: str = "cpu") -> Self:
        """The predictor in the folder of a fine-tuned model, or of an artefact made from one."""
        record = read_task_record(folder)
        return cls(open_runner(model_folder(folder), device=device), record)

    @property
    def mean_layers(self) -> float | None:
        """Mean number of layers of the last predictions; None without early exits."""
        return self.model.mean_layers

    def predict(self, inputs: Sequence[Any]) -> list[Any]:
        """The answer for each input: a label, a number, tags, a text … as the task has it.

        An input is a text; a tuple where the task reads several columns; or a mapping with these columns.
        """
        return [details["answer"] for details in self.details(inputs)]

    def details(self, inputs: Sequence[Any]) -> Sequence[Answer]:
        """All there is to say about each input, scores among it."""
        if isinstance(inputs, str):
            raise InputError("predict takes a list of inputs, and was given one string; put it in a list")
        return self.answered(table_of([self.task.row(given) for given in inputs], "inputs"))

    def answered(self, table: Table) -> Sequence[Answer]:
        """The answers to the rows of a table, which need no targets."""
        return self.answers(self.task.examples(table, has_targets=False)) if len(table) else []

    def evaluate(self, table: Table) -> tuple[Evaluation, Sequence[Answer]]:
        """How good the answers to the rows of a table are, and the answers."""
        examples = self.task.examples(table)
        answers = self.answers(examples)
        return self.task.evaluate(examples, answers), answers

    def answers(self, examples: Sequence[Any]) -> Sequence[Answer]:
        """The answers to examples of the task."""
        features = self.task.features(examples, self.encoding)
        done = 0

        def watch(batch: TaskBatch, _: Tensor) -> None:
            nonlocal done
            done += len(batch.item)
            if self.watch is not None:
                self.watch(done, len(features))

        outputs = item_outputs(self.model, features, self.record.sequences, watch)
        return self.task.answers(examples, features, outputs)


def write_task_record(record: TaskRecord, folder: Path) -> None:
    """Puts the task beside a model."""
    write_json(folder / TASK_FILE, record.plain())


def read_task_record(folder: str | Path) -> TaskRecord:
    """The task of the model in a folder."""
    path = model_folder(folder) / TASK_FILE
    if not path.is_file():
        raise InputError(
            f"{str(folder)!r} has no {TASK_FILE}, so its model was not fine-tuned; use bertsmith finetune"
            f"{namesake_hint(folder)}"
        )
    return TaskRecord.parse(read_json(path), source=str(path))


_MICRO_TOKENS = 2048  # of one batch: ranges of activations are stored for each


def sample_inputs(model: Runner, record: TaskRecord, table: Table, *, rows: int = 128) -> list[Inputs]:
    """Some rows of a table, evenly spread over it, as batches of padded rows; they need no targets."""
    count = min(rows, len(table))
    chosen = table.take([index * len(table) // count for index in range(count)])
    examples = record.task.examples(chosen, has_targets=False)
    features = record.task.features(examples, Encoding.of(model, record.sequences.length))
    reader = ExampleReader(features, record.sequences, model.require_tokenizer().pad)
    samples = []
    for plan in EvaluationPlan(features, _MICRO_TOKENS).one_epoch():
        batch = reader[plan].batch
        assert isinstance(batch, TaskBatch)
        tokens, layout = batch.layout.pad(batch.tokens)
        types = None if batch.types is None else batch.layout.pad(batch.types)[0]
        samples.append(Inputs(tokens, layout, types))
    return samples

"""A fine-tuned model with its task: texts in, answers out; and the file that keeps the task beside the model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from bertsmith.answers.sequences import Answer
from bertsmith.bundled import model_folder, namesake_hint
from bertsmith.checkpoint.files import read_json, write_json
from bertsmith.data.examples import EvaluationPlan, ExampleConfig, ExampleReader, TaskBatch
from bertsmith.data.pairs import PairConfig
from bertsmith.engines.artefact import open_runner
from bertsmith.engines.base import Inputs, Runner
from bertsmith.errors import InputError
from bertsmith.settings import Record
from bertsmith.tasks import AnyTask
from bertsmith.tasks.base import Encoding, Evaluation, Watch
from bertsmith.text.rows import Table, table_of

TASK_FILE = "task.json"


class TaskRecord(Record):
    """The task of a fine-tuned model, as its folder stores it."""

    task: AnyTask
    sequences: ExampleConfig | PairConfig = ExampleConfig()


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
        return self.answer_table(table_of([self.task.row(given) for given in inputs], "inputs"))

    def answer_table(self, table: Table) -> Sequence[Answer]:
        """Return the answers to the rows of a table, which need no targets."""
        return self.answers(self.task.examples(table, has_targets=False)) if len(table) else []

    def evaluate(self, table: Table) -> tuple[Evaluation, Sequence[Answer]]:
        """Evaluate the model on the rows of a table; return its answers as well."""
        examples = self.task.examples(table)
        return self.task.evaluate_model(self.model, examples, self.record.sequences, self.watch)

    def answers(self, examples: Sequence[Any]) -> Sequence[Answer]:
        """Return the answers to examples of the task."""
        return self.task.predict(self.model, examples, self.record.sequences, self.watch)


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

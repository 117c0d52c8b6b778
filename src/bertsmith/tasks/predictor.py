"""Prediction with a fine-tuned model, and the task record (task.json) stored with it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from bertsmith.answers.sequences import Answer, length_batches
from bertsmith.bundled import model_folder, namesake_hint
from bertsmith.data.examples import ExampleConfig, ExampleReader
from bertsmith.data.inference import InferencePrecision, inference_autocast, is_half
from bertsmith.data.loader import SpecialTokens
from bertsmith.data.pairs import PairBatch, PairConfig, PairPlan, PairReader, Pairs
from bertsmith.data.progress import Watch
from bertsmith.engines.artefact import open_runner
from bertsmith.engines.base import Inputs, Runner, Sample
from bertsmith.errors import InputError
from bertsmith.files import read_json, write_json
from bertsmith.models.seq2seq import Seq2Seq
from bertsmith.settings import Record
from bertsmith.tasks import AnyTask
from bertsmith.tasks.base import Encoding, Evaluation
from bertsmith.tasks.hf_task import hf_task_record
from bertsmith.tasks.translation import Translation, pair_config, require_decoder
from bertsmith.text.rows import Table, table_of

TASK_FILE = "task.json"


class TaskRecord(Record):
    """Task and sequence settings of a fine-tuned model, as stored in its folder."""

    task: AnyTask
    sequences: ExampleConfig | PairConfig = ExampleConfig()


class Predictor:
    """A fine-tuned model with its task: texts in, answers out."""

    def __init__(self, model: Runner, record: TaskRecord, *, precision: InferencePrecision = "auto") -> None:
        self.model, self.record, self.task = model, record, record.task
        self.precision: InferencePrecision = precision
        is_half(model.device, precision)  # raises InputError for an unknown precision
        self.watch: Watch | None = None
        self.encoding = Encoding.of(model, record.sequences.length)

    @classmethod
    def load(cls, folder: str | Path, *, device: str = "cpu", precision: InferencePrecision = "auto") -> Self:
        """Load a fine-tuned model, or an artefact exported from one.

        `precision` sets the precision of matrix products: "auto" is bfloat16 on a GPU and float32 on a CPU.
        """
        record = read_task_record(folder)
        return cls(open_runner(model_folder(folder), device=device), record, precision=precision)

    @property
    def mean_layers(self) -> float | None:
        """Mean number of layers of the last predictions; None without early exits."""
        return self.model.mean_layers

    def predict(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the answer to each input: a label, a number, tags or a text, depending on the task.

        An input is a text, a tuple if the task reads several columns, or a mapping by column.
        """
        return [details["answer"] for details in self.details(inputs)]

    def details(self, inputs: Sequence[Any]) -> Sequence[Answer]:
        """Return the full answers, with scores."""
        if isinstance(inputs, str):
            raise InputError("predict takes a list of inputs, not a string; put it in a list")
        return self.answer_table(table_of([self.task.row(value) for value in inputs], "inputs"))

    def answer_table(self, table: Table) -> Sequence[Answer]:
        """Return the answers to the rows of a table, which need no targets."""
        return self.answers(self.task.examples(table, has_targets=False)) if len(table) else []

    def evaluate(self, table: Table) -> tuple[Evaluation, Sequence[Answer]]:
        """Evaluate the model on the rows of a table; return its answers as well."""
        return self.evaluate_examples(self.task.examples(table))

    def evaluate_examples(self, examples: Sequence[Any]) -> tuple[Evaluation, Sequence[Answer]]:
        """Evaluate the model on examples of the task; return its answers as well."""
        with inference_autocast(self.model.device, self.precision):
            return self.task.evaluate_model(self.model, examples, self.record.sequences, self.watch)

    def answers(self, examples: Sequence[Any]) -> Sequence[Answer]:
        """Return the answers to examples of the task."""
        with inference_autocast(self.model.device, self.precision):
            return self.task.predict(self.model, examples, self.record.sequences, self.watch)


def write_task_record(record: TaskRecord, folder: Path) -> None:
    """Write task.json to the folder of a model."""
    write_json(folder / TASK_FILE, record.plain())


def has_task_record(folder: Path) -> bool:
    """Whether a model is fine-tuned: its folder has task.json, or is Hugging Face's with the class of a task."""
    return (folder / TASK_FILE).is_file() or hf_task_record(folder) is not None


def read_task_record(folder: str | Path) -> TaskRecord:
    """Read task.json from the folder of a model, or derive the task of a Hugging Face folder from its config.json.

    Raise InputError if the model is not fine-tuned.
    """
    path = model_folder(folder) / TASK_FILE
    derived = None if path.is_file() else hf_task_record(path.parent)
    if derived is not None:
        return TaskRecord.parse(derived, source=str(path.parent))
    if not path.is_file():
        raise InputError(
            f"{str(folder)!r} has no {TASK_FILE}, so its model was not fine-tuned; use bertsmith finetune"
            f"{namesake_hint(folder)}"
        )
    return TaskRecord.parse(read_json(path), source=str(path))


_SAMPLE_TOKENS = 2048  # tokens per batch; calibration stores activation ranges of each


def sample_inputs(model: Runner, record: TaskRecord, table: Table, *, rows: int = 128) -> list[Sample]:
    """Return evenly spaced rows of a table as padded batches, which need no targets; for translation, packed pairs."""
    count = min(rows, len(table))
    chosen = table.take([index * len(table) // count for index in range(count)])
    if isinstance(record.task, Translation):
        translator, config = require_decoder(model), pair_config(record.sequences)
        config = config.changed(layout="packed", too_long="cut", micro_tokens=max(_SAMPLE_TOKENS, config.length))
        return _pair_batches(translator, record.task.pairs(record.task.examples(chosen), translator, config), config)
    examples = record.task.examples(chosen, has_targets=False)
    features = record.task.features(examples, Encoding.of(model, record.sequences.length))
    reader = ExampleReader(features, record.sequences, model.require_tokenizer().pad)
    samples: list[Sample] = []
    for items in length_batches(features.lengths, _SAMPLE_TOKENS):
        batch = reader.batch(items)
        tokens, layout = batch.layout.pad(batch.tokens)
        types = None if batch.types is None else batch.layout.pad(batch.types)[0]
        samples.append(Inputs(tokens, layout, types))
    return samples


def _pair_batches(model: Seq2Seq, pairs: Pairs, config: PairConfig) -> list[Sample]:
    tokenizer = model.require_tokenizer()
    reader = PairReader(pairs, config, SpecialTokens(tokenizer.pad, tokenizer.start, tokenizer.separator))
    batches = [reader[plan].batch for plan in PairPlan(pairs, config, 0).one_epoch()]
    return [batch for batch in batches if isinstance(batch, PairBatch)]

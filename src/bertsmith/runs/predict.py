"""`bertsmith predict`: run a fine-tuned model on new inputs."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bertsmith.bundled import model_folder
from bertsmith.errors import InputError
from bertsmith.runs.answer import existing_path, layers_used, name_rows, open_predictor, progress_bar, read_task
from bertsmith.runs.output import check_out, claim, write_answers, write_files, write_result
from bertsmith.runs.result import OneShotResult, print_plain
from bertsmith.tasks.base import Task
from bertsmith.tasks.data_source import task_splits
from bertsmith.tasks.glue import name_in_split
from bertsmith.text.readers import COMPRESSIONS, read_lines
from bertsmith.text.rows import Table, table_of


@dataclass(frozen=True, kw_only=True)
class PredictResult(OneShotResult):
    """Result of a prediction; `predictions` is set for --text only, predictions.jsonl always has them."""

    inputs: int
    seconds: float
    model: str
    mean_layers: float | None
    """Mean number of layers per input; None without early exits."""
    layers: int | None
    predictions: list[Any] | None


def predict(
    model: str | Path,
    *,
    out: Path,
    data: str | None = None,
    split: str = "test",
    text: list[str] | None = None,
    pair: list[str] | None = None,
    column: list[str] | None = None,
    beam: int | None = None,
    length_penalty: float | None = None,
    extra_length: int | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    force: bool = False,
) -> PredictResult:
    """Predict with a fine-tuned model, for the rows of a file or for texts on the command line.

    Parameters
    ----------
    model
        Folder of a fine-tuned model.
    out
        Output folder: predictions.jsonl, result.json, predictions.txt if every prediction fits on one line, and
        official/ with files for the task's official scorer.
    data
        File with the input columns of the task (.jsonl, .csv, .tsv, .parquet) or with one text per line (.txt), also
        .gz, .xz, .zst; or, with --split, a folder with one file per split or a data set on the hub.
    split
        Split of a folder or of a data set on the hub.
    text
        Input text; repeatable.
    pair
        Second text of each --text, in the same order, for tasks on text pairs; repeatable.
    column
        Name of a column if it differs from the training data, for example text=review; repeatable.
    beam
        Translation: beam size; 1 is greedy decoding. The model's own setting by default.
    length_penalty
        Translation: α in log P / ((5 + length) / 6)^α; 0 disables the penalty.
    extra_length
        Translation: maximum output tokens beyond the length of the source.
    device
        Device to run on; "auto" uses a GPU if one is available.
    force
        Replace the contents of --out.
    """
    model, out, data = model_folder(model), Path(out), None if data is None else str(data)
    texts, pairs = ([value] if isinstance(value, str) else value or [] for value in (text, pair))
    if (data is None) == (not texts):
        raise InputError("give either --data with a file or --text with a text, not both")
    check_out(out, force, model, existing_path(data))
    record = read_task(model, column or [], beam=beam, length_penalty=length_penalty, extra_length=extra_length)
    task = record.task
    table = _pair_table(task, texts, pairs) if data is None else _data_table(task, data, split)
    examples = task.examples(table, has_targets=False)
    predictor = open_predictor(model, record, device)
    start = time.perf_counter()
    with progress_bar(predictor, "predict"):
        answers = predictor.answers(examples)
    seconds = time.perf_counter() - start
    claim(out, force, model, existing_path(data))
    write_answers(out / "predictions.jsonl", name_rows(table, answers))
    lines = [one_line(answer["answer"]) for answer in answers]
    if None not in lines:
        (out / "predictions.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    task = task.changed(name=name_in_split(task.name, split))
    write_files(out / "official", task.files(examples, answers))
    mean_layers, layers = layers_used(predictor)
    result = PredictResult(
        inputs=len(table),
        seconds=round(seconds, 3),
        model=str(model),
        mean_layers=mean_layers,
        layers=layers,
        predictions=[answer["answer"] for answer in answers] if data is None else None,
    )
    write_result(out, result.to_json())
    for prediction in result.predictions or ():
        print_plain(format_answer(prediction))
    inputs = "1 input" if len(table) == 1 else f"{len(table):,} inputs"
    print_plain(f"{inputs} in {seconds:.1f} s; written to {out}: predictions.jsonl")
    return result


def _pair_table(task: Task[Any], texts: Sequence[str], pairs: Sequence[str]) -> Table:
    """Return the texts of the command line as a table."""
    columns = task.input_columns
    if not pairs and task.takes_one_text:
        return table_of([task.row(text) for text in texts], "--text")
    if len(columns) > 2 or task.kind == "choice":
        raise InputError(f"this task needs the columns {', '.join(columns)}; pass --data with a .jsonl file")
    if len(columns) == 1:
        raise InputError(f"--pair is given, but this task reads one text, {columns[0]!r}; omit --pair")
    if len(pairs) != len(texts):
        raise InputError(
            f"this task reads two texts, {columns[0]!r} and {columns[1]!r}, but --text is given {len(texts)} times "
            f"and --pair {len(pairs)} times; give one --pair for every --text"
        )
    return table_of([task.row(pair) for pair in zip(texts, pairs, strict=True)], "--text")


def _data_table(task: Task[Any], data: str, split: str) -> Table:
    """Read the rows of a file or a split, or the lines of a .txt file."""
    if not data.lower().endswith(tuple(f".txt{compression}" for compression in COMPRESSIONS)):
        return task_splits(data, file_is=split).read(split)
    if not task.takes_one_text:
        columns = ", ".join(task.input_columns)
        raise InputError(
            f"--data {data!r} has one text per line, but this task reads {columns}; give a .tsv, .csv or .jsonl file "
            "with these columns"
        )
    lines = read_lines(Path(data))
    if not lines:
        raise InputError(f"file {data!r} has no lines")
    return Table(f"file {data!r}", [task.row(line) for line in lines], range(1, len(lines) + 1))


def one_line(answer: Any) -> str | None:
    """Return an answer as one line of text, or None if it is not a text or a number."""
    if isinstance(answer, str):
        return " ".join(answer.splitlines())
    return str(answer) if isinstance(answer, int | float) else None


def format_answer(answer: Any) -> str:
    """Format an answer for the console; long vectors are abbreviated.

    >>> format_answer(["B-PER", "O"]), format_answer(1.6721363), format_answer("")
    ('B-PER, O', '1.67214', '(none)')
    """
    if isinstance(answer, float):
        return f"{answer:.6g}"
    if isinstance(answer, list) and len(answer) > 8 and isinstance(answer[0], float):
        return f"{', '.join(map(format_answer, answer[:6]))}, … ({len(answer)} numbers)"
    if isinstance(answer, list):
        return ", ".join(map(format_answer, answer)) or "(none)"
    return str(answer) or "(none)"

"""`bertsmith predict`: run a fine-tuned model on new inputs."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, starmap
from pathlib import Path
from typing import Annotated, Any

import torch

from bertsmith.answers.sequences import Answer
from bertsmith.bundled import model_folder
from bertsmith.data.devices import Device
from bertsmith.data.executor import Executor, RayWorkers, ThisProcess
from bertsmith.data.inference import InferencePrecision, in_background
from bertsmith.data.progress import progress_bar
from bertsmith.errors import InputError, shorten
from bertsmith.files import read_json, write_json
from bertsmith.runs.answer import existing_path, layers_used, name_rows, open_predictor, read_task
from bertsmith.runs.flags import TRANSLATION, DataFlag, ForceFlag, OutFlag, RayFlag, TextFlag
from bertsmith.runs.output import RESULT, check_out, claim, lock, write_answers, write_files, write_result
from bertsmith.runs.result import OneShotResult, count_of, print_plain
from bertsmith.settings import check_same
from bertsmith.tasks.base import Task
from bertsmith.tasks.data_source import task_splits
from bertsmith.tasks.glue import name_in_split
from bertsmith.tasks.hf_task import adapt_task
from bertsmith.tasks.predictor import Predictor, TaskRecord
from bertsmith.text.readers import COMPRESSIONS, text_lines
from bertsmith.text.rows import Table, table_of

WINDOW_ROWS = 1 << 13
"""Rows that are read, answered and written at a time; their vectors take about 200 MB as Python numbers."""
REQUEST = "predict.json"
"""Arguments of a prediction, which a resumed one must have, too."""
MAX_ANSWER = 500
"""Characters of an answer printed to the console."""


@dataclass(frozen=True, kw_only=True)
class PredictResult(OneShotResult):
    """Result of a prediction; `predictions` is None for the rows of --data that were written to predictions.jsonl."""

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
    out: OutFlag[Path | None] = None,
    data: DataFlag[str | None] = None,
    split: str = "test",
    text: TextFlag = None,
    pair: list[str] | None = None,
    column: list[str] | None = None,
    beam: Annotated[int | None, TRANSLATION] = None,
    length_penalty: Annotated[float | None, TRANSLATION] = None,
    extra_length: Annotated[int | None, TRANSLATION] = None,
    device: Device = "auto",
    precision: InferencePrecision = "auto",
    ray: RayFlag = None,
    top: int | None = None,
    resume: bool = False,
    force: ForceFlag = False,
) -> PredictResult:
    """Predict with a fine-tuned model, for the rows of a file or for texts on the command line.

    Files of any size are read and answered some thousand rows at a time.

    Parameters
    ----------
    model
        Folder of a fine-tuned model, ours or Hugging Face's.
    out
        Output folder: predictions.jsonl, result.json, predictions.txt if every prediction fits on one line, and
        official/ with files for the task's official scorer. Without it, the answers are printed.
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
    precision
        Precision of matrix products; "auto" is bfloat16 on a GPU and float32 on a CPU.
    ray
        Predict on a Ray cluster: its address, "auto", or "local" to start one on this machine. Every worker loads the
        model from its folder, which all machines must share, and uses as many threads as this machine would.
    top
        Labels whose scores are written for each row, the most probable first; all by default.
    resume
        Continue an interrupted prediction in --out, given the same arguments.
    force
        Replace the contents of --out.
    """
    model, out, data = model_folder(model), None if out is None else Path(out), None if data is None else str(data)
    texts, pairs = ([value] if isinstance(value, str) else value or [] for value in (text, pair))
    if (data is None) == (not texts):
        raise InputError("give either --data with a file or --text with a text, not both")
    if top is not None and top < 1:
        raise InputError(f"--top is {top}; allowed: 1 or more")
    request: dict[str, Any] = {
        "data": data,
        "split": split,
        "columns": column or [],
        "precision": precision,
        "top": top,
    }
    request |= {"model": str(model), "beam": beam, "length_penalty": length_penalty, "extra_length": extra_length}
    if resume:
        _check_resume(out, request)
    elif out is not None:
        check_out(out, force, model, existing_path(data))
    record = read_task(model, column or [], beam=beam, length_penalty=length_penalty, extra_length=extra_length)
    task = record.task
    first = None if data is None else next(_data_tables(task, data, split), None)
    if first is not None:
        task = adapt_task(model, task, first, column or [], data)
        record = record.changed(task=task)

    def tables() -> Iterator[Table]:
        return iter([_pair_table(task, texts, pairs)]) if data is None else _data_tables(task, data, split)

    rows, is_joint = _check_rows(task, tables())  # bad rows raise before the model is loaded
    predictor = open_predictor(model, record, device, precision)
    start = time.perf_counter()
    given: list[Answer] = []
    writer = None
    if out is not None:
        writer = PredictionWriter(out, task.changed(name=name_in_split(task.name, split)), top)
    with (
        _executor(predictor, model, device, ray) as executor,
        progress_bar("predict") as watch,
        predictor.model.evaluating(),
    ):
        done = 0
        windows = iter([_joined(tables())]) if is_joint else in_background(tables())
        if resume and writer is not None:
            done = sum(map(len, islice(windows, writer.resume(is_joint))))
        predictor.watch = lambda count, _: watch(done + count, rows)
        for table, answers in executor.results(windows):
            if out is not None and writer is not None:
                if not done and not resume:
                    claim(out, force, model, existing_path(data))
                    write_json(out / REQUEST, request)
                writer.add(table, task.examples(table, has_targets=False), answers)
            given += answers if data is None or out is None else []
            done += len(table)
            watch(done, rows)
    if writer is not None:
        writer.finish()
    seconds = time.perf_counter() - start
    mean_layers, layers = layers_used(predictor)
    result = PredictResult(
        inputs=rows,
        seconds=round(seconds, 3),
        model=str(model),
        mean_layers=mean_layers,
        layers=layers,
        predictions=[answer["answer"] for answer in given] if data is None or out is None else None,
    )
    for answer in given:
        print_plain(describe_answer(answer))
    if out is not None:
        write_result(out, result.to_json())
        print_plain(f"{count_of(rows, 'input')} in {seconds:.1f} s; written to {out}: predictions.jsonl")
    return result


def _executor(predictor: Predictor, model: Path, device: str, ray: str | None) -> Executor[Table, Sequence[Answer]]:
    """Return the executor that answers tables: the predictor in this process, or predictors on a cluster."""
    if ray is None:
        return ThisProcess(predictor.answer_table)
    threads = torch.get_num_threads()  # the same number everywhere, so that all workers round alike
    make = partial(load_on_worker, model.resolve(), predictor.record, device, predictor.precision, threads)
    return RayWorkers(make, ray, cores=threads, gpus=int(predictor.model.device.type == "cuda"))


def load_on_worker(
    model: Path, record: TaskRecord, device: str, precision: InferencePrecision, threads: int
) -> Callable[[Table], Sequence[Answer]]:
    """Load the predictor of a worker."""
    torch.set_num_threads(threads)
    return open_predictor(model, record, device, precision).answer_table


class PredictionWriter:
    """Write the predictions of a run to its folder, window by window.

    predictions.txt is removed at the first answer that does not fit on one line. Files for official scorers are made
    of all answers, so only tasks that have such files hold their answers in memory.
    """

    def __init__(self, out: Path, task: Task[Any], top: int | None = None) -> None:
        self.out, self.task, self.top = out, task, top
        self.lines: Path | None = out / "predictions.txt"
        self.has_files: bool | None = None
        self.examples: list[Any] = []
        self.answers: list[Answer] = []

    def add(self, table: Table, examples: Sequence[Any], answers: Sequence[Answer]) -> None:
        """Append the answers to the rows of a table."""
        if self.top is not None:
            answers = [_top_scores(answer, self.top) for answer in answers]
        write_answers(self.out / "predictions.jsonl", name_rows(table, answers), append=True)
        lines = [one_line(answer["answer"]) for answer in answers]
        if self.lines is not None and None in lines:
            self.lines.unlink(missing_ok=True)
            self.lines = None
        if self.lines is not None:
            with self.lines.open("a", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in lines)
        if self.has_files is None:
            self.has_files = bool(self.task.files(examples, answers))
        if self.has_files:
            self.examples += examples
            self.answers += answers

    def resume(self, is_joint: bool) -> int:
        """Return the number of complete windows in the folder and remove what follows them.

        Rows that are answered together, and tasks with files for official scorers, begin again.
        """
        path, lines = self.out / "predictions.jsonl", self.out / "predictions.txt"
        complete = min(_count_lines(file) for file in (path, lines) if file == path or file.exists())
        begins_again = is_joint or bool(self.task.files([], []))
        windows = 0 if begins_again else complete // WINDOW_ROWS
        if windows and not lines.exists():
            self.lines = None
        for file in (path, lines):
            _keep_lines(file, windows * WINDOW_ROWS)
        return windows

    def finish(self) -> None:
        """Write the files for official scorers."""
        if self.has_files:
            write_files(self.out / "official", self.task.files(self.examples, self.answers))


def _check_resume(out: Path | None, request: dict[str, Any]) -> None:
    """Lock the folder of an interrupted prediction; raise InputError if it is finished or was started otherwise."""
    if out is None or not (out / REQUEST).is_file():
        raise InputError(f"--resume: --out {str(out)!r} has no interrupted prediction ({REQUEST} is missing)")
    if (out / RESULT).is_file():
        raise InputError(f"the prediction in {str(out)!r} is finished; there is nothing to resume")
    check_same(read_json(out / REQUEST), request)
    lock(out)


def _count_lines(path: Path) -> int:
    """Return the number of complete lines of a file; 0 if it does not exist."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return sum(line.endswith(b"\n") for line in file)


def _keep_lines(path: Path, count: int) -> None:
    """Cut a file after some lines; without any, remove it."""
    if not count:
        path.unlink(missing_ok=True)
    elif path.exists():
        with path.open("r+b") as file:
            size = sum(map(len, islice(file, count)))
            file.truncate(size)


def _top_scores(answer: Answer, top: int) -> Answer:
    """Return an answer with the scores of the most probable labels only."""
    scores = answer.get("scores")
    if not isinstance(scores, dict) or len(scores) <= top:
        return answer
    best = sorted(scores, key=lambda label: scores[label], reverse=True)[:top]
    return {**answer, "scores": {label: scores[label] for label in best}}


def _check_rows(task: Task[Any], tables: Iterator[Table]) -> tuple[int, bool]:
    """Read all rows once; return their number and whether they must be answered together. Bad rows raise InputError."""
    rows, is_joint = 0, True
    for table in tables:
        is_joint = task.compares_rows(task.examples(table, has_targets=False)) and is_joint
        rows += len(table)
    return rows, is_joint


def _joined(tables: Iterator[Table]) -> Table:
    """Return all rows as one table."""
    parts = list(tables)
    rows, numbers = ([one for part in parts for one in getattr(part, name)] for name in ("rows", "numbers"))
    return replace(parts[0], rows=rows, numbers=numbers)


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


def _data_tables(task: Task[Any], data: str, split: str) -> Iterator[Table]:
    """Yield the rows of a file or a split, or the lines of a .txt file, in tables of WINDOW_ROWS rows."""
    if not data.lower().endswith(tuple(f".txt{compression}" for compression in COMPRESSIONS)):
        yield from task_splits(data, file_is=split).windows(split, WINDOW_ROWS)
        return
    if not task.takes_one_text:
        columns = ", ".join(task.input_columns)
        raise InputError(
            f"--data {data!r} has one text per line, but this task reads {columns}; give a .tsv, .csv or .jsonl file "
            "with these columns"
        )
    lines, is_empty = text_lines(Path(data)), True
    while window := list(islice(lines, WINDOW_ROWS)):
        is_empty = False
        yield Table(f"file {data!r}", [task.row(line) for _, line in window], [number for number, _ in window])
    if is_empty:
        raise InputError(f"file {data!r} has no lines")


def one_line(answer: Any) -> str | None:
    """Return an answer as one line of text, or None if it is not a text or a number."""
    if isinstance(answer, str):
        return " ".join(answer.splitlines())
    return str(answer) if isinstance(answer, int | float) else None


def describe_answer(answer: Answer) -> str:
    """Describe an answer for the console: labels with probabilities, entities, tagged words, or the answer alone.

    >>> describe_answer({"answer": "spam", "score": 0.973, "scores": {"spam": 0.973, "ham": 0.027}})
    'spam  97.3 %'
    >>> describe_answer({"answer": ["a", "b"], "scores": {"a": 0.9, "b": 0.8, "c": 0.1}})
    'a  90.0 %, b  80.0 %'
    >>> describe_answer({"answer": ["B-PER", "O"], "words": ["Ada", "writes"], "score": 0.9})
    'Ada/B-PER writes/O'
    """
    short = answer["answer"]
    if "entities" in answer:
        entities = [(f"{one['type']}: {one['text']}", one["score"]) for one in answer["entities"]]
        return ", ".join(starmap(_with_probability, entities)) or "(no entities)"
    if isinstance(short, list) and "words" in answer:
        return " ".join(f"{word}/{tag}" for word, tag in zip(answer["words"], short, strict=True)) or "(none)"
    if isinstance(short, list) and isinstance(answer.get("scores"), dict):
        return ", ".join(_with_probability(label, answer["scores"][label]) for label in short) or "(none)"
    if isinstance(short, str | int) and "score" in answer:
        return _with_probability(str(answer.get("text", short)), answer["score"])
    return format_answer(short)


def _with_probability(answer: str, probability: float) -> str:
    return f"{shorten(answer, MAX_ANSWER) or '(none)'}  {100 * probability:.1f} %"


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
    return shorten(str(answer), MAX_ANSWER) or "(none)"

"""Evaluating and predicting with a fine-tuned model."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertsmith.commands.finetune_task import score_line
from bertsmith.commands.task_report import interval_of, write_report
from bertsmith.errors import InputError
from bertsmith.runs.output import check_out, claim, write_answers, write_files, write_result

if TYPE_CHECKING:
    from bertsmith.tasks.base import Task
    from bertsmith.tasks.predictor import Predictor
    from bertsmith.text.rows import Table


@dataclass(frozen=True)
class Asked:
    """What a prediction is asked of: data with the part of it that counts, or texts with their second ones."""

    data: str | None
    part: str
    texts: Sequence[str] = ()
    pairs: Sequence[str] = ()

    def table(self, task: "Task[Any]") -> "Table":
        """The rows to answer."""
        from bertsmith.tasks.data_source import task_parts
        from bertsmith.text.rows import table_of

        if self.data is None:
            return table_of([task.row(given) for given in self._given(task)], "--text")
        lines = self._lines(task)
        return task_parts(self.data, file_is=self.part).read(self.part) if lines is None else lines

    def _given(self, task: "Task[Any]") -> list[Any]:
        columns = task.input_columns
        if not self.pairs and task.takes_one_text:
            return list(self.texts)
        if len(columns) > 2 or task.kind == "choice":
            raise InputError(f"this task reads {', '.join(columns)}; give them as --data with a .jsonl file")
        if len(columns) == 1:
            raise InputError(f"--pair is given and this task reads one text, {columns[0]!r}; leave it out")
        if len(self.pairs) != len(self.texts):
            raise InputError(
                f"this task reads two texts, {columns[0]!r} and {columns[1]!r}: --text is given {len(self.texts)} "
                f"times and --pair {len(self.pairs)} times; they must be as many"
            )
        return list(zip(self.texts, self.pairs, strict=True))

    def _lines(self, task: "Task[Any]") -> "Table | None":
        """The lines of a .txt file as rows; None if the data is none."""
        from bertsmith.text.readers import PACKINGS, read_lines
        from bertsmith.text.rows import Table

        name = str(self.data)
        if not name.lower().endswith(tuple(f".txt{packing}" for packing in PACKINGS)):
            return None
        if not task.takes_one_text:
            columns = ", ".join(task.input_columns)
            raise InputError(
                f"--data {name!r} has one text a line and this task reads {columns}; give a .tsv, .csv or .jsonl file "
                "with these columns"
            )
        lines = read_lines(Path(name))
        if not lines:
            raise InputError(f"file {name!r} has no lines")
        return Table(f"file {name!r}", [task.row(line) for line in lines], range(1, len(lines) + 1))


def is_fine_tuned(folder: Path) -> bool:
    """Whether a folder holds a model for a task."""
    from bertsmith.tasks.predictor import TASK_FILE

    return (folder / TASK_FILE).is_file()


def evaluate_task(
    model: Path, data: str, out: Path, part: str, columns: Sequence[str], *, device: str, force: bool
) -> dict[str, Any]:
    """Answers one part of a task and compares with what is right."""
    from rich.console import Console

    from bertsmith.tasks.data_source import task_parts
    from bertsmith.tasks.glue import name_in_part

    check_out(out, force, model, _file_of(data))
    task = _task_of(model, columns)
    table = task_parts(data, file_is=part).read(part)
    examples = task.examples(table)  # what is wrong with the rows is said before a model is loaded
    predictor = _loaded(model, task, device)
    with _shown(predictor, "evaluate"):
        answers = predictor.answers(examples)
    evaluation = task.evaluate(examples, answers)
    claim(out, force, model, _file_of(data))
    write_answers(out / "predictions.jsonl", named_answers(table, answers))
    task = task.changed(name=name_in_part(task.name, part))
    write_files(out / "official", task.files(examples, answers))
    named = Path(data).name if Path(data).is_file() else part
    figures = {
        "metric": evaluation.metric,
        "score": evaluation.score,
        **interval_of(evaluation, len(table)),
        **evaluation.metrics,
        **_layers_used(predictor),
        "examples": len(table),
        "part": named,
        "model": str(model),
        "data": str(data),
    }
    facts = {"Task": task.kind, "Model": str(model), "Data": str(data), "Part": part, "Examples": f"{len(table):,}"}
    write_result(out, figures)
    write_report(out, task, examples, answers, evaluation, figures, kind="Evaluation", split=part, facts=facts)
    layers = f"; {figures['mean_layers']:.2f} layers in the mean" if "mean_layers" in figures else ""
    line = f"{score_line(named, figures)}{layers}; written to {out}: report.html tells more"
    Console().print(line, markup=False, highlight=False, soft_wrap=True)
    return figures


def predict_task(
    model: Path, out: Path, asked: Asked, columns: Sequence[str], *, device: str, force: bool
) -> dict[str, Any]:
    """Answers new inputs."""
    from rich.console import Console

    from bertsmith.tasks.glue import name_in_part

    if (asked.data is None) == (not asked.texts):
        raise InputError("give either --data with a file or --text with a text")
    check_out(out, force, model, _file_of(asked.data))
    task = _task_of(model, columns)
    table = asked.table(task)
    examples = task.examples(table, has_targets=False)
    predictor = _loaded(model, task, device)
    begin = time.perf_counter()
    with _shown(predictor, "predict"):
        answers = predictor.answers(examples)
    seconds = time.perf_counter() - begin
    claim(out, force, model, _file_of(asked.data))
    write_answers(out / "predictions.jsonl", named_answers(table, answers))
    lines = [one_line(answer["answer"]) for answer in answers]
    if None not in lines:
        (out / "predictions.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    task = task.changed(name=name_in_part(task.name, asked.part))
    write_files(out / "official", task.files(examples, answers))
    figures: dict[str, Any] = {"inputs": len(table), "seconds": round(seconds, 3), "model": str(model)}
    figures |= _layers_used(predictor)
    if asked.data is None:
        figures["predictions"] = [answer["answer"] for answer in answers]
    write_result(out, figures)
    console = Console()
    for answer in answers if asked.data is None else ():
        console.print(spoken(answer["answer"]), markup=False, highlight=False, soft_wrap=True)
    inputs = "1 input" if len(table) == 1 else f"{len(table):,} inputs"
    line = f"{inputs} in {seconds:.1f} s; written to {out}: predictions.jsonl"
    console.print(line, markup=False, highlight=False, soft_wrap=True)
    return figures


def named_answers(table: "Table", answers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Answers with the name that their row has, if it has one (id, idx …), in front."""
    from bertsmith.text.tables import ROW_NAMES

    return [
        {**{name: row[name] for name in ROW_NAMES if name in row}, **answer}
        for row, answer in zip(table, answers, strict=True)
    ]


def one_line(answer: Any) -> str | None:
    """An answer as one line of a file; None for one that is a list or the like."""
    if isinstance(answer, str):
        return " ".join(answer.splitlines())
    return str(answer) if isinstance(answer, int | float) else None


def spoken(answer: Any) -> str:
    """An answer as it is printed: numbers and vectors shortened, nothing said to be so.

    >>> spoken(["B-PER", "O"]), spoken(1.6721363), spoken("")
    ('B-PER, O', '1.67214', '(none)')
    """
    if isinstance(answer, float):
        return f"{answer:.6g}"
    if isinstance(answer, list) and len(answer) > 8 and isinstance(answer[0], float):
        return f"{', '.join(map(spoken, answer[:6]))}, … ({len(answer)} numbers)"
    if isinstance(answer, list):
        return ", ".join(map(spoken, answer)) or "(none)"
    return str(answer) or "(none)"


def _layers_used(predictor: "Predictor") -> dict[str, float]:
    """How many layers the answers took in the mean, of a model that may stop early."""
    used = predictor.mean_layers
    return {} if used is None else {"mean_layers": used, "layers": len(predictor.model.config.encoder.layers)}


def _file_of(data: str | None) -> Path | None:
    """The file or folder that data is, unless it is a name on the hub."""
    return Path(data) if data is not None and Path(data).exists() else None


def _task_of(model: Path, columns: Sequence[str]) -> "Task[Any]":
    """The task of a model, with columns of other names than in training."""
    from bertsmith.tasks.predictor import read_task_record
    from bertsmith.tasks.recognise import named_columns

    task = read_task_record(model).task
    return task.changed(**named_columns(columns, type(task)))


def _loaded(model: Path, task: "Task[Any]", device: str) -> "Predictor":
    from bertsmith.tasks.predictor import Predictor
    from bertsmith.training.hardware import device_type

    device_type(device)  # a sentence if it is not there
    predictor = Predictor.load(model, device=device)
    predictor.task = task
    return predictor


@contextmanager
def _shown(predictor: "Predictor", name: str) -> Iterator[None]:
    """Shows a bar while a predictor answers, gone when it is done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    with Progress(*columns, transient=True, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(name, total=None)
        predictor.watch = lambda done, total: progress.update(bar, completed=done, total=total)
        yield
    predictor.watch = None

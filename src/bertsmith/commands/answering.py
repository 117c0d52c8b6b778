"""Evaluating and predicting with a fine-tuned model."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertsmith.commands.finetune_task import write_answers, write_files
from bertsmith.commands.output import check_out, claim, write_result
from bertsmith.commands.task_report import interval_of, write_report
from bertsmith.errors import InputError


def is_fine_tuned(folder: Path) -> bool:
    """Whether a folder holds a model for a task."""
    from bertsmith.tasks.predictor import TASK_FILE

    return (folder / TASK_FILE).is_file()


def evaluate_task(
    model: Path, data: str, out: Path, part: str, columns: Sequence[str], *, device: str, force: bool
) -> dict[str, Any]:
    """Answers one part of a task and compares with what is right."""
    from rich.console import Console

    from bertsmith.tasks.glue import name_in_part
    from bertsmith.tasks.predictor import Predictor
    from bertsmith.text.tables import read_part
    from bertsmith.training.hardware import device_type

    check_out(out, force, model, Path(data))
    predictor = Predictor.load(model, device=device_type(device))
    table = read_part(Path(data), part)
    judgement, answers = predictor.judged(table)
    claim(out, force, model, Path(data))
    write_answers(out / "predictions.jsonl", answers)
    task = predictor.task.changed(name=name_in_part(predictor.task.name, part))
    examples = task.examples(table)
    write_files(out / "official", task.files(examples, answers))
    figures = {
        "metric": judgement.metric,
        "score": judgement.score,
        **interval_of(judgement, len(table)),
        **judgement.figures,
        "examples": len(table),
        "part": part,
        "model": str(model),
        "data": str(data),
    }
    facts = {"Task": task.kind, "Model": str(model), "Data": str(data), "Part": part, "Examples": f"{len(table):,}"}
    write_result(out, figures)
    write_report(out, task, examples, answers, judgement, figures, kind="Evaluation", part=part, facts=facts)
    Console().print(
        f"{part}: {judgement.metric} {judgement.score:.2f}; written to {out}", markup=False, highlight=False
    )
    return figures


def predict_task(
    model: Path, out: Path, data: Path | None, texts: Sequence[str] | None, *, device: str, force: bool
) -> dict[str, Any]:
    """Answers new inputs."""
    from rich.console import Console

    from bertsmith.tasks.predictor import Predictor
    from bertsmith.text.readers import read_lines
    from bertsmith.training.hardware import device_type

    if (data is None) == (not texts):
        raise InputError("give either --data with a file or --text with a text")
    check_out(out, force, model, data)
    inputs = list(texts or ()) if data is None else read_lines(data)
    predictor = Predictor.load(model, device=device_type(device))
    begin = time.perf_counter()
    answers = predictor.details(inputs)
    seconds = time.perf_counter() - begin
    claim(out, force, model, data)
    write_answers(out / "predictions.jsonl", answers)
    figures: dict[str, Any] = {"inputs": len(inputs), "seconds": round(seconds, 3), "model": str(model)}
    if data is None:
        figures["predictions"] = [answer["answer"] for answer in answers]
    write_result(out, figures)
    console = Console()
    for answer in answers if data is None else ():
        console.print(str(answer["answer"]), markup=False, highlight=False, soft_wrap=True)
    console.print(f"{len(inputs)} inputs in {seconds:.1f} s; written to {out}", markup=False, highlight=False)
    return figures

"""`bertsmith demo`: from the model in the box, or from raw text, to one that fits a budget, with nothing but Python."""

import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertsmith.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from bertsmith.commands.demo_steps import Journey, Work
    from bertsmith.report.demo import DemoStep

MODEL = "small"
"""What the demo starts from: the name of a bundled model."""
STEPS = 400
"""Of the pre-training from raw text."""


def demo(
    *,
    out: Path = Path("demo"),
    model: str | None = None,
    from_scratch: bool = False,
    steps: int | None = None,
    epochs: float | None = None,
    force: bool = False,
) -> dict[str, Any]:
    """Go the whole way on a machine with nothing but Python: under five minutes on two cores, no data, no GPU.

    The model in the box fills masks and finds messages of a support desk that mean the same; it learns to tell what
    they are about, becomes elastic, is fitted to a part of the latency it has, and is exported to ONNX; report.html
    shows what came of it. From scratch, its place is taken by a small BERT that is pre-trained on those messages first.

    Parameters
    ----------
    out
        The folder to write: report.html, the model that fits, and everything on the way to it.
    model
        What to start from: the bundled model "small" if not given, or the folder of another model.
    from_scratch
        Begin with raw text instead: learn a vocabulary from it and pre-train a small BERT on it.
    steps
        From scratch: optimiser steps of the pre-training; 400 if not given.
    epochs
        How often fine-tuning sees every message, 2 times if not given, from scratch 6; elastic training sees them less
        often in each stage: a fifth of that, from scratch half.
    force
        Replace what --out holds.
    """
    from rich.console import Console

    from bertsmith.checkpoint.store import load
    from bertsmith.commands.demo_steps import FROM_BOX, FROM_SCRATCH, Journey
    from bertsmith.runs.output import claim, write_result

    if from_scratch and model is not None:
        raise InputError(f"--model is {model!r} with --from-scratch, which makes its own; allowed: one of the two")
    if steps is not None and not from_scratch:
        raise InputError(f"--steps is {steps} and nothing is pre-trained; allowed: with --from-scratch")
    way = FROM_SCRATCH if from_scratch else FROM_BOX
    folder, start = Path(out), str(MODEL if model is None else model)
    if not from_scratch:
        load(start).require_tokenizer()  # what is wrong with it must cost no folder
    claim(folder, force, None if model is None else Path(model))
    journey = Journey(
        folder,
        way,
        start=str(folder / "encoder") if from_scratch else start,
        steps=STEPS if steps is None else steps,
        epochs=way.epochs if epochs is None else epochs,
    )
    console = Console()
    begin = time.perf_counter()
    figures, made = _carried_out(way.steps, journey, console)
    if len(made) < len(way.steps):
        console.print("the demo was interrupted; start it anew with --force")
        return figures
    report, commands = _report(journey, figures, made)
    seconds = round(time.perf_counter() - begin, 1)
    figures["fit"] = figures["fit"].to_json()
    candidates = figures["fit"].pop("candidates")
    del figures["fit"]["measured"]
    result = {**figures, "model": start, "candidates": candidates, "seconds": seconds, "report": str(report)}
    write_result(folder, result)
    console.rule()
    console.print(f"[bold]report: {report}[/] ({seconds:.0f} s)\nwhat to try next:", highlight=False)
    for command in commands:
        console.print(f"  {command}", markup=False, highlight=False, soft_wrap=True)
    return result


def _carried_out(
    steps: Mapping[str, "Work"], journey: "Journey", console: "Console"
) -> tuple[dict[str, Any], list["DemoStep"]]:
    """The figures of every step by its name, and the steps as the page tells them, up to one that was interrupted."""
    from bertsmith.commands.demo_steps import gained
    from bertsmith.report.demo import DemoStep

    figures: dict[str, Any] = {}
    made: list[DemoStep] = []
    for name, work in steps.items():
        console.rule(name)
        begin = time.perf_counter()
        figures[name] = work(journey, figures)
        if isinstance(figures[name], Mapping) and not figures[name].get("is_finished", True):
            break
        made.append(DemoStep(name, gained(name, figures[name]), time.perf_counter() - begin))
    return figures, made


def _report(journey: "Journey", figures: Mapping[str, Any], made: list["DemoStep"]) -> tuple[Path, tuple[str, ...]]:
    """Writes the page; returns where, and the commands it ends with."""
    from bertsmith.commands.demo_steps import QUESTIONS, fitted_folder
    from bertsmith.report.demo import DemoReport, render_demo_page
    from bertsmith.shrinking.elastic_metadata import read_record
    from bertsmith.tasks.predictor import Predictor

    folder = journey.folder
    model = fitted_folder(journey, figures)
    commands = _commands(journey, model, figures["export"]["latency_ms"])
    page = render_demo_page(
        DemoReport(
            folder=folder,
            title=journey.way.title,
            steps=made,
            look=figures["look"],
            finetuned=figures["finetune"],
            elastic=read_record(folder / "elastic"),
            fitted=figures["fit"].outcome,
            exported=figures["export"],
            answers=list(zip(QUESTIONS, Predictor.load(model).predict(QUESTIONS), strict=True)),
            commands=commands,
        )
    )
    report = folder / "report.html"
    report.write_text(page, encoding="utf-8")
    return report, commands


def _commands(journey: "Journey", model: Path, latency_ms: float) -> tuple[str, ...]:
    """What to go on with: the model as a service, a text of one's own, another budget or method, the other way."""
    folder, own = shlex.quote(str(journey.folder)), shlex.quote(str(model))
    return (
        f"bertsmith serve {folder}/elastic --floor 0.95",
        f'bertsmith predict {own} --text "when do you open on sundays" --out answers',
        f"bertsmith fit {folder}/elastic --data {folder}/data --out smaller --size-mb {journey.way.small_mb:g}",
        f"bertsmith shrink {folder}/classifier --data {folder}/data --out pruned --method prune --keep 0.5",
        *(command.format(folder=folder, latency=f"{latency_ms:.2g}") for command in journey.way.others),
    )

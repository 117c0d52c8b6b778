"""`bertsmith demo`: run every step from a pre-trained model, or from raw text, to a model that fits a budget."""

import json
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bertsmith.checkpoint.store import load
from bertsmith.data.devices import has_fast_bfloat16
from bertsmith.engines.artefact import ENGINES
from bertsmith.errors import InputError
from bertsmith.layers.subnet import Subnet
from bertsmith.report.demo import DemoReport, DemoStep, Look, Prediction, headline, render_demo_page
from bertsmith.report.page import format_megabytes
from bertsmith.runs.corpus import corpus
from bertsmith.runs.demo_look import look_at
from bertsmith.runs.finetune import finetune
from bertsmith.runs.finetuning import FinetuneResult
from bertsmith.runs.fit import FitResult, fit
from bertsmith.runs.flags import ForceFlag
from bertsmith.runs.output import REPORT, claim, write_result
from bertsmith.runs.pretrain import PretrainResult, pretrain
from bertsmith.runs.result import Explanation, OneShotResult, StoppedRun, print_plain
from bertsmith.runs.shrink import shrink
from bertsmith.runs.shrink_results import ElasticResult
from bertsmith.runs.tokenizer import tokenizer
from bertsmith.settings import Plain
from bertsmith.shrinking.elastic_metadata import read_elastic_metadata
from bertsmith.shrinking.fit import measure
from bertsmith.shrinking.fit.candidates import distinct_subnets
from bertsmith.shrinking.fit.search import prepare
from bertsmith.shrinking.fit.settings import BudgetConfig, FitSettings
from bertsmith.tasks.linear_baseline import LinearBaseline
from bertsmith.tasks.predictor import Predictor
from bertsmith.text import support_desk
from bertsmith.toml import override, to_toml

MODEL = "small"
"""The bundled model that the demo starts from."""
PRETRAINING_STEPS = 400
QUESTIONS = {
    "where is my parcel, it should have been here on monday": "late_delivery",
    "you took the money twice for the same order": "double_charge",
    "the lamp has a crack right down the middle": "damaged_item",
    "i cannot log in any more, it says my password is wrong": "password_reset",
    "when do you open on sundays": "opening_hours",
    "please send me the bill for my tax return": "invoice_copy",
}
"""Messages of neither split, and their labels."""
PRETRAIN: Plain = {
    "model": {
        "preset": "bert-tiny",
        "overrides": {"layers": 4, "heads": 4, "max_length": 64, "dropout": 0.0, "init_std": 0.05},
    },
    "sequences": {"length": 64, "micro_tokens": 1024},
    "objective": {"kind": "masked_lm", "masking": {"rate": 0.2}},
    "batch": {"tokens": 1024},
    "optimizer": {"learning_rate": 1e-3},
    "schedule": {"kind": "wsd", "warmup": 0.05, "decay": 0.3},
    "run": {"evaluate_every": 200, "checkpoint_every": 1000},
}
WIDTHS = (1.0, 0.5, 0.25)
MEASURED_CALLS = 60
MEASURED_SECONDS = 10.0
FIT = ("measure.repeats=3", f"measure.runs={MEASURED_CALLS}", "measure.table_runs=20", "measure.finalists=3")
ENGINE_NAMES = ("torch", "onnxruntime")
LATENCY_SHARE = 0.32
"""Latency budget, as a share of the latency of the fine-tuned model in PyTorch: more than three times as fast."""


@dataclass(frozen=True)
class DemoPlan:
    """Settings of the demo, which starts from the bundled model or from scratch."""

    title: str
    masks: tuple[str, ...]
    """Sentences with a mask to fill."""
    epochs: float
    """Fine-tuning epochs."""
    elastic_share: float
    """Epochs per stage of elastic training, as a share of the fine-tuning epochs."""
    min_elastic_epochs: float
    """Minimum epochs per stage of elastic training."""
    finetune: tuple[str, ...]
    shrink: tuple[str, ...]
    small_mb: float
    """Size budget in MB that only a smaller network meets."""
    next_commands: tuple[str, ...]
    """Suggested next commands; {folder} is the output folder."""


FROM_BUNDLED = DemoPlan(
    title="From the bundled model to one that fits",
    masks=(
        "he studied law at the [MASK] of vienna.",
        "the river flows into the [MASK] sea.",
        "the [MASK] is the largest planet in the solar system.",
        "the song was released in [MASK] 1998.",
    ),
    epochs=3.5,
    elastic_share=0.3,
    min_elastic_epochs=0.1,
    # two thousand rows are few: the head starts with a regression on the frozen encoder
    finetune=(
        "sequences.length=64",
        "batch.examples=32",
        'head.pooling="mean"',
        'head.hidden="none"',
        'head.start="regression"',
        "optimizer.learning_rate=5e-4",
    ),
    shrink=("grid.depths=[1, 0.5]", "grid.sample=1", "batch.examples=16", "importance.examples=256"),
    small_mb=8,
    next_commands=(
        "bertsmith finetune convbert-small --data {folder}/data --out fresh",
        "bertsmith demo --from-scratch --out {folder}-from-scratch",
    ),
)
FROM_SCRATCH = DemoPlan(
    title="From raw text to a model that fits",
    masks=("i want my [MASK] back.", "the [MASK] arrived broken.", "how do i reset my [MASK]?"),
    epochs=6.0,
    elastic_share=0.5,
    min_elastic_epochs=1.0,
    finetune=(
        'head.pooling="mean"',
        "model.overrides.dropout=0.1",
        "encoder.layer_decay=1.0",
        "sequences.length=64",
        "optimizer.learning_rate=7e-4",
    ),
    shrink=("grid.depths=[1, 0.5]", "optimizer.learning_rate=4e-4"),
    small_mb=1,
    next_commands=("bertsmith demo --out {folder}-from-the-bundled-model",),
)


@dataclass(frozen=True, kw_only=True)
class DemoResult(OneShotResult):
    """Results of every step of the demo."""

    pretrain: PretrainResult | None
    look: Look
    baseline: float
    """Score of a linear model on words and characters."""
    finetune: FinetuneResult
    shrink: ElasticResult
    fit: FitResult
    model: str
    candidates: int
    seconds: float
    report: str


@dataclass
class _Steps:
    """Timings and outcomes of the steps of the demo."""

    finished: list[DemoStep] = field(default_factory=list)

    @contextmanager
    def step(self, name: str) -> Iterator[list[str]]:
        """Print a heading and time one step; the caller appends its outcome to the list."""
        Console().rule(name)
        start, outcome = time.perf_counter(), list[str]()
        yield outcome
        self.finished.append(DemoStep(name, "".join(outcome), time.perf_counter() - start))


def demo(
    *,
    out: Path = Path("demo"),
    model: str | None = None,
    from_scratch: bool = False,
    steps: int | None = None,
    epochs: float | None = None,
    force: ForceFlag = False,
) -> DemoResult | StoppedRun:
    """Run the whole pipeline on this machine, in four to seven minutes on two cores, without data or a GPU.

    Fills masks and finds similar support-desk messages with the bundled model, fine-tunes it to classify the messages
    beside a linear baseline, makes it elastic, and finds the best size, engine and precision that is more than three
    times as fast; report.html shows the results. Needs the extra onnx. With --from-scratch, a small BERT pre-trained
    on the messages replaces the bundled model.

    Parameters
    ----------
    out
        Output folder: report.html, the fitted model, and one folder per step.
    model
        Model to start from: a bundled model or a model folder; "small" by default.
    from_scratch
        Start from raw text: learn a vocabulary and pre-train a small BERT.
    steps
        With --from-scratch: optimiser steps of the pre-training; 400 by default.
    epochs
        Fine-tuning epochs; 3.5 by default, 6 with --from-scratch. Each stage of the elastic training takes 30 % of
        them, 50 % with --from-scratch.
    force
        Replace the contents of --out.
    """
    if from_scratch and model is not None:
        raise InputError(f"--model is {model!r}, but --from-scratch trains its own model; give only one of them")
    if steps is not None and not from_scratch:
        raise InputError(f"--steps is {steps}, but nothing is pre-trained; allowed: with --from-scratch")
    for name in ENGINE_NAMES:
        missing = ENGINES[name].missing(to_write=True)
        if missing is not None:
            raise InputError(f"bertsmith demo compares engines, and {name} {missing}")
    plan = FROM_SCRATCH if from_scratch else FROM_BUNDLED
    folder, start = Path(out), str(MODEL if model is None else model)
    if not from_scratch:
        load(start).require_tokenizer()  # raises before anything is written
    claim(folder, force, None if model is None else Path(model))
    epochs = plan.epochs if epochs is None else epochs
    precision = f"run.precision={'bfloat16' if has_fast_bfloat16() else 'auto'}"
    start_time, progress = time.perf_counter(), _Steps()
    pretrained: PretrainResult | None = None

    if from_scratch:
        start_folder = str(folder / "encoder")
        with progress.step("pretrain") as outcome:
            pretraining = _pretrain(folder, PRETRAINING_STEPS if steps is None else steps)
            if isinstance(pretraining, StoppedRun):
                return _interrupted("pretrain")
            pretrained = pretraining
            assert pretrained.held_out is not None
            loss, level = pretrained.held_out["loss"], pretrained.unigram_level
            outcome.append(f"held-out loss {loss:.2f}, unigram level {level:.2f}")
    else:
        start_folder = start
    with progress.step("look") as outcome:
        look = look_at(start_folder, plan.masks, list(QUESTIONS))
        outcome.append(f"nearest-neighbour accuracy {look.alike:.1f} on dev, before fine-tuning")
    with progress.step("baseline") as outcome:
        baseline = _baseline_accuracy()
        outcome.append(f"accuracy {baseline:.1f} on dev")
    with progress.step("finetune") as outcome:
        tuned = finetune(
            start_folder,
            data=_write_data(folder),
            out=folder / "classifier",
            epochs=epochs,
            set=[*plan.finetune, precision],
        )
        if not isinstance(tuned, FinetuneResult):
            return _interrupted("finetune")
        outcome.append(f"{tuned.metric} {tuned.score:.1f} on dev")
    with progress.step("shrink") as outcome:
        elastic = shrink(
            folder / "classifier",
            data=str(folder / "data"),
            out=folder / "elastic",
            widths=_distinct_widths(folder / "classifier"),
            epochs=max(plan.min_elastic_epochs, plan.elastic_share * epochs),
            set=[*plan.shrink, precision],
        )
        if not isinstance(elastic, ElasticResult):
            return _interrupted("shrink")
        outcome.append(f"{len(elastic.grid)} sizes share one set of weights; mean {elastic.metric} {elastic.score:.1f}")
    with progress.step("fit") as outcome:
        fitted = _fit(folder)
        best = fitted.outcome.best
        outcome.append(f"{best.words}: {best.latency_ms:.2f} ms")

    chosen = folder / ("fitted" if fitted.fits else "elastic")
    commands = _next_commands(folder, chosen, plan)
    contents = DemoReport(
        folder=folder,
        title=plan.title,
        steps=progress.finished,
        look=look,
        metric=tuned.metric,
        baseline=baseline,
        score=tuned.score,
        train_rows=len(support_desk.support_desk("train")),
        dev_rows=len(support_desk.support_desk("dev")),
        subjects=len({row["label"] for row in support_desk.support_desk("dev")}),
        elastic=read_elastic_metadata(folder / "elastic"),
        fitted=fitted.outcome,
        predictions=_predictions(chosen),
        commands=commands,
    )
    report = folder / REPORT
    report.write_text(render_demo_page(contents), encoding="utf-8")
    result = DemoResult(
        pretrain=pretrained,
        look=look,
        baseline=baseline,
        finetune=tuned,
        shrink=elastic,
        fit=fitted,
        model=start,
        candidates=len(fitted.candidates),
        seconds=round(time.perf_counter() - start_time, 1),
        report=str(report),
    )
    write_result(folder, result.to_json())
    Console().rule()
    _print_models(contents)
    print_plain(headline(contents), style="bold")
    print_plain(f"report: {report} ({result.seconds:.0f} s)")
    print_plain("\n  ".join(["next commands to try:", *commands]))
    return result


def _interrupted(step: str) -> StoppedRun:
    print_plain("the demo was interrupted; run it again with --force")
    return StoppedRun(steps=0, stage=step)


def _pretrain(folder: Path, steps: int) -> PretrainResult | StoppedRun:
    """Learn a vocabulary from the messages, tokenise them and pre-train a small BERT."""
    text, recipe = folder / "messages.jsonl", folder / "recipe.toml"
    rows = (json.dumps({"text": message}) + "\n" for message in support_desk.messages())
    text.write_text("".join(rows), encoding="utf-8")
    tokenizer([text], out=folder / "tokenizer", vocabulary=1500, lowercase=True)
    corpus([text], tokenizer=folder / "tokenizer", out=folder / "corpus", held_out=0.03)
    recipe.write_text(to_toml(override(PRETRAIN, [f"run.steps={steps}"])), encoding="utf-8")
    result = pretrain(recipe, data=folder / "corpus", out=folder / "encoder")
    assert not isinstance(result, Explanation)
    return result


def _write_data(folder: Path) -> str:
    """Write the labelled messages as train.jsonl and dev.jsonl; return their folder."""
    data = folder / "data"
    data.mkdir()
    for split in ("train", "dev"):
        rows = "".join(json.dumps(row) + "\n" for row in support_desk.support_desk(split))
        (data / f"{split}.jsonl").write_text(rows, encoding="utf-8")
    return str(data)


def _distinct_widths(folder: Path) -> list[float]:
    """Return the widths that give different sub-networks; a model with two heads has no quarter width."""
    units = load(folder).encoder.units
    return [subnet.width for subnet in distinct_subnets([Subnet(width=width) for width in WIDTHS], units)]


def _baseline_accuracy() -> float:
    """Return the accuracy in percent of a linear model on dev."""
    train, dev = support_desk.support_desk("train"), support_desk.support_desk("dev")
    model = LinearBaseline([row["text"] for row in train], [row["label"] for row in train])
    answers = model.predict([row["text"] for row in dev])
    accuracy = 100 * sum(answer == row["label"] for answer, row in zip(answers, dev, strict=True)) / len(dev)
    print_plain(f"logistic regression on tf-idf of words and characters: accuracy {accuracy:.1f} on dev")
    return accuracy


def _fit(folder: Path) -> FitResult:
    """Fit the elastic model to a share of the latency of the fine-tuned model in PyTorch."""
    elastic, data = folder / "elastic", str(folder / "data")
    settings = FitSettings.parse({"model": str(elastic), "data": data, "budget": BudgetConfig(latency_ms=1.0).plain()})
    # measured in a fresh process, as candidates are: this one is busy
    timing = measure.in_fresh_process(
        [folder / "classifier"], prepare(settings).conditions, MEASURED_CALLS, MEASURED_SECONDS
    )
    latency = max(workload["p50"] for workload in timing.latencies[0].values())
    result = fit(
        elastic,
        data=data,
        out=folder / "fitted",
        latency_ms=max(0.01, round(LATENCY_SHARE * latency, 2)),
        percentile=50,
        engine=list(ENGINE_NAMES),
        precision=["float32", "int8"],
        subnets="even",
        set=list(FIT),
    )
    assert isinstance(result, FitResult)
    return result


def _print_models(report: DemoReport) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("", report.metric, "ms", "MB"):
        table.add_column(heading, justify="right" if heading else "left")
    for row in report.models:
        latency = "" if row.latency_ms is None else f"{row.latency_ms:.2f}"
        size = "" if row.size_mb is None else format_megabytes(row.size_mb)
        table.add_row(row.name, f"{row.score:.1f}", latency, size)
    Console().print(table)


def _predictions(model: Path) -> list[Prediction]:
    answers = Predictor.load(model).details(list(QUESTIONS))
    return [
        Prediction(text, str(answer["answer"]), float(answer["score"]), label)
        for (text, label), answer in zip(QUESTIONS.items(), answers, strict=True)
    ]


def _next_commands(folder: Path, model: Path, plan: DemoPlan) -> tuple[str, ...]:
    home, chosen = shlex.quote(str(folder)), shlex.quote(str(model))
    return (
        f"bertsmith serve {chosen}",
        f'bertsmith predict {chosen} --text "do you also sell gift cards" --out answers',
        f"bertsmith fit {home}/elastic --data {home}/data --out smaller --size-mb {plan.small_mb:g}",
        f"bertsmith serve {home}/elastic --floor 0.95",
        f"bertsmith shrink {home}/classifier --data {home}/data --out pruned --method prune --keep 0.5",
        *(command.format(folder=home) for command in plan.next_commands),
    )

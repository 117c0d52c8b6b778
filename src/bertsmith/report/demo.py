"""Report page of the demo: the fitted model beside others, every step, and commands for next steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bertsmith.report import fit
from bertsmith.report.elastic import size_grid
from bertsmith.report.page import format_duration, format_megabytes, format_size_share, render
from bertsmith.report.pretraining import FilledMask
from bertsmith.shrinking.elastic_metadata import ElasticMetadata
from bertsmith.shrinking.fit.result import CandidateResult, FitOutcome

STEPS = {  # description of each step, and the folder it writes
    "pretrain": ("Learn a vocabulary and pre-train a small BERT on the messages of a support desk", "encoder"),
    "look": ("Fill masks and find similar messages before any training", None),
    "baseline": ("Train a linear model on tf-idf of words and characters, for comparison", None),
    "finetune": ("Fine-tune on labelled messages to predict their subject", "classifier"),
    "shrink": ("Sort heads and neurons by importance and distil the whole model into every size", "elastic"),
    "fit": ("Measure sizes, engines and precisions on this machine; choose the best within the budget", "fitted"),
}


@dataclass(frozen=True)
class DemoStep:
    """A finished step of the demo."""

    name: str
    outcome: str
    seconds: float


@dataclass(frozen=True)
class NetworkFacts:
    """The network that the demo starts from."""

    name: str
    family: str
    layers: int
    width: int
    vocabulary: int
    parameters: int
    generator_parameters: int | None


@dataclass(frozen=True)
class FilledSentence:
    """A sentence with a mask, and the most probable tokens for it."""

    text: str
    tokens: Sequence[tuple[str, float]]


@dataclass(frozen=True)
class Neighbour:
    """A labelled message and its cosine similarity to a question."""

    text: str
    label: str
    similarity: float


@dataclass(frozen=True)
class NearestMessages:
    """A question and the labelled messages that are most similar to it."""

    text: str
    near: Sequence[Neighbour]


@dataclass(frozen=True)
class Look:
    """Filled masks and nearest messages of the encoder before any training."""

    model: NetworkFacts
    filled: Sequence[FilledSentence]
    near: Sequence[NearestMessages]
    alike: float
    """Nearest-neighbour accuracy on dev, in percent."""


@dataclass(frozen=True)
class ModelRow:
    """A model of the comparison; latency and size are None for models that were not measured."""

    name: str
    score: float
    latency_ms: float | None = None
    size_mb: float | None = None
    is_result: bool = False
    """Whether it is the result of the demo."""


@dataclass(frozen=True)
class Prediction:
    """A message, the prediction of the fitted model with its probability, and the right label."""

    text: str
    answer: str
    probability: float
    label: str


@dataclass(frozen=True)
class DemoReport:
    """Contents of the page."""

    folder: Path
    title: str
    steps: Sequence[DemoStep]
    look: Look
    metric: str
    baseline: float
    """Score of a linear model."""
    score: float
    """Score of the fine-tuned model."""
    train_rows: int
    dev_rows: int
    subjects: int
    """Number of labels."""
    elastic: ElasticMetadata
    fitted: FitOutcome
    predictions: Sequence[Prediction]
    commands: Sequence[str]

    @property
    def models(self) -> list[ModelRow]:
        """The models to compare, each with at most one latency, which `fit` measured in fresh processes."""
        best, whole = self.fitted.best, self.whole
        return [
            ModelRow("Nearest message, by vectors of the pre-trained model", self.look.alike),
            ModelRow("Linear model on words and characters", self.baseline),
            ModelRow("Fine-tuned, in PyTorch", self.score, whole.latency_ms, whole.size_mb),
            ModelRow(f"Fitted: {best.words}", best.score, best.latency_ms, best.size_mb, is_result=True),
        ]

    @property
    def whole(self) -> CandidateResult:
        """The whole network in PyTorch, which has the latency and the size of the fine-tuned model."""
        assert self.fitted.reference is not None
        return self.fitted.reference


@dataclass(frozen=True)
class Change:
    """A value of the fitted model, and of the fine-tuned model in PyTorch before it."""

    name: str
    after: str
    before: str


@dataclass(frozen=True)
class StepRow:
    """A row of the list of steps; `link` is the path of the step's own report, or ""."""

    step: DemoStep
    description: str
    link: str


def render_demo_page(report: DemoReport) -> str:
    """Return the demo as one self-contained HTML document that links to the reports of its steps."""
    return render(
        "demo.html",
        report=report,
        name=report.folder.resolve().name,
        headline=headline(report),
        lead=_lead(report),
        changes=_changes(report),
        front=fit.front_chart(report.fitted),
        sizes=size_grid(report.elastic, has_latency=False),
        steps=[_step_row(report.folder, step) for step in report.steps],
        facts={**_fitted_facts(report), **_model_facts(report.look.model)},
        filled=[FilledMask(one.text, tuple(one.tokens)) for one in report.look.filled],
    )


def headline(report: DemoReport) -> str:
    """Return the speed-up of the fitted model over the fine-tuned one, its share of the size if smaller, and the loss.

    If no candidate meets the budget, return the nearest one.
    """
    if not report.fitted.fits:
        return fit.headline(report.fitted)
    whole, best = report.whole, report.fitted.best
    speed, size = whole.latency_ms / best.latency_ms, best.size_mb / whole.size_mb
    points = round(best.score - report.score, 1)
    change = f"{points:+.1f} points".replace("-", "−") if points else "the same score"
    share = f" at {format_size_share(size)}" if size < 0.95 else ""
    return f"{speed:.1f}\u00a0× faster{share}, {change}"


def _changes(report: DemoReport) -> list[Change]:
    best, whole = report.fitted.best, report.whole
    return [
        Change("Latency per message", f"{best.latency_ms:.2f} ms", f"{whole.latency_ms:.2f} ms"),
        Change("Size", f"{format_megabytes(best.size_mb)} MB", f"{format_megabytes(whole.size_mb)} MB"),
        Change(f"{report.metric.capitalize()} on dev", f"{best.score:.1f}", f"{report.score:.1f}"),
    ]


def _lead(report: DemoReport) -> str:
    best, duration = report.fitted.best, format_duration(sum(step.seconds for step in report.steps))
    network = f"{best.words[0].upper()}{best.words[1:]}"
    return (
        f"{network}: {report.metric} {best.score:.1f} in {best.latency_ms:.2f}\u00a0ms per message, compared with the "
        f"fine-tuned model in PyTorch. All steps ran on this machine in {duration}."
    )


def _model_facts(model: NetworkFacts) -> dict[str, str]:
    facts = {
        "Started from": model.name,
        "Network": f"{model.family}, {model.layers} × {model.width}",
        "Parameters": f"{model.parameters / 1e6:.1f} M",
        "Vocabulary": f"{model.vocabulary:,} tokens",
    }
    if model.generator_parameters is not None:
        facts["Generator, fills masks"] = f"{model.generator_parameters / 1e6:.1f} M"
    return facts


def _fitted_facts(report: DemoReport) -> dict[str, str]:
    if not report.fitted.fits:
        return {}
    best, is_onnx = report.fitted.best, report.fitted.best.engine == "onnxruntime"
    return {
        "Folder": f"{report.folder.name}/fitted",
        "Size": f"{format_megabytes(best.size_mb)} MB",
        "Memory of a process": f"{best.memory_mb:.0f} MB",
        "Runs with": "onnxruntime and tokenizers, without PyTorch" if is_onnx else "PyTorch",
    }


def _step_row(folder: Path, step: DemoStep) -> StepRow:
    description, home = STEPS[step.name]
    has_report = home is not None and (folder / home / "report.html").is_file()
    return StepRow(step, description, f"{home}/report.html" if has_report else "")

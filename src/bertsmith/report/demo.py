"""Report page of the demo: the initial model, the result of every step, and commands for next steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bertsmith.report import fit
from bertsmith.report.elastic import largest, size_grid, subnetwork_at
from bertsmith.report.page import format_duration, render
from bertsmith.report.pretraining import FilledMask
from bertsmith.shrinking.elastic_metadata import ElasticMetadata
from bertsmith.shrinking.fit.result import FitOutcome

STEPS = {  # description of each step, and the folder it writes
    "pretrain": ("Learn a vocabulary and pre-train a small BERT on the messages of a support desk", "encoder"),
    "look": ("Fill masks and find similar messages before any training", None),
    "finetune": ("Fine-tune on labelled messages to predict their subject", "classifier"),
    "shrink": ("Sort heads and neurons by importance and distil the whole model into every size", "elastic"),
    "fit": ("Measure sizes, engines and precisions on this machine; choose the best within the budget", "fitted"),
    "export": ("Export the chosen size to ONNX, compare its outputs and measure its latency", "onnx"),
}
HALF = 0.5


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
class OnnxFacts:
    """The exported graph."""

    subnet: Mapping[str, float]
    bytes: int
    precision: str
    latency_ms: float
    largest_difference: float


@dataclass(frozen=True)
class DemoReport:
    """Contents of the page."""

    folder: Path
    title: str
    steps: Sequence[DemoStep]
    look: Look
    metric: str
    score: float
    """Score of the fine-tuned model on dev."""
    train_rows: int
    dev_rows: int
    subjects: int
    """Number of labels."""
    elastic: ElasticMetadata
    fitted: FitOutcome
    exported: OnnxFacts
    answers: Sequence[tuple[str, str]]
    """Messages and the predictions of the fitted model."""
    commands: Sequence[str]


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
        headline=fit.headline(report.fitted),
        duration=format_duration(sum(step.seconds for step in report.steps)),
        metrics=_metrics(report),
        model_facts=_model_facts(report.look.model),
        front=fit.front_chart(report.fitted),
        sizes=size_grid(report.elastic),
        steps=[_step_row(report.folder, step) for step in report.steps],
        export_facts=_export_facts(report),
        filled=[FilledMask(one.text, tuple(one.tokens)) for one in report.look.filled],
    )


def _metrics(report: DemoReport) -> dict[str, str]:
    """Return the score after every step."""
    whole, half = largest(report.elastic), subnetwork_at(report.elastic, HALF, HALF)
    scores = {"Nearest neighbour, no training": report.look.alike, "Fine-tuned": report.score}
    scores["Elastic, whole"] = whole.score
    if half is not None:
        scores["Elastic, half the width and depth"] = half.score
    if report.fitted.score is not None:
        scores["Fitted to the budget"] = report.fitted.score
    return {name: f"{score:.1f}" for name, score in scores.items()}


def _model_facts(model: NetworkFacts) -> dict[str, str]:
    facts = {
        "Model": model.name,
        "Network": f"{model.family}, {model.layers} × {model.width}",
        "Parameters": f"{model.parameters / 1e6:.1f} M",
        "Vocabulary": f"{model.vocabulary:,} tokens",
    }
    if model.generator_parameters is not None:
        facts["Generator, fills masks"] = f"{model.generator_parameters / 1e6:.1f} M"
    return facts


def _export_facts(report: DemoReport) -> dict[str, str]:
    exported = report.exported
    return {
        "Folder": f"{report.folder.name}/onnx",
        "Size": f"width {exported.subnet['width']:g}, depth {exported.subnet['depth']:g}",
        "model.onnx": f"{exported.bytes / 1e6:.1f} MB, {exported.precision}",
        "Median latency": f"{exported.latency_ms:.2f} ms in ONNX Runtime",
        "Largest error": f"{exported.largest_difference:.0e} of the largest output",
        "Requires": "onnxruntime and tokenizers, no PyTorch",
    }


def _step_row(folder: Path, step: DemoStep) -> StepRow:
    description, home = STEPS[step.name]
    has_report = home is not None and (folder / home / "report.html").is_file()
    return StepRow(step, description, f"{home}/report.html" if has_report else "")

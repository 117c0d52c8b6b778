"""The steps of the demo: two ways to begin with, one to go on."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bertsmith.shrinking.fit.measure import Conditions

QUESTIONS = (
    "where is my parcel, it should have been here on monday",
    "you took the money twice for the same order",
    "the lamp has a crack right down the middle",
    "i cannot log in any more, it says my password is wrong",
)
PRETRAIN: dict[str, Any] = {
    "model": {
        "preset": "bert-tiny",
        "overrides": {"layers": 4, "heads": 4, "longest": 64, "dropout": 0.0, "deviation": 0.05},
    },
    "sequences": {"length": 64, "micro_tokens": 1024},
    "objective": {"kind": "masked_lm", "masking": {"rate": 0.2}},
    "batch": {"tokens": 1024},
    "optimizer": {"learning_rate": 1e-3},
    "schedule": {"kind": "wsd", "warmup": 0.05, "decay": 0.3},
    "run": {"evaluate_every": 200, "checkpoint_every": 1000},
}
WIDTHS = (1.0, 0.5, 0.25)
RUNS = 60  # calls of one measurement
SECONDS = 10.0
FIT = ("measure.repeats=3", f"measure.runs={RUNS}", "measure.table_runs=20", "measure.finalists=2")


@dataclass(frozen=True)
class Way:
    """One of the two ways: how it begins, and the settings of the steps that both share."""

    title: str
    steps: Mapping[str, "Work"]
    masks: tuple[str, ...]
    """Sentences for the model to fill."""
    epochs: float
    """Of the fine-tuning."""
    elastic_share: float
    """Of these for each stage of the elastic training …"""
    least_elastic: float
    """… and the fewest."""
    finetune: tuple[str, ...]
    shrink: tuple[str, ...]
    engines: tuple[str, ...]
    """What may run the model that fits."""
    share: float
    """Of the latency of the whole network, what it may take."""
    small_mb: float
    """A budget that it takes a smaller network to keep."""
    others: tuple[str, ...]
    """Commands to try besides those on what the demo made; {folder} is its own, {latency} that of the ONNX graph."""


@dataclass(frozen=True)
class Journey:
    """What all steps of one demo know."""

    folder: Path
    way: Way
    start: str
    """The model that is fine-tuned: a bundled name or a folder."""
    steps: int
    epochs: float


Work = Callable[[Journey, Mapping[str, Any]], dict[str, Any]]
"""A step: from the journey and the figures of the steps before to figures of its own."""


def pretrained(journey: Journey, before: Mapping[str, Any]) -> dict[str, Any]:
    """Text → vocabulary → corpus → a small encoder."""
    from bertsmith.runs.corpus import corpus
    from bertsmith.runs.pretrain import pretrain
    from bertsmith.runs.tokenizer import tokenizer
    from bertsmith.text.support_desk import messages
    from bertsmith.toml import override, to_toml

    folder = journey.folder
    text, recipe = folder / "messages.jsonl", folder / "recipe.toml"
    text.write_text("".join(json.dumps({"text": message}) + "\n" for message in messages()), encoding="utf-8")
    tokenizer([text], out=folder / "tokenizer", vocabulary=1500, lowercase=True)
    corpus([text], tokenizer=folder / "tokenizer", out=folder / "corpus", held_out=0.03)
    recipe.write_text(to_toml(override(PRETRAIN, [f"run.steps={journey.steps}"])), encoding="utf-8")
    return pretrain(recipe, data=folder / "corpus", out=Path(journey.start)).to_json()


def looked(journey: Journey, before: Mapping[str, Any]) -> dict[str, Any]:
    """What the encoder can do before it is trained for anything: fill masks, and tell which messages are alike."""
    from bertsmith.checkpoint.store import load
    from bertsmith.commands.demo_look import described, filled, neighbours, print_look
    from bertsmith.text.support_desk import support_desk

    model = load(journey.start)
    figures = {
        "model": described(model, journey.start),
        "filled": filled(model, journey.way.masks),
        **neighbours(model, QUESTIONS, support_desk("train"), support_desk("dev")),
    }
    print_look(figures)
    return figures


def finetuned(journey: Journey, before: Mapping[str, Any]) -> dict[str, Any]:
    """The encoder learns what messages are about."""
    from bertsmith.runs.finetune import finetune
    from bertsmith.text.support_desk import support_desk

    data = journey.folder / "data"
    data.mkdir()
    for part in ("train", "dev"):
        rows = "".join(json.dumps(row) + "\n" for row in support_desk(part))
        (data / f"{part}.jsonl").write_text(rows, encoding="utf-8")
    return finetune(
        journey.start,
        data=str(data),
        out=journey.folder / "classifier",
        epochs=journey.epochs,
        set=list(journey.way.finetune),
    )


def made_elastic(journey: Journey, before: Mapping[str, Any]) -> dict[str, Any]:
    """One set of weights for every width and depth."""
    from bertsmith.runs.shrink import shrink

    folder, way = journey.folder, journey.way
    return shrink(
        folder / "classifier",
        data=str(folder / "data"),
        out=folder / "elastic",
        widths=_distinct(WIDTHS, folder / "classifier"),
        epochs=max(way.least_elastic, way.elastic_share * journey.epochs),
        set=list(way.shrink),
    ).to_json()


def _distinct(widths: Sequence[float], folder: Path) -> list[float]:
    """The widths that differ in a network: one of few heads or groups has no quarter of them."""
    from bertsmith.checkpoint.store import load
    from bertsmith.layers.subnet import Subnet
    from bertsmith.shrinking.fit.candidates import distinct_subnets

    units = load(folder).encoder.units
    return [subnet.width for subnet in distinct_subnets([Subnet(width=width) for width in widths], units)]


def fitted(journey: Journey, before: Mapping[str, Any]) -> Any:
    """The best that takes at most a share of the time of the whole network in PyTorch."""
    from bertsmith.checkpoint.source import FineTunedSource
    from bertsmith.runs.fit import fit
    from bertsmith.shrinking.fit.search import prepare
    from bertsmith.shrinking.fit.settings import BudgetConfig, FitSettings

    elastic, data = journey.folder / "elastic", str(journey.folder / "data")
    # timed as the search will time it: what elastic.json has was measured while this process was busy
    any_budget = BudgetConfig(latency_ms=1.0)  # only how it measures is asked
    settings = FitSettings(model=FineTunedSource(folder=str(elastic)), data=data, budget=any_budget)
    conditions = prepare(settings).conditions
    return fit(
        elastic,
        data=data,
        out=journey.folder / "fitted",
        latency_ms=max(0.1, round(journey.way.share * _median(elastic, conditions), 2)),
        percentile=50,
        engine=list(journey.way.engines),
        precision=["float32", "int8"],
        subnets="even",
        set=list(FIT),
    )


def exported(journey: Journey, before: Mapping[str, Any]) -> dict[str, Any]:
    """The sub-network that was chosen, or came nearest, as a graph that needs no PyTorch, and how quick that is."""
    from bertsmith.runs.exchange import export_model
    from bertsmith.shrinking.fit.measure import Conditions

    found, folder = before["fit"], journey.folder / "onnx"
    chosen = found["chosen"] or found["nearest"]
    cut = {name: chosen["subnet"][name] for name in ("width", "depth")}
    figures = export_model(journey.folder / "elastic", out=folder, to="onnx", **cut)
    conditions = Conditions.parse(found["conditions"])  # so that it can be compared with what fit measured
    return {**figures.to_json(), "subnet": cut, "latency_ms": _median(folder, conditions)}


def _median(folder: Path, conditions: "Conditions") -> float:
    """The milliseconds that a fresh process takes for an answer."""
    from bertsmith.shrinking.fit import measure

    timing = measure.in_fresh_process([folder], conditions, RUNS, SECONDS)
    return max(found["p50"] for found in timing.latencies[0].values())


def fitted_folder(journey: Journey, figures: Mapping[str, Any]) -> Path:
    """The model that keeps the budget, or all of the elastic one where nothing does."""
    return journey.folder / ("fitted" if figures["fit"]["fits"] else "elastic")


def gained(name: str, figures: Mapping[str, Any]) -> str:
    """What a step gave, with a figure."""
    if name == "pretrain":
        loss, level = figures["held_out"]["loss"], figures["unigram_level"]
        return f"held-out loss {loss:.2f}, word frequencies alone {level:.2f}"
    if name == "look":
        return f"the nearest labelled message is about the same for {figures['alike']:.1f} % of dev"
    if name == "finetune":
        return f"{figures['metric']} {figures['score']:.1f} on dev"
    if name == "shrink":
        sizes = f"{len(figures['grid'])} sizes in one set of weights"
        return f"{sizes}, {figures['metric']} {figures['score']:.1f} in the mean"
    if name == "fit":
        chosen = figures["chosen"] or figures["nearest"]
        return f"{chosen['words']}: {chosen['latency_ms']:.2f} ms"
    return f"{figures['latency_ms']:.2f} ms, off by {figures['largest_difference']:.0e} of its largest output at most"


GO_ON: dict[str, Work] = {"finetune": finetuned, "shrink": made_elastic, "fit": fitted, "export": exported}
FROM_BOX = Way(
    title="From the model in the box to one that fits",
    steps={"look": looked, **GO_ON},
    masks=(
        "he studied law at the [MASK] of vienna.",
        "the river flows into the [MASK] sea.",
        "the [MASK] is the largest planet in the solar system.",
        "the song was released in [MASK] 1998.",
    ),
    epochs=2.5,  # with three, and a fifth of them for each elastic stage, the whole took 5 min 34 s
    elastic_share=0.16,
    least_elastic=0.1,
    finetune=("sequences.length=64", "batch.examples=32"),  # all else is the family's
    shrink=("grid.depths=[1, 0.5]", "grid.sample=1", "batch.examples=16", "importance.examples=256"),
    engines=("torch",),  # to write a dozen ONNX graphs of twelve layers takes minutes; "what to try next" does it
    share=0.6,  # half the layers take about half the time, and must keep the budget with room to spare
    small_mb=8,
    others=(
        "bertsmith fit {folder}/elastic --data {folder}/data --out faster --latency-ms {latency} --percentile 50",
        "bertsmith finetune convbert-small --data {folder}/data --out fresh",
        "bertsmith demo --from-scratch --out {folder}-from-scratch",
    ),
)
FROM_SCRATCH = Way(
    title="From raw text to a model that fits",
    steps={"pretrain": pretrained, "look": looked, **GO_ON},
    masks=("i want my [MASK] back.", "the [MASK] arrived broken.", "how do i reset my [MASK]?"),
    epochs=6.0,
    elastic_share=0.5,
    least_elastic=1.0,
    finetune=(
        'head.pooling="mean"',
        "model.overrides.dropout=0.1",
        "encoder.layer_decay=1.0",
        "sequences.length=64",
        "optimizer.learning_rate=7e-4",
    ),
    shrink=("grid.depths=[1, 0.5]", "optimizer.learning_rate=4e-4"),
    engines=("torch", "onnxruntime"),
    share=0.5,
    small_mb=1,
    others=("bertsmith demo --out {folder}-from-the-box",),
)

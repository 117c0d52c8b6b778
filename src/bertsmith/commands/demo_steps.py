"""The steps of the demo: two ways to begin with, one to go on."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
ENGINES = ("torch", "onnxruntime")
FIT = ("measure.repeats=3", "measure.runs=60", "measure.table_runs=20", "measure.finalists=2")


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
    small_mb: float
    """A budget that it takes a smaller network to keep."""
    others: tuple[str, ...]
    """Commands to try besides those on what the demo made; {folder} stands for its own."""


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
    from bertsmith.commands.corpus import corpus
    from bertsmith.commands.pretrain import pretrain
    from bertsmith.commands.tokenizer import tokenizer
    from bertsmith.text.support_desk import messages
    from bertsmith.toml import override, to_toml

    folder = journey.folder
    text, recipe = folder / "messages.jsonl", folder / "recipe.toml"
    text.write_text("".join(json.dumps({"text": message}) + "\n" for message in messages()), encoding="utf-8")
    tokenizer([text], out=folder / "tokenizer", vocabulary=1500, lowercase=True)
    corpus([text], tokenizer=folder / "tokenizer", out=folder / "corpus", held_out=0.03)
    recipe.write_text(to_toml(override(PRETRAIN, [f"run.steps={journey.steps}"])), encoding="utf-8")
    return pretrain(recipe, data=folder / "corpus", out=Path(journey.start))


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
    from bertsmith.commands.finetune import finetune
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
    from bertsmith.commands.shrink import shrink

    folder, way = journey.folder, journey.way
    epochs = max(way.least_elastic, way.elastic_share * journey.epochs)
    return shrink(
        folder / "classifier", data=str(folder / "data"), out=folder / "elastic", epochs=epochs, set=list(way.shrink)
    )


def fitted(journey: Journey, before: Mapping[str, Any]) -> dict[str, Any]:
    """The best that takes at most half the time of the whole network, in PyTorch or ONNX Runtime."""
    from bertsmith.commands.fit import fit
    from bertsmith.report.elastic import largest
    from bertsmith.shrinking.record import read_record

    elastic = journey.folder / "elastic"
    return fit(
        elastic,
        data=str(journey.folder / "data"),
        out=journey.folder / "fitted",
        latency_ms=max(0.1, round(largest(read_record(elastic)).latency_ms / 2, 2)),
        percentile=50,
        engine=list(ENGINES),
        precision=["float32", "int8"],
        subnets="even",
        set=list(FIT),
    )


def exported(journey: Journey, before: Mapping[str, Any]) -> dict[str, Any]:
    """The sub-network that was chosen, or came nearest, as a graph that needs no PyTorch."""
    from bertsmith.commands.exchange import export_model

    chosen = before["fit"]["chosen"] or before["fit"]["nearest"]
    cut = {name: chosen["subnet"][name] for name in ("width", "depth")}
    return {**export_model(journey.folder / "elastic", out=journey.folder / "onnx", to="onnx", **cut), "subnet": cut}


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
    return f"off by {figures['largest_difference']:.0e} of its largest output at most"


GO_ON: dict[str, Work] = {"finetune": finetuned, "shrink": made_elastic, "fit": fitted, "export": exported}
FROM_BOX = Way(
    title="From the model in the box to one that fits",
    steps={"look": looked, **GO_ON},
    masks=(
        "the capital of france is [MASK].",
        "he studied law at the [MASK] of vienna.",
        "the river flows into the north [MASK].",
        "the song was released in [MASK] 1998.",
    ),
    epochs=2.0,
    elastic_share=0.25,
    least_elastic=0.1,
    # rate, decay over the layers and batch are those of the model's family
    finetune=('head.pooling="mean"', "sequences.length=64", "batch.examples=32"),
    shrink=("grid.widths=[1, 0.5, 0.25]", "grid.depths=[1, 0.5]", "grid.sample=1", "batch.examples=16"),
    small_mb=8,
    others=(
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
    shrink=("grid.widths=[1, 0.5, 0.25]", "grid.depths=[1, 0.5]", "optimizer.learning_rate=4e-4"),
    small_mb=1,
    others=("bertsmith demo --out {folder}-from-the-box",),
)

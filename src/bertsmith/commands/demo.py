"""`bertsmith demo`: the whole way from raw text to a model that fits a budget, with nothing but Python."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bertsmith.report.demo_page import Step

SENTENCES = ("i want my [MASK] back.", "the [MASK] arrived broken.", "how do i reset my [MASK]?")
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
FINETUNE = (
    'head.pooling="mean"',
    "model.overrides.dropout=0.1",
    "encoder.layer_decay=1.0",
    "sequences.length=64",
    "optimizer.learning_rate=7e-4",
)
SHRINK = ("grid.widths=[1, 0.5, 0.25]", "grid.depths=[1, 0.5]", "optimizer.learning_rate=4e-4")
ENGINES = ("torch", "onnxruntime")
FIT = ("measure.repeats=3", "measure.runs=60", "measure.table_runs=20", "measure.finalists=2")


def demo(*, out: Path = Path("demo"), steps: int = 400, epochs: float = 6, force: bool = False) -> dict[str, Any]:
    """Go the whole way on a machine with nothing but Python: about four minutes on two cores, no data, no GPU.

    A vocabulary is learned and a small BERT pre-trained on the messages of a support desk; it learns to tell what they
    are about, becomes elastic, and is fitted to half the latency it has; report.html shows what came of it.

    Parameters
    ----------
    out
        The folder to write: report.html, the model that fits, and everything on the way to it.
    steps
        Optimiser steps of the pre-training.
    epochs
        How often fine-tuning sees every message; elastic training sees them about half as often in each stage.
    force
        Replace what --out holds.
    """
    from rich.console import Console

    from bertsmith.commands.output import claim, write_result
    from bertsmith.report.demo_page import demo_page

    console, begin = Console(), time.perf_counter()
    folder = claim(Path(out), force)
    made: list[Step] = []
    figures: dict[str, Any] = {}
    for name, work in (("pretrain", _pretrain), ("finetune", _finetune), ("shrink", _shrink), ("fit", _fit)):
        with _timed(name, console) as clock:
            figures[name] = work(folder, steps, epochs)
        if not figures[name].get("is_finished", True):
            console.print("the demo was interrupted; start it anew with --force")
            return figures
        made.append(_step(name, figures[name], clock()))
    with _timed("export", console) as clock:
        figures["export"] = _export(folder, figures["fit"])
    made.append(_step("export", figures["export"], clock()))
    told = _told(folder, figures["fit"])
    report = folder / "report.html"
    report.write_text(demo_page(folder, made, figures["fit"], **told), encoding="utf-8")
    seconds = round(time.perf_counter() - begin, 1)
    candidates = len(figures["fit"].pop("candidates"))
    result = {**figures, "candidates": candidates, "seconds": seconds, "report": str(report)}
    write_result(folder, result)
    console.rule()
    console.print(f"[bold]report: {report}[/] ({seconds:.0f} s)", highlight=False)
    for command in told["commands"]:
        console.print(f"  {command}", markup=False, highlight=False, soft_wrap=True)
    return result


@contextmanager
def _timed(name: str, console: Any) -> Iterator[Any]:
    """Shows which part begins; gives a function that tells its seconds."""
    console.rule(name)
    begin = time.perf_counter()
    yield lambda: time.perf_counter() - begin


def _pretrain(folder: Path, steps: int, epochs: float) -> dict[str, Any]:
    """Text → vocabulary → corpus → a small encoder."""
    from bertsmith.commands.corpus import corpus
    from bertsmith.commands.pretrain import pretrain
    from bertsmith.commands.tokenizer import tokenizer
    from bertsmith.text.support_desk import messages
    from bertsmith.toml import override, to_toml

    text, recipe = folder / "messages.jsonl", folder / "recipe.toml"
    text.write_text("".join(json.dumps({"text": message}) + "\n" for message in messages()), encoding="utf-8")
    tokenizer([text], out=folder / "tokenizer", vocabulary=1500, lowercase=True)
    corpus([text], tokenizer=folder / "tokenizer", out=folder / "corpus", held_out=0.03)
    recipe.write_text(to_toml(override(PRETRAIN, [f"run.steps={steps}"])), encoding="utf-8")
    return pretrain(recipe, data=folder / "corpus", out=folder / "encoder")


def _finetune(folder: Path, steps: int, epochs: float) -> dict[str, Any]:
    """The encoder learns what messages are about."""
    from bertsmith.commands.finetune import finetune
    from bertsmith.text.support_desk import support_desk

    data = folder / "data"
    data.mkdir()
    for part in ("train", "dev"):
        rows = "".join(json.dumps(row) + "\n" for row in support_desk(part))
        (data / f"{part}.jsonl").write_text(rows, encoding="utf-8")
    return finetune(folder / "encoder", data=str(data), out=folder / "classifier", epochs=epochs, set=list(FINETUNE))


def _shrink(folder: Path, steps: int, epochs: float) -> dict[str, Any]:
    """One set of weights for every width and depth."""
    from bertsmith.commands.shrink import shrink

    data, half = str(folder / "data"), max(1.0, round(epochs / 2))
    return shrink(folder / "classifier", data=data, out=folder / "elastic", epochs=half, set=list(SHRINK))


def _fit(folder: Path, steps: int, epochs: float) -> dict[str, Any]:
    """The best that takes at most half the time of the whole network, in PyTorch or ONNX Runtime."""
    from bertsmith.commands.fit import fit
    from bertsmith.report.elastic import largest
    from bertsmith.shrinking.record import read_record

    whole = largest(read_record(folder / "elastic")).latency_ms
    return fit(
        folder / "elastic",
        data=str(folder / "data"),
        out=folder / "fitted",
        latency_ms=max(0.1, round(whole / 2, 2)),
        percentile=50,
        engine=list(ENGINES),
        precision=["float32", "int8"],
        subnets="even",
        set=list(FIT),
    )


def _export(folder: Path, fitted: dict[str, Any]) -> dict[str, Any]:
    """The sub-network that was chosen, or came nearest, as a graph that needs no PyTorch."""
    from bertsmith.commands.exchange import export_model

    chosen = fitted["chosen"] or fitted["nearest"]
    cut = {name: chosen["subnet"][name] for name in ("width", "depth")}
    return export_model(folder / "elastic", out=folder / "onnx", to="onnx", **cut)


def _step(name: str, figures: dict[str, Any], seconds: float) -> "Step":
    """A part of the way, as the page tells it."""
    from bertsmith.report.demo_page import Step

    if name == "pretrain":
        loss, level = figures["held_out"]["loss"], figures["unigram_level"]
        gained = f"held-out loss {loss:.2f}, word frequencies alone {level:.2f}"
    elif name == "finetune":
        gained = f"{figures['metric']} {figures['score']:.1f} on dev"
    elif name == "shrink":
        sizes = f"{len(figures['grid'])} sizes in one set of weights"
        gained = f"{sizes}, {figures['metric']} {figures['score']:.1f} in the mean"
    elif name == "fit":
        chosen = figures["chosen"] or figures["nearest"]
        gained = f"{chosen['words']}: {chosen['latency_ms']:.2f} ms"
    else:
        gained = f"off by {figures['largest_difference']:.0e} of its largest output at most"
    return Step(name, gained, seconds)


def _told(folder: Path, fitted: dict[str, Any]) -> dict[str, Any]:
    """What else the page tells: filled masks, answers, and commands to go on with."""
    from bertsmith.checkpoint.store import load
    from bertsmith.tasks.predictor import Predictor

    encoder = load(folder / "encoder")
    filled = [(text, [piece for piece, _ in encoder.fill_mask(text)[0][:3]]) for text in SENTENCES]
    model = folder / ("fitted" if fitted["fits"] else "elastic")
    answers = list(zip(QUESTIONS, Predictor.load(model).predict(QUESTIONS), strict=True))
    commands = (
        f"bertsmith serve {folder}/elastic --floor 0.95",
        f'bertsmith predict {model} --text "when do you open on sundays" --out answers',
        f"bertsmith fit {folder}/elastic --data {folder}/data --out smaller --size-mb 1",
        f"bertsmith shrink {folder}/classifier --data {folder}/data --out pruned --method prune --keep 0.5",
    )
    return {"filled": filled, "answers": answers, "commands": commands}

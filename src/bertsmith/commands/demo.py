"""`bertsmith demo`: the whole way on a machine with nothing but Python, in about a minute."""

import json
from pathlib import Path
from typing import Any

SENTENCES = (
    "Clara is a baker and works in the [MASK].",
    "The fisherman takes the [MASK] and catches the fish.",
    "It is winter, the [MASK] does not stop, and Paul puts on his gloves.",
    "The potter takes the wheel and shapes the bowl from [MASK].",
    "Her [MASK] barks until somebody brings the bone.",
)

RECIPE: dict[str, Any] = {
    "model": {
        "preset": "bert-tiny",
        "overrides": {"layers": 3, "heads": 4, "longest": 64, "dropout": 0.0, "deviation": 0.05},
    },
    "sequences": {"length": 64, "micro_tokens": 2048},
    "objective": {"kind": "masked_lm", "masking": {"rate": 0.2}},
    "batch": {"tokens": 2048},
    "optimizer": {"learning_rate": 2e-3},
    "schedule": {"kind": "wsd", "warmup": 0.05, "decay": 0.3},
    "run": {"steps": 900, "evaluate_every": 100, "checkpoint_every": 450},
}


def demo(*, out: Path = Path("demo"), steps: int = 900, force: bool = False) -> dict[str, Any]:
    """Learn a vocabulary, pre-train a small BERT, fill masks, and write a report; needs no data and no GPU.

    Parameters
    ----------
    out
        The folder to write: report.html, the model, and everything on the way to it.
    steps
        Optimiser steps of the pre-training.
    force
        Replace what --out holds.
    """
    from rich.console import Console

    from bertsmith.checkpoint.store import load
    from bertsmith.commands.corpus import corpus
    from bertsmith.commands.output import claim, write_result
    from bertsmith.commands.pretrain import pretrain
    from bertsmith.commands.pretrain_report import write_report
    from bertsmith.commands.tokenizer import tokenizer
    from bertsmith.report.attention import attention_fragment
    from bertsmith.report.maps import maps_of
    from bertsmith.report.pretraining import FilledMask
    from bertsmith.text.small_world import small_world
    from bertsmith.toml import override, to_toml

    console = Console()
    folder = claim(Path(out), force)
    console.rule("text")
    text = folder / "stories.jsonl"
    with text.open("w", encoding="utf-8") as file:
        for story in small_world():
            file.write(json.dumps({"text": story}) + "\n")
    console.print(f"stories told by a small grammar: {text.stat().st_size / 1e6:.1f} MB in {text}", highlight=False)
    console.rule("tokenizer")
    tokenizer([text], out=folder / "tokenizer", vocabulary=600)
    console.rule("corpus")
    corpus([text], tokenizer=folder / "tokenizer", out=folder / "corpus", held_out=0.03)
    console.rule("pretrain")
    recipe = folder / "recipe.toml"
    recipe.write_text(to_toml(override(RECIPE, [f"run.steps={steps}"])), encoding="utf-8")
    figures = pretrain(recipe, data=folder / "corpus", out=folder / "model")
    if not figures["is_finished"]:
        console.print("the demo was interrupted; start it anew with --force")
        return figures
    console.rule("fill masks")
    model = load(folder / "model")
    filled = tuple(FilledMask(sentence, tuple(model.fill_mask(sentence)[0])) for sentence in SENTENCES)
    for item in filled:
        guesses = ", ".join(f"{piece} {share:.0%}" for piece, share in item.candidates[:3])
        console.print(f"{item.text}  →  [bold]{guesses}[/]", highlight=False)
    report = folder / "report.html"
    body, _, _ = attention_fragment(*maps_of(model, SENTENCES[2].replace("[MASK]", "snow")))
    commands = (
        f'bertsmith inspect {folder}/model --text "The potter takes the wheel." --out maps',
        f"bertsmith export {folder}/model --out hf-model",
        f"bertsmith pretrain {recipe} --data {folder}/corpus --out longer --set run.steps=3000",
    )
    write_report(
        folder / "model",
        report,
        title="A small BERT, made on this machine",
        filled=filled,
        attention=body,
        commands=commands,
    )
    result = figures | {"filled": {item.text: list(item.candidates) for item in filled}, "report": str(report)}
    write_result(folder, result)
    console.rule()
    console.print(f"[bold]report: {report}[/]", highlight=False)
    return result

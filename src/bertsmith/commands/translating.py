"""What commands that translate share: the model, the columns it was trained on, its figures on some pairs."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertsmith.commands.run import RECIPE
from bertsmith.errors import InputError

if TYPE_CHECKING:
    from bertsmith.batches.pairs import PairConfig
    from bertsmith.models.decoding import GenerationConfig
    from bertsmith.models.model import Model
    from bertsmith.models.seq2seq import Seq2Seq
    from bertsmith.text.task_folder import TextPairs

SAMPLES = 4  # translations that are printed


@dataclass(frozen=True)
class Evaluation:
    """The figures of a model on some pairs, and what it wrote."""

    figures: dict[str, Any]
    hypotheses: list[str]


def load_translator(folder: Path, device: str) -> "Seq2Seq":
    """The encoder-decoder in a folder, on a device."""
    import torch

    from bertsmith.checkpoint.store import load
    from bertsmith.models.seq2seq import Seq2Seq

    if device == "cuda" and not torch.cuda.is_available():
        raise InputError('device is "cuda" and this machine has no GPU that PyTorch can use; allowed: auto, cpu')
    is_cuda = device != "cpu" and torch.cuda.is_available()
    model = load(folder, device="cuda" if is_cuda else "cpu")
    if not isinstance(model, Seq2Seq):
        raise InputError(
            f"model {str(folder)!r} is a {model.config.family} without a decoder; this version evaluates and predicts "
            "with models that translate only"
        )
    model.require_tokenizer()
    return model


def generation(beam: int, length_penalty: float, extra_length: int) -> "GenerationConfig":
    """The settings of the search from flags."""
    from bertsmith.models.decoding import GenerationConfig

    return GenerationConfig.parse(
        {"beam": beam, "length_penalty": length_penalty, "extra_length": extra_length}, source="flags"
    )


def recorded_columns(folder: Path) -> tuple[str | None, str | None]:
    """The columns a model was trained on, where its folder says so."""
    from bertsmith.toml import read_toml

    if not (folder / RECIPE).is_file():
        return None, None
    recipe = read_toml(folder / RECIPE)
    return recipe.get("source"), recipe.get("target")


def evaluated(
    model: "Model", pairs: "TextPairs", search: "GenerationConfig", config: "PairConfig", *, show: bool
) -> Evaluation:
    """How well a model translates some pairs."""
    import time

    from bertsmith.models.seq2seq import Seq2Seq
    from bertsmith.training.translation_metrics import forced_figures, translations, written_figures

    assert isinstance(model, Seq2Seq)
    forced = forced_figures(model, pairs, config)
    begin = time.perf_counter()
    hypotheses = translations(model, pairs.sources, search, show=show)
    seconds = time.perf_counter() - begin
    figures = {
        **written_figures(hypotheses, pairs.targets),
        **forced,
        "evaluated_pairs": len(pairs),
        "search": search.plain(),
        "translation_seconds": round(seconds, 2),
    }
    return Evaluation(figures, hypotheses)


def write_translations(path: Path, pairs: "TextPairs", hypotheses: Sequence[str]) -> None:
    """Writes sources, references and hypotheses, one object a line."""
    with path.open("w", encoding="utf-8") as file:
        for row in zip(pairs.sources, pairs.targets, hypotheses, strict=True):
            named = dict(zip(("source", "reference", "hypothesis"), row, strict=True))
            file.write(json.dumps(named, ensure_ascii=False) + "\n")


def print_evaluation(part: str, pairs: "TextPairs", evaluation: Evaluation) -> None:
    """Prints the figures and a few translations."""
    from rich.console import Console

    from bertsmith.training.translation_metrics import NO_BLEU

    console, figures = Console(), evaluation.figures
    step = max(1, len(pairs) // SAMPLES)
    for index in range(0, len(pairs), step)[:SAMPLES]:
        console.print(f"  {pairs.sources[index]}", markup=False, highlight=False, soft_wrap=True)
        console.print(f"→ {evaluation.hypotheses[index]}", markup=False, highlight=False, soft_wrap=True, style="bold")
        console.print(f"  ({pairs.targets[index]})", markup=False, highlight=False, soft_wrap=True)
    bleu = f"BLEU {figures['bleu']:.2f} ({figures['signature']})" if "bleu" in figures else NO_BLEU
    console.print(
        f"{part}: {bleu}, exact match {figures['exact_match']:.1f} %, perplexity {figures['perplexity']:.2f}, "
        f"loss {figures['loss']:.3f}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )

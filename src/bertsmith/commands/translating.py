"""What commands that translate share: the model, the settings it was trained with, its figures on some pairs."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertsmith.commands.run import RECIPE
from bertsmith.errors import InputError

if TYPE_CHECKING:
    from bertsmith.data.pairs import PairConfig
    from bertsmith.models.model import Model
    from bertsmith.models.seq2seq import GenerationConfig, Seq2Seq
    from bertsmith.text.tables import TextPairs
    from bertsmith.training.translation import TranslationSettings

SAMPLES = 4  # translations that are printed


@dataclass(frozen=True)
class Evaluation:
    """The figures of a model on some pairs, and what it wrote."""

    metrics: dict[str, Any]
    hypotheses: list[str]


def load_translator(folder: Path, device: str) -> "Seq2Seq":
    """The encoder-decoder in a folder, on a device."""
    from bertsmith.checkpoint.store import load
    from bertsmith.models.seq2seq import Seq2Seq
    from bertsmith.training.hardware import device_type

    model = load(folder, device=device_type(device))
    if not isinstance(model, Seq2Seq):
        raise InputError(
            f"model {str(folder)!r} has no decoder (its family is {model.config.family!r}) and no task.json, so it "
            "was not fine-tuned; use bertsmith finetune"
        )
    model.require_tokenizer()
    return model


def recorded(folder: Path) -> "TranslationSettings | None":
    """The settings a model that translates was trained with, where its folder says so."""
    from bertsmith.toml import read_toml
    from bertsmith.training.translation import TranslationSettings

    path = folder / RECIPE
    return TranslationSettings.parse(read_toml(path), source=str(path)) if path.is_file() else None


def search_with(
    settings: "TranslationSettings | None", beam: int | None, length_penalty: float | None, extra_length: int | None
) -> "GenerationConfig":
    """The recorded search, or the default one, with the flags that are given; --beam asks for a beam search."""
    from bertsmith.models.seq2seq import GenerationConfig

    flags = {"beam": beam, "length_penalty": length_penalty, "extra_length": extra_length}
    given = {name: value for name, value in flags.items() if value is not None}
    search = GenerationConfig() if settings is None else settings.generation
    method = search.method if beam is None else "beam"
    return GenerationConfig.parse({**search.plain(), "method": method, **given}, source="flags")


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

    console, figures = Console(), evaluation.metrics
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

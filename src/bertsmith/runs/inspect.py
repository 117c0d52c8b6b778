"""`bertsmith inspect`: attention maps of a model on one text, or averaged over many texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bertsmith.bundled import model_folder
from bertsmith.checkpoint.store import load
from bertsmith.errors import InputError
from bertsmith.layers.mixers.base import MAP_KINDS
from bertsmith.report.attention import describe_heads, render_attention_page
from bertsmith.report.maps import (
    NEAR,
    HeadStatistics,
    ScoreStatistics,
    TextMap,
    compute_maps,
    map_statistics,
    text_maps,
)
from bertsmith.report.pictures import NO_PICTURE, has_matplotlib, save_attention_picture, save_study_picture
from bertsmith.report.study import MapStudy, StudyStatistics, study_statistics, study_texts
from bertsmith.report.study_page import render_study_page
from bertsmith.runs.flags import ForceFlag, OutFlag
from bertsmith.runs.output import check_out, claim, write_result
from bertsmith.runs.result import OneShotResult, print_plain
from bertsmith.text.readers import first_texts

SENTENCES, LENGTH = 1000, 64
HeadMetrics = Sequence[Sequence[HeadStatistics]] | Sequence[Sequence[ScoreStatistics]]


@dataclass(frozen=True)
class MapSummary:
    """Statistics of every head for one kind of map on one text, by layer."""

    kind: str
    """"weights" or "scores"."""
    heads: list[int]
    metrics: HeadMetrics

    @classmethod
    def of(cls, tokens: list[str], shown: TextMap) -> "MapSummary":
        return cls("scores" if shown.is_score else "weights", shown.heads, map_statistics(tokens, shown))


@dataclass(frozen=True, kw_only=True)
class TextMapsResult(OneShotResult):
    """The maps of a model on one text."""

    tokens: list[str]
    layers: int
    heads: int
    files: list[str]
    metrics: HeadMetrics
    """Statistics of every head for the first map."""
    maps: dict[str, MapSummary]


@dataclass(frozen=True, kw_only=True)
class StudyResult(OneShotResult):
    """The maps of one or more models, averaged over many texts."""

    texts: int
    source: str
    length: int
    special_tokens: bool
    """Whether the averages include [CLS] and [SEP]."""
    files: list[str]
    models: dict[str, StudyStatistics]


def inspect(
    model: list[str | Path],
    *,
    out: OutFlag[Path],
    text: str | None = None,
    pair: str | None = None,
    texts: Path | None = None,
    sentences: int | None = None,
    length: int | None = None,
    field: str | None = None,
    without_special: bool = False,
    force: ForceFlag = False,
) -> TextMapsResult | StudyResult:
    """Visualise what the heads of a model attend to.

    --text shows the attention map of every head on one text. --texts averages the maps over many texts and compares
    several models.

    Parameters
    ----------
    model
        A bundled model (small), or a Bertsmith or Hugging Face model folder; several with --texts.
    out
        Output folder: attention.html and one picture per map, or study.html, study.png and maps.npz; and result.json.
        Pictures need matplotlib.
    text
        The text to show.
    pair
        Second text of a pair (the second segment), with --text.
    texts
        File of texts to average over: .txt with one text per line, .jsonl (both also .gz, .xz, .zst) or .parquet.
    sentences
        Number of texts to read from the file; 1000 by default.
    length
        Maximum tokens per text, including special tokens; longer texts are truncated. 64 by default.
    field
        Field or column with the text in .jsonl and .parquet files; "text" by default.
    without_special
        Exclude [CLS] and [SEP] from the averages, as queries and as keys.
    force
        Replace the contents of --out.
    """
    models, out = [model] if isinstance(model, str | Path) else list(model), Path(out)
    if (text is None) == (texts is None):
        problem = "neither --text nor --texts is given" if text is None else "--text and --texts are both given"
        raise InputError(f"{problem}; give one of them")
    if text is not None:
        extra = {"--sentences": sentences, "--length": length, "--field": field}
        extra["--without-special"] = without_special or None
        for flag, value in extra.items():
            if value is not None:
                raise InputError(f"{flag} is only allowed with --texts, not with --text")
        if len(models) != 1:
            raise InputError(f"--text needs exactly one model, not {len(models)}; compare models with --texts")
        return _inspect_text(models[0], text, pair, out, force)
    if pair is not None:
        raise InputError("--pair is only allowed with --text, not with --texts")
    assert texts is not None
    sentences, length = SENTENCES if sentences is None else sentences, LENGTH if length is None else length
    if sentences < 1:
        raise InputError(f"--sentences is {sentences}; allowed: 1 or more")
    source = Path(texts)
    if source.is_dir():
        raise InputError(f"--texts {str(source)!r} is a folder; give a file")
    rows = first_texts(source, sentences, field or "text")
    folders = [model_folder(name) for name in models]
    return _inspect_texts(folders, source, rows, out, length=length, counts_special=not without_special, force=force)


def _inspect_text(model: str | Path, text: str, pair: str | None, out: Path, force: bool) -> TextMapsResult:
    """Compute and write the maps of every head on one text."""
    loaded = load(model)
    tokens, maps = compute_maps(loaded, text, pair)
    folder = claim(out, force, model_folder(model))
    shown = text_maps(tokens, maps)
    encoder = loaded.config.encoder
    facts = {
        "model": str(model),
        "network": f"{loaded.config.family}, {len(encoder.layers)} layers of width {encoder.width}",
        "maps": ", ".join(text_map.label for text_map in shown),
        "tokens": str(len(tokens)),
    }
    page = render_attention_page(tokens, maps, title=text, facts=facts)
    (folder / "attention.html").write_text(page, encoding="utf-8")
    files = ["attention.html"]
    if has_matplotlib():
        for text_map in shown:
            save_attention_picture(tokens, text_map, folder / f"{text_map.name}.png", title=text)
            files.append(f"{text_map.name}.png")
    summaries = {text_map.name: MapSummary.of(tokens, text_map) for text_map in shown}
    result = TextMapsResult(
        tokens=tokens,
        layers=len(shown[0].layers),
        heads=max(shown[0].heads),
        files=files,
        metrics=summaries[shown[0].name].metrics,
        maps=summaries,
    )
    write_result(folder, result.to_json())
    print_plain(
        f"{result.layers} layers of {describe_heads(shown)}, {len(tokens)} tokens; written to {out}: {', '.join(files)}"
    )
    if not has_matplotlib():
        print_plain(NO_PICTURE)
    return result


def _inspect_texts(
    models: list[Path], source: Path, texts: list[str], out: Path, *, length: int, counts_special: bool, force: bool
) -> StudyResult:
    """Compute and write the average maps of one or more models."""
    check_out(out, force, source, *models)  # fail before minutes of computation
    studies = _study_models(models, texts, length, counts_special)
    folder = claim(out, force, source, *models)
    facts = {
        "texts": f"{len(texts):,} from {source.name}",
        "max length": f"{length} tokens",
        "special tokens": "included" if counts_special else "excluded",
    }
    (folder / "study.html").write_text(render_study_page(studies, facts), encoding="utf-8")
    files = ["study.html", "maps.npz"]
    # too large for result.json; "model/map" is the average over all layers, then the average of each layer
    averages = {
        f"{model}/{name}": np.stack(
            [study.average(name), *(study.average(name, i) for i, heads in enumerate(study.heads(name)) if heads)]
        ).astype(np.float32)
        for model, study in studies.items()
        for name in study.names
    }
    np.savez_compressed(folder / "maps.npz", **averages)  # type: ignore[arg-type]
    if has_matplotlib():
        save_study_picture(studies, folder / "study.png")
        files.append("study.png")
    result = StudyResult(
        texts=len(texts),
        source=str(source),
        length=length,
        special_tokens=counts_special,
        files=files,
        models={model: study_statistics(study) for model, study in studies.items()},
    )
    write_result(folder, result.to_json())
    for model, study in studies.items():
        shares = [f"{name} {study.near(name):.1%}" for name in study.names if not MAP_KINDS[name].is_score]
        shares.append(f"uniform attention {study.uniform_near:.1%}")
        print_plain(f"{model}: attention within ±{NEAR} positions: {', '.join(shares)}")
    print_plain(f"written to {out}: {', '.join(files)}")
    if not has_matplotlib():
        print_plain(NO_PICTURE)
    return result


def _study_models(models: list[Path], texts: list[str], length: int, counts_special: bool) -> dict[str, MapStudy]:
    """Return the average maps of each model on the same texts, by folder name."""
    studies = {}
    console = Console()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        for name, path in _distinct_names(models).items():
            loaded = load(path)
            task = bar.add_task(escape(name), total=len(texts))

            def advance(done: int, task: Any = task) -> None:
                bar.advance(task, done)

            studies[name] = study_texts(loaded, texts, length=length, counts_special=counts_special, progress=advance)
    return studies


def _distinct_names(models: Sequence[Path]) -> dict[str, Path]:
    """Return the folders by a unique name: the last component of the path, or the whole path."""
    resolved = [path.resolve() for path in models]
    for index, path in enumerate(resolved):
        if path in resolved[:index]:
            raise InputError(f"model {str(models[index])!r} is given twice; give different models to compare")
    names = [path.absolute().name for path in models]
    return {(name if names.count(name) == 1 else str(path)): path for name, path in zip(names, models, strict=True)}

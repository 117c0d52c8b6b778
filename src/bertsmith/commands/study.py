"""The study `bertsmith inspect` makes of many texts, models side by side."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertsmith.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from bertsmith.report.study import MapStudy


def study_models(
    models: list[Path], source: Path, texts: list[str], out: Path, *, length: int, counts_special: bool, force: bool
) -> dict[str, Any]:
    """The figures of the study; page, picture and average maps are written."""
    import numpy as np
    from rich.console import Console

    from bertsmith.layers.mixers.base import MAP_KINDS
    from bertsmith.report.maps import NEAR
    from bertsmith.report.pictures import NO_PICTURE, has_matplotlib, study_picture
    from bertsmith.report.study import study_figures
    from bertsmith.report.study_page import study_page
    from bertsmith.runs.folder import check_out, claim, write_result

    console = Console()
    check_out(out, force, source, *models)  # before minutes of work
    studies = _studies(models, texts, length, counts_special, console)
    folder = claim(out, force, source, *models)
    facts = {
        "texts": f"{len(texts):,} from {source.name}",
        "cut at": f"{length} tokens",
        "special tokens": "counted" if counts_special else "left out",
    }
    (folder / "study.html").write_text(study_page(studies, facts), encoding="utf-8")
    files = ["study.html", "maps.npz"]
    # too many numbers for result.json: under "model/map" the average over all layers, then each layer's
    averages = {
        f"{model}/{name}": np.stack(
            [study.average(name), *(study.average(name, i) for i, heads in enumerate(study.heads(name)) if heads)]
        ).astype(np.float32)
        for model, study in studies.items()
        for name in study.names
    }
    np.savez_compressed(folder / "maps.npz", **averages)  # type: ignore[arg-type]
    if has_matplotlib():
        study_picture(studies, folder / "study.png")
        files.append("study.png")
    figures = {
        "texts": len(texts),
        "source": str(source),
        "length": length,
        "special_tokens": counts_special,
        "files": files,
        "models": {model: study_figures(study) for model, study in studies.items()},
    }
    write_result(folder, figures)
    for model, study in studies.items():
        shares = [f"{name} {study.near(name):.1%}" for name in study.names if not MAP_KINDS[name].is_score]
        told = ", ".join([*shares, f"spread evenly {study.even_near:.1%}"])
        console.print(f"{model}: within ±{NEAR} {told}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"{', '.join(files)} in {out}", markup=False, highlight=False, soft_wrap=True)
    if not has_matplotlib():
        console.print(NO_PICTURE, markup=False, soft_wrap=True)
    return figures


def _studies(
    models: list[Path], texts: list[str], length: int, counts_special: bool, console: "Console"
) -> "dict[str, MapStudy]":
    """The study of each model on the same texts, by the name of its folder."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from bertsmith.checkpoint.store import load
    from bertsmith.report.study import study_texts

    studies = {}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        for name, path in _named(models).items():
            loaded = load(path)
            task = bar.add_task(name, total=len(texts))

            def advance(done: int, task: Any = task) -> None:
                bar.advance(task, done)

            studies[name] = study_texts(loaded, texts, length=length, counts_special=counts_special, progress=advance)
    return studies


def _named(models: Sequence[Path]) -> dict[str, Path]:
    """The folders by a name that tells them apart: the last part of the path, or all of it."""
    resolved = [path.resolve() for path in models]
    for index, path in enumerate(resolved):
        if path in resolved[:index]:
            raise InputError(f"model {str(models[index])!r} is given twice; give different models to compare")
    names = [path.absolute().name for path in models]
    return {(name if names.count(name) == 1 else str(path)): path for name, path in zip(names, models, strict=True)}

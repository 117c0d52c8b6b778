"""`bertsmith inspect`: what each head of a model looks at, in one text or on average over many."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertsmith.errors import InputError

if TYPE_CHECKING:
    from bertsmith.report.study import MapStudy

LONGEST = 128  # tokens; a page with more would be too heavy to look at
SENTENCES, LENGTH = 1000, 64


def inspect(
    model: list[Path],
    *,
    out: Path,
    text: str | None = None,
    pair: str | None = None,
    texts: Path | None = None,
    sentences: int | None = None,
    length: int | None = None,
    field: str | None = None,
    without_special: bool = False,
    force: bool = False,
) -> dict[str, Any]:
    """Show the maps of a model: of every head on one --text, or on average over many --texts, models side by side.

    Parameters
    ----------
    model
        A model folder, ours or a Hugging Face one; with --texts several, which are compared.
    out
        The folder to write: attention.html and a picture of each map, or study.html, study.png and maps.npz; and
        result.json. Pictures need matplotlib.
    text
        The text to look at.
    pair
        A second text, read as the second segment.
    texts
        A file of texts to average over: .txt with one text a line, .jsonl (both also .gz, .xz, .zst) or .parquet.
    sentences
        How many of the texts to read; 1000 if not given.
    length
        Tokens at which a text is cut, special ones counted in; 64 if not given.
    field
        The field or column that holds the text in .jsonl and .parquet files; "text" if not given.
    without_special
        Leave [CLS] and [SEP] out of the averages, as queries and as keys.
    force
        Replace what --out holds.
    """
    models = [Path(one) for one in ([model] if isinstance(model, str | Path) else model)]
    if (text is None) == (texts is None):
        given = "neither --text nor --texts is" if text is None else "--text and --texts are both"
        raise InputError(f"{given} given; give one of them")
    if text is not None:
        extra = {"--sentences": sentences, "--length": length, "--field": field}
        extra["--without-special"] = without_special or None
        for flag, value in extra.items():
            if value is not None:
                raise InputError(f"{flag} belongs to --texts; leave it out with --text")
        if len(models) != 1:
            raise InputError(f"--text shows one model, and {len(models)} are given; compare models with --texts")
        return _inspect_text(models[0], text, pair, Path(out), force)
    if pair is not None:
        raise InputError("--pair belongs to --text; leave it out with --texts")
    assert texts is not None
    chosen = read_texts(Path(texts), SENTENCES if sentences is None else sentences, field or "text")
    return _inspect_texts(
        models, Path(texts), chosen, LENGTH if length is None else length, not without_special, Path(out), force
    )


def _inspect_text(model: Path, text: str, pair: str | None, out: Path, force: bool) -> dict[str, Any]:
    """The figures of every head on one text; page and pictures are written."""
    from rich.console import Console

    from bertsmith.checkpoint.store import load
    from bertsmith.commands.output import claim, write_result
    from bertsmith.report.attention import attention_page, told_heads
    from bertsmith.report.maps import figures_of, text_maps
    from bertsmith.report.pictures import attention_picture

    loaded = load(model)
    tokens, maps = attention_of(loaded, text, pair)
    folder = claim(out, force, model)
    shown = text_maps(tokens, maps)
    encoder = loaded.config.encoder
    facts = {
        "model": str(model),
        "network": f"{loaded.config.family}, {len(encoder.layers)} layers of width {encoder.width}",
        "maps": ", ".join(one.label for one in shown),
        "tokens": str(len(tokens)),
    }
    (folder / "attention.html").write_text(attention_page(tokens, maps, title=text, facts=facts), encoding="utf-8")
    files = ["attention.html"]
    if _has_matplotlib():
        for one in shown:
            attention_picture(tokens, one, folder / f"{one.name}.png", title=text)
            files.append(f"{one.name}.png")
    by_map = {
        one.name: {
            "kind": "scores" if one.is_score else "weights",
            "heads": one.heads,
            "figures": figures_of(tokens, one),
        }
        for one in shown
    }
    figures = {
        "tokens": tokens,
        "layers": len(shown[0].layers),
        "heads": max(shown[0].heads),
        "files": files,
        "figures": by_map[shown[0].name]["figures"],
        "maps": by_map,
    }
    write_result(folder, figures)
    layers = f"{figures['layers']} layers of {told_heads(shown)}"
    console = Console()
    console.print(
        f"{layers} on {len(tokens)} tokens: {', '.join(files)} in {out}", markup=False, highlight=False, soft_wrap=True
    )
    _say_without_picture(console)
    return figures


def _inspect_texts(
    models: list[Path], source: Path, texts: list[str], length: int, counts_special: bool, out: Path, force: bool
) -> dict[str, Any]:
    """The figures of the study; page, picture and average maps are written."""
    import numpy as np
    from rich.console import Console

    from bertsmith.commands.output import check_out, claim, write_result
    from bertsmith.layers.mixers.base import MAP_KINDS
    from bertsmith.report.maps import NEAR
    from bertsmith.report.pictures import study_picture
    from bertsmith.report.study import study_figures
    from bertsmith.report.study_page import study_page

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
    if _has_matplotlib():
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
    _say_without_picture(console)
    return figures


def _studies(
    models: list[Path], texts: list[str], length: int, counts_special: bool, console: Any
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


def read_texts(path: Path, most: int, field: str = "text") -> list[str]:
    """The first texts of a file: the lines of a .txt file, the rows of the others."""
    from bertsmith.text.readers import find_files, read_documents

    if most < 1:
        raise InputError(f"--sentences is {most}; allowed: 1 or more")
    if path.is_dir():
        raise InputError(f"--texts {str(path)!r} is a folder; give a file")
    is_lines = ".jsonl" not in path.name.lower() and not path.name.lower().endswith(".parquet")
    found: list[str] = []
    for document in read_documents(find_files([path]), field):
        # the reader gives lines without a blank one between them as one document
        found += [line for line in document.split("\n") if line.strip()] if is_lines else [document]
        if len(found) >= most:
            break
    if not found:
        raise InputError(f"--texts {str(path)!r} holds no text; give a file with texts")
    return found[:most]


def attention_of(model: Any, text: str, pair: str | None = None) -> tuple[list[str], dict[str, list[Any]]]:
    """The pieces of a text and its maps by name, for every layer (heads, length, length)."""
    import torch

    from bertsmith.batches.layout import SequenceLayout

    tokenizer = model.require_tokenizer()
    if not text.strip():
        raise InputError("--text is empty; give some words")
    arrays = tokenizer.encode([text], None if pair is None else [pair])
    ids = torch.from_numpy(arrays["input_ids"])
    longest = min(LONGEST, model.config.encoder.embedding.longest)
    if ids.shape[1] > longest:
        raise InputError(f"--text has {ids.shape[1]} tokens; allowed: up to {longest}")
    types = torch.from_numpy(arrays["token_type_ids"]) if model.config.encoder.embedding.types else None
    with torch.inference_mode():
        by_layer = model.eval().encoder.attention_maps(ids, SequenceLayout.full(*ids.shape), types)
    names = dict.fromkeys(name for layer in by_layer for name in layer)
    missing = torch.zeros(1, 0, *ids.shape[1:], ids.shape[1])  # a layer that lacks a map has no heads of it
    maps = {name: [layer.get(name, missing)[0].float().numpy() for layer in by_layer] for name in names}
    return tokenizer.pieces(ids[0].tolist()), maps


def _has_matplotlib() -> bool:
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def _say_without_picture(console: Any) -> None:
    if not _has_matplotlib():
        console.print(
            "no picture: that needs matplotlib (pip install 'bertsmith[report]')", markup=False, soft_wrap=True
        )

"""`bertsmith inspect`: what each head of a model looks at, in one text or on average over many."""

from pathlib import Path
from typing import Any

from bertsmith.bundled import model_folder
from bertsmith.errors import InputError

SENTENCES, LENGTH = 1000, 64


def inspect(
    model: list[str | Path],
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
        A bundled model (small) or a model folder, ours or a Hugging Face one; with --texts several, which are compared.
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
    from bertsmith.commands.study import study_models
    from bertsmith.text.readers import first_texts

    models = [model] if isinstance(model, str | Path) else list(model)
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
    sentences, length = SENTENCES if sentences is None else sentences, LENGTH if length is None else length
    if sentences < 1:
        raise InputError(f"--sentences is {sentences}; allowed: 1 or more")
    if Path(texts).is_dir():
        raise InputError(f"--texts {str(texts)!r} is a folder; give a file")
    return study_models(
        [model_folder(one) for one in models],
        Path(texts),
        first_texts(Path(texts), sentences, field or "text"),
        Path(out),
        length=length,
        counts_special=not without_special,
        force=force,
    )


def _inspect_text(model: str | Path, text: str, pair: str | None, out: Path, force: bool) -> dict[str, Any]:
    """The figures of every head on one text; page and pictures are written."""
    from rich.console import Console

    from bertsmith.checkpoint.store import load
    from bertsmith.report.attention import attention_page, told_heads
    from bertsmith.report.maps import figures_of, maps_of, text_maps
    from bertsmith.report.pictures import NO_PICTURE, attention_picture, has_matplotlib
    from bertsmith.runs.folder import claim, write_result

    loaded = load(model)
    tokens, maps = maps_of(loaded, text, pair)
    folder = claim(out, force, model_folder(model))
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
    if has_matplotlib():
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
    if not has_matplotlib():
        console.print(NO_PICTURE, markup=False, soft_wrap=True)
    return figures

"""Translations of new texts."""

import json
from pathlib import Path
from typing import Any

from bertsmith.errors import InputError


def predict_translation(
    model: Path,
    out: Path,
    data: Path | None,
    text: list[str] | None,
    *,
    beam: int | None,
    length_penalty: float | None,
    extra_length: int | None,
    device: str,
    force: bool,
) -> dict[str, Any]:
    """Translates texts: the lines of a file, or those given."""
    import time

    from rich.console import Console

    from bertsmith.commands.translating import load_translator, recorded, search_with
    from bertsmith.runs.output import check_out, claim, write_result
    from bertsmith.text.readers import is_visible, read_lines
    from bertsmith.training.translation_metrics import translations

    if (data is None) == (not text):
        raise InputError("give either --data with a .txt file or --text with the words to translate")
    check_out(out, force, model, data)
    texts = list(text or ()) if data is None else read_lines(data)
    places = [place for place, line in enumerate(texts) if is_visible(line)]
    if not places:
        raise InputError(f"{'--text' if data is None else f'file {str(data)!r}'} holds no text")
    translator = load_translator(model, device)
    search = search_with(recorded(model), beam, length_penalty, extra_length)
    begin = time.perf_counter()
    results = [""] * len(texts)
    for place, result in zip(places, translations(translator, [texts[place] for place in places], search), strict=True):
        results[place] = result
    seconds = time.perf_counter() - begin
    claim(out, force, model, data)
    (out / "predictions.txt").write_text("".join(_one_line(line) + "\n" for line in results), encoding="utf-8")
    with (out / "predictions.jsonl").open("w", encoding="utf-8") as file:
        for given, made in zip(texts, results, strict=True):
            file.write(json.dumps({"text": given, "prediction": made}, ensure_ascii=False) + "\n")
    figures = {
        "texts": len(texts),
        "empty": len(texts) - len(places),
        "seconds": round(seconds, 3),
        "search": search.plain(),
        "model": str(model),
    }
    if data is None:
        figures["predictions"] = results
    write_result(out, figures)
    console = Console()
    for result in results if data is None else ():
        console.print(result, markup=False, highlight=False, soft_wrap=True)
    console.print(f"{len(texts)} texts in {seconds:.1f} s; written to {out}", markup=False, highlight=False)
    return figures


def _one_line(text: str) -> str:
    """The text without line ends, which would shift the lines of a file."""
    return " ".join(text.split("\n"))

"""`bertsmith predict`: what a model makes of new texts."""

from pathlib import Path
from typing import Any, Literal


def predict(
    model: Path,
    *,
    out: Path,
    data: Path | None = None,
    text: list[str] | None = None,
    beam: int | None = None,
    length_penalty: float | None = None,
    extra_length: int | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    force: bool = False,
) -> dict[str, Any]:
    """Answer new inputs with a fine-tuned model: the rows or lines of a file, or texts on the command line.

    Parameters
    ----------
    model
        The folder of a fine-tuned model, or of one that translates.
    out
        The folder to write: predictions.jsonl and result.json, and for one text a line predictions.txt.
    data
        A .jsonl file with the columns of the task, or a .txt file, one text a line (also .gz, .xz, .zst).
    text
        A text; may be given several times.
    beam
        For translation: hypotheses that are followed side by side; 1 takes the likeliest token each time. The search is
        that of the model's recipe where nothing is given.
    length_penalty
        α of log P / ((5 + length) / 6)^α; 0 for none.
    extra_length
        Tokens a translation may have more than its source.
    device
        Where to compute; "auto" takes a GPU if there is one.
    force
        Replace what --out holds.
    """
    from bertsmith.commands.answering import is_fine_tuned, predict_task
    from bertsmith.commands.predict_translation import predict_translation

    model, out, data = Path(model), Path(out), None if data is None else Path(data)
    text = [text] if isinstance(text, str) else text
    if is_fine_tuned(model):
        return predict_task(model, out, data, text, device=device, force=force)
    return predict_translation(
        model,
        out,
        data,
        text,
        beam=beam,
        length_penalty=length_penalty,
        extra_length=extra_length,
        device=device,
        force=force,
    )

"""`bertsmith predict`: what a model makes of new texts."""

from pathlib import Path
from typing import Any, Literal

from bertsmith.bundled import model_folder
from bertsmith.errors import InputError


def predict(
    model: str | Path,
    *,
    out: Path,
    data: str | None = None,
    part: str = "test",
    text: list[str] | None = None,
    pair: list[str] | None = None,
    column: list[str] | None = None,
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
        The folder to write: predictions.jsonl and result.json, predictions.txt where an answer is one line, and in
        official/ what the task's own scorer reads.
    data
        A .jsonl, .csv or .tsv file with the columns of the task, or a .txt file, one text a line (also .gz, .xz, .zst);
        a .parquet file; or, with --part, a folder of parts or a name on the hub.
    part
        The part of a folder or of a data set on the hub.
    text
        A text; may be given several times.
    pair
        For tasks on two texts: the second one of each --text, in the same order.
    column
        A column that has another name than in training, such as text=review; may be given several times.
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
    from bertsmith.commands.answering import Asked, is_fine_tuned, predict_task
    from bertsmith.commands.predict_translation import predict_translation

    model, out = model_folder(model), Path(out)
    text, pair = ([given] if isinstance(given, str) else given for given in (text, pair))
    if is_fine_tuned(model):
        asked = Asked(None if data is None else str(data), part, text or (), pair or ())
        return predict_task(model, out, asked, column or [], device=device, force=force)
    if pair or column:
        flag = "--pair" if pair else "--column"
        raise InputError(f"{flag} is given and {str(model)!r} holds no model for a task with it; leave it out")
    return predict_translation(
        model,
        out,
        None if data is None else Path(data),
        text,
        beam=beam,
        length_penalty=length_penalty,
        extra_length=extra_length,
        device=device,
        force=force,
    )

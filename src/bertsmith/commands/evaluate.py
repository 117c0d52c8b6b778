"""`bertsmith evaluate`: how good a model is at a task."""

from pathlib import Path
from typing import Any, Literal

from bertsmith.bundled import model_folder
from bertsmith.errors import InputError


def evaluate(
    model: str | Path,
    *,
    data: str,
    out: Path,
    part: str = "dev",
    column: list[str] | None = None,
    source: str | None = None,
    target: str | None = None,
    beam: int | None = None,
    length_penalty: float | None = None,
    extra_length: int | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    force: bool = False,
) -> dict[str, Any]:
    """Answer one part of a task and compare with what is right.

    Parameters
    ----------
    model
        The folder of a fine-tuned model.
    data
        A folder with the part as .jsonl, .csv or .tsv (also .gz, .xz, .zst) or .parquet; such a file; or a name on the
        hub, such as glue/mrpc.
    out
        The folder to write: predictions.jsonl and result.json, and in official/ what the task's own scorer reads; for
        translation translations.jsonl.
    part
        The part to answer: dev, test …
    column
        A column that has another name than in training, such as label=stars; may be given several times.
    source
        For translation: the column to translate from; by default as the model was trained, else found out.
    target
        The column to translate to.
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
    from bertsmith.commands.answering import evaluate_task, is_fine_tuned
    from bertsmith.commands.evaluate_translation import evaluate_translation

    model, out = model_folder(model), Path(out)
    if is_fine_tuned(model):
        return evaluate_task(model, str(data), out, part, column or [], device=device, force=force)
    if column:
        raise InputError(f"--column is given and {str(model)!r} holds no model for a task with it; leave it out")
    return evaluate_translation(
        model,
        Path(data),
        out,
        part,
        source=source,
        target=target,
        beam=beam,
        length_penalty=length_penalty,
        extra_length=extra_length,
        device=device,
        force=force,
    )

"""`bertsmith shrink`: a fine-tuned model → one that is smaller, or that can be cut to any size."""

import json
from pathlib import Path
from typing import Any, Literal

from bertsmith.errors import InputError, nearest

METHODS = ("elastic",)


def shrink(
    model: Path | None = None,
    *,
    data: str | None = None,
    out: Path,
    method: str | None = None,
    recipe: Path | None = None,
    widths: list[float] | None = None,
    depths: list[float] | None = None,
    epochs: float | None = None,
    learning_rate: float | None = None,
    batch: int | None = None,
    augment: Path | None = None,
    column: list[str] | None = None,
    set: list[str] | None = None,
    seed: int | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    explain: bool = False,
    resume: bool = False,
    force: bool = False,
) -> dict[str, Any]:
    """Make a fine-tuned model elastic: one set of weights that works at every width and depth (DynaBERT).

    Heads and neurons are put in the order of their importance; then sub-networks of all widths, and of all widths and
    depths, learn from the fine-tuned model. bertsmith.load(OUT, subnet=...) and bertsmith fit take out any of them.

    Parameters
    ----------
    model
        The folder of a fine-tuned model.
    data
        Its data: a folder with train.jsonl and dev.jsonl (or .csv, .tsv, .parquet), one such file, or a name on the
        hub.
    out
        The folder to write: the elastic model, elastic.json with all sub-networks and their figures, report.html,
        result.json and recipe.toml.
    method
        How: "elastic" if not given.
    recipe
        A TOML file with the settings. With --resume the run's own recipe is used.
    widths
        Shares of heads and neurons, such as 1 0.75 0.5 0.25 (grid.widths).
    depths
        Shares of layers, such as 1 0.75 0.5 (grid.depths).
    epochs
        How often every stage sees every example (run.epochs).
    learning_rate
        The highest learning rate (optimizer.learning_rate); that of the fine-tuning if not given.
    batch
        Examples of a step (batch.examples).
    augment
        The folder of a masked language model: the sub-networks also learn from copies of the training rows with words
        that it puts in the place of theirs (augmentation.model).
    column
        Which column plays a part in the task, such as label=stars; may be given several times.
    set
        One setting over the recipe, such as grid.sample=2; may be given several times.
    seed
        The number that the order of the data, dropout and sampling are drawn by (run.seed).
    device
        Where to compute; "auto" takes a GPU if there is one.
    explain
        Print the resolved settings and what they cost, then stop.
    resume
        Go on where a run in --out was interrupted.
    force
        Replace an earlier run in --out.
    """
    from bertsmith.commands.run import recipe_of
    from bertsmith.commands.shrink_elastic import elastic_settings, shrink_elastic
    from bertsmith.toml import override

    out = Path(out)
    plain = dict(recipe_of(None if recipe is None else Path(recipe), out if resume else None) or {})
    given = {"model": model, "data": data, "method": method}
    plain |= {name: str(value) for name, value in given.items() if value is not None}
    if "model" not in plain:
        raise InputError("MODEL is not given and no recipe names one; give the folder of a fine-tuned model")
    chosen = plain.setdefault("method", "elastic")
    if chosen not in METHODS:
        raise InputError(f"--method is {chosen!r}; {nearest(str(chosen), METHODS)}")
    flags = {
        "grid.widths": widths,
        "grid.depths": depths,
        "run.epochs": epochs,
        "optimizer.learning_rate": learning_rate,
        "batch.examples": batch,
        "run.seed": seed,
        "augmentation.model": None if augment is None else json.dumps(str(augment)),
    }
    short = [f"{path}={value}" for path, value in flags.items() if value is not None]
    plain = override(plain, [*(set or []), *short])
    settings, tables = elastic_settings(plain, column or [], source=str(recipe or "settings"))
    return shrink_elastic(settings, tables, out, device=device, explain=explain, resume=resume, force=force)

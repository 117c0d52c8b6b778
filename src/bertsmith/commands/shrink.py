"""`bertsmith shrink`: a fine-tuned model → one that is smaller, or that can be cut to any size."""

from pathlib import Path
from typing import Any, Literal

from bertsmith.errors import InputError, nearest

METHODS = ("elastic", "prune")


def shrink(
    model: Path | None = None,
    *,
    data: str | None = None,
    out: Path,
    method: str | None = None,
    recipe: Path | None = None,
    widths: list[float] | None = None,
    depths: list[float] | None = None,
    keep: float | None = None,
    epochs: float | None = None,
    learning_rate: float | None = None,
    batch: int | None = None,
    column: list[str] | None = None,
    set: list[str] | None = None,
    seed: int | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    explain: bool = False,
    resume: bool = False,
    force: bool = False,
) -> dict[str, Any]:
    """Make a fine-tuned model elastic, so that it works at every width and depth (DynaBERT), or prune it.

    Elastic, heads and neurons are put in the order of their importance; then sub-networks of all widths, and of all
    widths and depths, learn from the fine-tuned model. bertsmith.load(OUT, subnet=...) and bertsmith fit take out any
    of them. Pruned, it loses the heads and neurons it needs least, for good, and learns to do without them.

    Parameters
    ----------
    model
        The folder of a fine-tuned model.
    data
        Its data: a folder with train.jsonl and dev.jsonl (or .csv, .tsv, .parquet), one such file, or a name on the
        hub.
    out
        The folder to write: the model, recipe.toml, result.json, and what is known of its units: elastic.json with all
        sub-networks, or pruned.json with those that stayed.
    method
        How: "elastic" if not given, or "prune".
    recipe
        A TOML file with the settings. With --resume the run's own recipe is used.
    widths
        Shares of heads and neurons, such as 1 0.75 0.5 0.25 (grid.widths).
    depths
        Shares of layers, such as 1 0.75 0.5 (grid.depths).
    keep
        To prune: the share of heads and of neurons that stays (prune.keep).
    epochs
        How often every stage sees every example (run.epochs).
    learning_rate
        The highest learning rate (optimizer.learning_rate); that of the fine-tuning if not given.
    batch
        Examples of a step (batch.examples).
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
    from bertsmith.commands.shrink_elastic import shrink_elastic
    from bertsmith.commands.shrink_prune import shrink_prune
    from bertsmith.commands.shrink_work import shrink_settings
    from bertsmith.shrinking.elastic import ElasticSettings
    from bertsmith.shrinking.prune.settings import PruneSettings
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
    own = {"widths": ("elastic", widths), "depths": ("elastic", depths), "keep": ("prune", keep)}
    for name, (others, value) in own.items():
        if value is not None and chosen != others:
            raise InputError(f"--{name} is given with --method {chosen}; allowed: with --method {others}")
    flags = {
        "grid.widths": widths,
        "grid.depths": depths,
        "prune.keep": keep,
        "run.epochs": epochs,
        "optimizer.learning_rate": learning_rate,
        "batch.examples": batch,
        "run.seed": seed,
    }
    short = [f"{path}={value}" for path, value in flags.items() if value is not None]
    plain = override(plain, [*(set or []), *short])
    source = str(recipe or "settings")
    if chosen == "prune":
        pruning, tables = shrink_settings(PruneSettings, plain, column or [], source=source)
        return shrink_prune(pruning, tables, out, device=device, explain=explain, resume=resume, force=force)
    settings, tables = shrink_settings(ElasticSettings, plain, column or [], source=source)
    return shrink_elastic(settings, tables, out, device=device, explain=explain, resume=resume, force=force)

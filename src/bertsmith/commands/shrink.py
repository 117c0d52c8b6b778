"""`bertsmith shrink`: a fine-tuned model → one that is smaller, or that can be cut to any size."""

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from bertsmith.bundled import model_text
from bertsmith.errors import InputError, nearest

METHODS = ("elastic", "prune", "exits", "vocabulary")


def shrink(
    model: str | Path | None = None,
    *,
    data: str | None = None,
    out: Path,
    method: str | None = None,
    recipe: Path | None = None,
    widths: Annotated[list[float] | None, Parameter(consume_multiple=True)] = None,
    depths: Annotated[list[float] | None, Parameter(consume_multiple=True)] = None,
    keep: float | None = None,
    pieces: int | None = None,
    rank: int | None = None,
    tolerance: float | None = None,
    epochs: float | None = None,
    learning_rate: float | None = None,
    batch: int | None = None,
    augment: str | Path | None = None,
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
    of them. Pruned, it loses the heads and neurons it needs least, for good, and learns to do without them. With exits
    it gets small heads on the way, and answers what it is sure of after a few layers. Its vocabulary can be cut to the
    pieces its texts use.

    Parameters
    ----------
    model
        The folder of a fine-tuned model; bertsmith finetune makes one of a bundled model.
    data
        Its data: a folder with train.jsonl and dev.jsonl (or .csv, .tsv, .parquet), one such file, or a name on the
        hub.
    out
        The folder to write: the model, recipe.toml, result.json, and what is known of its units: elastic.json with all
        sub-networks, or pruned.json with those that stayed.
    method
        How: "elastic" if not given, "prune", "exits" or "vocabulary".
    recipe
        A TOML file with the settings. With --resume the run's own recipe is used.
    widths
        Shares of heads and neurons, such as 1 0.75 0.5 0.25 (grid.widths).
    depths
        Shares of layers, such as 1 0.75 0.5 (grid.depths).
    keep
        To prune: the share of heads and of neurons that stays (prune.keep).
    pieces
        With --method vocabulary: the most pieces that stay (vocabulary.pieces); all that the texts use if not given.
    rank
        With --method vocabulary: the rank of the token table as a product of two (vocabulary.rank).
    tolerance
        With --method exits: how many points of the score early answers may cost on dev (leave.tolerance).
    epochs
        How often every stage sees every example (run.epochs).
    learning_rate
        The highest learning rate (optimizer.learning_rate); that of the fine-tuning if not given.
    batch
        Examples of a step (batch.examples).
    augment
        A bundled model (small) or the folder of one that fills masks: the sub-networks also learn from copies of the
        training rows with words that it puts in the place of theirs (augmentation.model).
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
    from bertsmith.commands.shrink_exits import shrink_exits
    from bertsmith.commands.shrink_prune import shrink_prune
    from bertsmith.commands.shrink_vocabulary import shrink_vocabulary
    from bertsmith.commands.shrink_work import shrink_settings
    from bertsmith.shrinking.elastic import ElasticSettings
    from bertsmith.shrinking.exits import ExitSettings
    from bertsmith.shrinking.prune.prune import PruneSettings
    from bertsmith.shrinking.vocabulary import CutSettings
    from bertsmith.toml import override

    out = Path(out)
    plain = dict(recipe_of(None if recipe is None else Path(recipe), out if resume else None) or {})
    given = {"model": None if model is None else model_text(model), "data": data, "method": method}
    plain |= {name: str(value) for name, value in given.items() if value is not None}
    if "model" not in plain:
        raise InputError("MODEL is not given and no recipe names one; give the folder of a fine-tuned model")
    chosen = plain.setdefault("method", "elastic")
    if chosen not in METHODS:
        raise InputError(f"--method is {chosen!r}; {nearest(str(chosen), METHODS)}")
    own = {
        "widths": ("elastic", widths),
        "depths": ("elastic", depths),
        "augment": ("elastic", augment),
        "keep": ("prune", keep),
        "tolerance": ("exits", tolerance),
        "pieces": ("vocabulary", pieces),
        "rank": ("vocabulary", rank),
    }
    for name, (home, value) in own.items():
        if value is not None and chosen != home:
            raise InputError(f"--{name} is given with --method {chosen}; allowed: with --method {home}")
    flags = {
        "grid.widths": widths,
        "grid.depths": depths,
        "prune.keep": keep,
        "leave.tolerance": tolerance,
        "vocabulary.pieces": pieces,
        "vocabulary.rank": rank,
        "run.epochs": epochs,
        "optimizer.learning_rate": learning_rate,
        "batch.examples": batch,
        "run.seed": seed,
        "augmentation.model": None if augment is None else json.dumps(model_text(augment)),
    }
    short = [f"{path}={value}" for path, value in flags.items() if value is not None]
    plain = override(plain, [*(set or []), *short])
    source = str(recipe or "settings")
    ways: dict[str, Any] = {"device": device, "explain": explain, "resume": resume, "force": force}
    read = partial(shrink_settings, plain=plain, columns=column or [], source=source)
    if chosen == "prune":
        return shrink_prune(*read(PruneSettings), out, **ways)
    if chosen == "exits":
        # fresh heads alone take a higher rate than an encoder that was trained
        return shrink_exits(*read(ExitSettings, goes_on=plain.get("encoder") == "joint"), out, **ways)
    if chosen == "vocabulary":
        return shrink_vocabulary(*read(CutSettings, goes_on=False), out, **ways)
    return shrink_elastic(*read(ElasticSettings), out, **ways)

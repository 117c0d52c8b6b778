"""`bertsmith finetune`: a model and a task → a model for the task."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from bertsmith.bundled import model_text
from bertsmith.commands.run import recipe_of
from bertsmith.errors import InputError

IN_MEMORY = "a model given in Python"


def finetune(
    model: Any = None,
    *,
    data: str | None = None,
    dev: Any = None,
    out: Path | None = None,
    task: str | None = None,
    column: list[str] | None = None,
    recipe: Path | None = None,
    source: str | None = None,
    target: str | None = None,
    epochs: float | None = None,
    learning_rate: float | None = None,
    batch: int | None = None,
    adversarial: Literal["none", "sift", "vat"] | None = None,
    teacher: str | Path | None = None,
    set: list[str] | None = None,
    seed: int | None = None,
    seeds: int | None = None,
    learning_rates: Annotated[list[float] | None, Parameter(consume_multiple=True)] = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    explain: bool = False,
    resume: bool = False,
    force: bool = False,
    train: Annotated[Sequence[Any] | None, Parameter(parse=False)] = None,
) -> dict[str, Any]:
    """Train a model for a task, evaluate it on dev, and leave it in a folder.

    Parameters
    ----------
    model
        A bundled model (small), a folder, ours or Hugging Face's, or a preset, whose weights are fresh and whose
        tokenizer is learned from the training texts; in Python also a model itself, which stays as it is.
    data
        A folder with train.jsonl and dev.jsonl (or .csv, .tsv, .parquet), one such file, GLUE's or SQuAD's own files,
        or a name on the hub such as glue/mrpc.
    dev
        Where to take the rows that are evaluated on, if not from data: a folder with a dev part, a file, or a name on
        the hub; in Python also the rows themselves, with train.
    out
        The folder to write: the model, report.html, result.json, predictions of dev, log.jsonl and recipe.toml. In
        Python it may be left out where train is given: nothing is kept then but what comes back.
    task
        The kind of task: classification, multi_label, regression, tagging, spans, choice, embedding or translation;
        found out from the columns of the data if not given.
    column
        Which column plays a part in the task, such as label=stars; may be given several times.
    recipe
        A TOML file with the settings. With --resume the run's own recipe is used. What neither it nor a flag says is as
        the papers have it for this family, size and task; --explain shows it.
    source
        For translation: the column to translate from; found out where exactly two columns hold text.
    target
        The column to translate to.
    epochs
        How often every example is seen (run.epochs).
    learning_rate
        The highest learning rate (optimizer.learning_rate).
    batch
        Examples of a step (batch.examples).
    adversarial
        Also learn to say the same when the input's vectors are moved a little: "sift" on normalised vectors, "vat" on
        the vectors as they are; "none" if not given.
    teacher
        The folder of a model fine-tuned for the same task, to learn from as well (distillation.teacher). Without MODEL
        the student is cut of it: model.subnet says which part.
    set
        One setting over the recipe, such as optimizer.learning_rate=1e-3; may be given several times.
    seed
        The number that fresh weights, the order of the data and dropout are drawn by (run.seed).
    seeds
        So many runs, from the seed on, each in a folder of its own in --out, which gets the model of the best: figures
        are their mean and spread.
    learning_rates
        Such runs for each of these rates, such as 2e-5 5e-5.
    device
        Where to compute; "auto" takes a GPU if there is one.
    explain
        Print the resolved settings, where their defaults come from, steps, tokens and operations, then stop.
    resume
        Go on from the newest whole checkpoint in --out.
    force
        Replace an earlier run in --out.
    train
        In Python, instead of data: rows as mappings, or tuples of a text (or two) and its label.
    """
    from bertsmith.checkpoint.source import SOURCES, expand_source, replace_source, source_fields
    from bertsmith.commands.finetune_search import finetune_search, search_of
    from bertsmith.commands.finetune_task import finetune_task, is_translation, resolved, task_settings
    from bertsmith.commands.finetune_translation import finetune_translation
    from bertsmith.toml import override

    out, recipe = (None if path is None else Path(path) for path in (out, recipe))
    if resume and out is None:
        raise InputError("--resume needs --out with the folder of the run")
    plain = dict(recipe_of(recipe, out if resume else None) or {})
    start = None if model is None or isinstance(model, str | Path) else model
    name = None if model is None else model_text(model) if start is None else IN_MEMORY
    plain["model"] = expand_source(plain.get("model"))
    if name is not None:
        plain["model"] = replace_source(plain["model"], name)
    if teacher is not None:
        plain["distillation"] = {**plain.get("distillation", {}), "teacher": model_text(teacher)}
        if not plain["model"].keys() & SOURCES:
            plain["model"] |= source_fields(model_text(teacher))
    if not plain["model"].keys() & {*SOURCES, "name"}:
        raise InputError("MODEL is not given and no recipe names one; give a bundled model, a folder or a preset")
    elsewhere, dev = (str(dev), None) if isinstance(dev, str | Path) else (None, dev)
    named = {"data": None if data is None else str(data), "dev": elsewhere}
    given = {**named, "source": source, "target": target}
    plain |= {name: value for name, value in given.items() if value is not None}
    flags = {
        "run.epochs": epochs,
        "optimizer.learning_rate": learning_rate,
        "batch.examples": batch,
        "run.seed": seed,
        "adversarial.kind": adversarial,
    }
    short = [f"{path}={value}" for path, value in flags.items() if value is not None]
    plain = override(plain, [*(set or []), *short])
    where = str(recipe or "settings")
    if start is None and is_translation(plain, task):
        if seeds is not None or learning_rates:
            raise InputError("--seeds and --learning-rates are not for translation; give --seed or --set, run by run")
        return finetune_translation(
            plain, out, source=where, device=device, explain=explain, resume=resume, force=force
        )
    settings, tables = task_settings(plain, task, column or [], train, dev, source=where)
    whole = resolved(settings, plain, tables, start)
    ways: dict[str, Any] = {"start": start, "device": device, "resume": resume, "force": force}
    search = search_of(seeds, learning_rates, whole.settings, out if resume else None)
    if search is not None and not explain:
        return finetune_search(search, whole, tables, out, **ways)
    return finetune_task(whole, tables, out, explain=explain, **ways)

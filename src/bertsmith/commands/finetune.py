"""`bertsmith finetune`: a model and a task → a model for the task."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from bertsmith.commands.run import recipe_of
from bertsmith.errors import InputError


def finetune(
    model: str | None = None,
    *,
    data: str | None = None,
    out: Path | None = None,
    task: str | None = None,
    column: list[str] | None = None,
    recipe: Path | None = None,
    source: str | None = None,
    target: str | None = None,
    adversarial: Literal["none", "sift", "vat"] | None = None,
    set: list[str] | None = None,
    seed: int | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    explain: bool = False,
    resume: bool = False,
    force: bool = False,
    train: Sequence[Any] | None = None,
    dev: Sequence[Any] | None = None,
) -> dict[str, Any]:
    """Train a model for a task, evaluate it on dev, and leave it in a folder.

    Parameters
    ----------
    model
        The folder of a model, ours or Hugging Face's, or a preset, whose weights are fresh and whose tokenizer is
        learned from the training texts.
    data
        A folder with train.jsonl and dev.jsonl (also .gz, .xz, .zst).
    out
        The folder to write: the model, log.jsonl, recipe.toml, predictions of dev and result.json.
    task
        The kind of task; found out from the columns of the data if not given.
    column
        Which column plays a part in the task, such as label=stars; may be given several times.
    recipe
        A TOML file with the settings. With --resume the run's own recipe is used.
    source
        For translation: the column to translate from; found out where exactly two columns hold text.
    target
        The column to translate to.
    adversarial
        Also learn to say the same when the input's vectors are moved a little: "sift" on normalised vectors, "vat" on
        the vectors as they are; "none" if not given.
    set
        One setting over the recipe, such as optimizer.learning_rate=1e-3; may be given several times.
    seed
        Of weights, data order and dropout.
    device
        Where to compute; "auto" takes a GPU if there is one.
    explain
        Print the resolved settings, then stop.
    resume
        Go on from the newest whole checkpoint in --out.
    force
        Replace an earlier run in --out.
    train
        In Python, instead of data: rows as mappings, or tuples of a text (or two) and its label.
    dev
        Likewise what is evaluated on.
    """
    from bertsmith.commands.finetune_task import finetune_task, is_translation, task_settings
    from bertsmith.commands.finetune_translation import finetune_translation
    from bertsmith.toml import override

    out, recipe = (None if path is None else Path(path) for path in (out, recipe))
    if resume and out is None:
        raise InputError("--resume needs --out with the folder of the run")
    plain = dict(recipe_of(recipe, out if resume else None) or {})
    if model is not None and plain.get("model", {}).get("name") != str(model):
        plain["model"] = {"name": str(model)}
    if "model" not in plain:
        raise InputError("MODEL is not given and no recipe names one; give the folder of a model or a preset")
    given = {"data": None if data is None else str(data), "source": source, "target": target}
    plain |= {name: value for name, value in given.items() if value is not None}
    flags = {"run.seed": seed, "adversarial.kind": adversarial}
    given_flags = [f"{name}={value}" for name, value in flags.items() if value is not None]
    plain = override(plain, [*(set or []), *given_flags])
    where = str(recipe or "settings")
    if is_translation(plain, task):
        return finetune_translation(
            plain, out, source=where, device=device, explain=explain, resume=resume, force=force
        )
    settings, tables = task_settings(plain, task, column or [], train, dev, source=where)
    return finetune_task(settings, tables, out, device=device, explain=explain, resume=resume, force=force)

"""`bertsmith finetune`: fine-tune a model for a task."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from bertsmith.bundled import model_folder, model_text
from bertsmith.checkpoint.source import SOURCES, check_name, expand_source, replace_source, source_fields
from bertsmith.data.devices import Device
from bertsmith.errors import InputError
from bertsmith.files import read_json
from bertsmith.models.model import Model
from bertsmith.models.published import preset
from bertsmith.recipes.finetune import Completed, complete
from bertsmith.runs.finetuning import FinetuneResult, run_finetuning
from bertsmith.runs.flags import TRANSLATION, DataFlag, ForceFlag, OutFlag, RayFlag, RecipeFlag, SetFlag, flag_group
from bertsmith.runs.folder import read_recipe_file
from bertsmith.runs.result import Explanation, StoppedRun, print_explanation
from bertsmith.runs.search import SearchResult, find_search, run_search
from bertsmith.tasks.data_source import Tables, hold_out, read_rows, recognise, sample_row, task_splits
from bertsmith.tasks.parsing import Parsing
from bertsmith.text.rows import Table
from bertsmith.toml import override
from bertsmith.training.finetuning import FinetuneSettings, TranslationSettings, explain_costs, read_data

SEVERAL_RUNS = flag_group("Several runs")
IN_MEMORY = "a model given in Python"
TRANSLATION_DEFAULTS = "the Transformer's paper (Vaswani et al. 2017)"


def finetune(
    model: Any = None,
    *,
    data: DataFlag[str | None] = None,
    dev: Any = None,
    out: OutFlag[Path | None] = None,
    task: str | None = None,
    column: list[str] | None = None,
    recipe: RecipeFlag = None,
    source: Annotated[str | None, TRANSLATION] = None,
    target: Annotated[str | None, TRANSLATION] = None,
    epochs: float | None = None,
    learning_rate: float | None = None,
    batch: int | None = None,
    adversarial: Literal["none", "sift", "vat"] | None = None,
    teacher: str | Path | None = None,
    set: SetFlag = None,
    seed: int | None = None,
    seeds: Annotated[int | None, SEVERAL_RUNS] = None,
    learning_rates: Annotated[list[float] | None, Parameter(consume_multiple=True), SEVERAL_RUNS] = None,
    device: Device = "auto",
    ray: RayFlag = None,
    explain: bool = False,
    resume: bool = False,
    force: ForceFlag = False,
    train: Annotated[Sequence[Any] | None, Parameter(parse=False)] = None,
) -> FinetuneResult | SearchResult | StoppedRun | Explanation:
    """Fine-tune a model for a task, evaluate it on dev and save it.

    The task is inferred from the columns of the data. Settings that you do not give default to the published ones for
    the family, size and task of the model; --explain prints them.

    Parameters
    ----------
    model
        A bundled model (small), a Bertsmith or Hugging Face model folder, or a preset such as bert-small. A preset is
        randomly initialised and its tokenizer is learned from the training texts. In Python also a model object,
        which is not modified.
    data
        Folder with train.jsonl and dev.jsonl (or .csv, .tsv, .parquet), a single such file, the original files of GLUE
        or SQuAD, or a data set on the hub, for example glue/mrpc. Without a dev split, rows of train are held out.
    dev
        Evaluation data, if not in --data: a folder with a dev split, a file, or a data set on the hub. In Python, with
        train, also a list of rows.
    out
        Output folder: the model, report.html, result.json, dev.predictions.jsonl, log.jsonl and recipe.toml. Optional
        in Python with train; then nothing is saved.
    task
        Kind of task: classification, multi_label, regression, tagging, parsing, spans, choice, embedding or
        translation.
        Inferred from the columns by default.
    column
        Column for a role of the task, for example label=stars; repeatable.
    recipe
        TOML file with the settings, or the name of one that comes with the package (`bertsmith list recipes`). --resume
        uses the recipe of the run.
    source
        Translation: source column; inferred if exactly two columns contain text.
    target
        Translation: target column.
    epochs
        Number of epochs (run.epochs).
    learning_rate
        Peak learning rate (optimizer.learning_rate).
    batch
        Examples per optimiser step (batch.examples).
    adversarial
        Adversarial training: "sift" perturbs normalised embeddings, "vat" raw embeddings. Off by default.
    teacher
        Folder of a model fine-tuned for the same task, used as the teacher for distillation (distillation.teacher).
        Without MODEL, the student is a sub-network of the teacher (model.subnet).
    set
        Override a setting of the recipe, for example optimizer.learning_rate=1e-3; repeatable.
    seed
        Random seed of new weights, data order and dropout (run.seed).
    seeds
        Number of runs with consecutive seeds. Each run gets a folder in --out, which also gets the best model; the
        score is reported as mean and standard deviation.
    learning_rates
        Learning rates to try, for example 2e-5 5e-5; each is run with every seed.
    device
        Device to run on; "auto" uses a GPU if one is available.
    ray
        With --seeds and --learning-rates: runs on a Ray cluster, by its address, "auto", or "local" to start one on
        this machine. --out and the data must be in folders that all machines share.
    explain
        Print all settings, the source of their defaults, and the number of steps, tokens and FLOPs; do not train.
    resume
        Resume from the newest intact checkpoint in --out.
    force
        Replace the contents of --out.
    train
        Python only, instead of data: rows as mappings, or tuples of one or two texts and the label.
    """
    out = None if out is None else Path(out)
    if resume and out is None:
        raise InputError("--resume needs --out, the folder of the run to resume")
    plain = dict(read_recipe_file(recipe, out if resume else None) or {})
    start = None if model is None or isinstance(model, str | Path) else model
    name = None if model is None else model_text(model) if start is None else IN_MEMORY
    plain["model"] = _model_settings(plain, name, None if teacher is None else model_text(teacher))
    if teacher is not None:
        plain["distillation"] = {**plain.get("distillation", {}), "teacher": model_text(teacher)}
    dev_rows = None if isinstance(dev, str | Path) else dev
    flags = {
        "data": data,
        "dev": dev if isinstance(dev, str | Path) else None,
        "task.source": source,
        "task.target": target,
        "run.epochs": epochs,
        "optimizer.learning_rate": learning_rate,
        "batch.examples": batch,
        "run.seed": seed,
        "adversarial.kind": adversarial,
    }
    plain = _override(plain, set or [], flags)
    has_decoder = _has_decoder(plain, start)
    settings, tables = read_settings(
        plain, task, column or [], train, dev_rows, source=str(recipe or "settings"), has_decoder=has_decoder
    )
    complete = complete_settings(settings, plain, tables, start)
    search = find_search(seeds, learning_rates, complete.settings, out if resume else None)
    if explain:
        task_data = read_data(complete.settings, *tables)
        facts = {"defaults from": complete.source, **explain_costs(task_data, start)}
        return print_explanation(task_data.settings, facts)
    if search is not None:
        return run_search(
            search, complete.settings, tables, out, start=start, device=device, resume=resume, force=force, ray=ray
        )
    if ray is not None:
        raise InputError("--ray is given, but there is one run; it is for --seeds and --learning-rates")
    if out is not None:
        return run_finetuning(complete.settings, tables, out, start=start, device=device, resume=resume, force=force)
    if settings.data is not None and start is None:
        raise InputError("--out is not given; give the folder to write to")
    with TemporaryDirectory(prefix="bertsmith-") as folder:
        return run_finetuning(
            complete.settings, tables, Path(folder) / "run", start=start, device=device, prints_folder=False
        )


def _model_settings(plain: dict[str, Any], name: str | None, teacher: str | None) -> dict[str, Any]:
    """Return the `model` settings from the recipe or the flag; a student without either is a part of its teacher."""
    table = expand_source(plain.get("model"))
    if name is not None:
        table = replace_source(table, name)
    if teacher is not None and not table.keys() & SOURCES:
        table |= source_fields(teacher)
    if not table.keys() & {*SOURCES, "name"}:
        raise InputError("MODEL is not given, and no recipe sets it; give a bundled model, a folder or a preset")
    return table


def _override(plain: dict[str, Any], assignments: list[str], flags: dict[str, Any]) -> dict[str, Any]:
    """Apply --set and then the flags that are not None to the settings."""
    flags = {path: value for path, value in flags.items() if value is not None}
    numbers = [f"{path}={value}" for path, value in flags.items() if not isinstance(value, str | Path)]
    plain = override(plain, [*assignments, *numbers])
    for path, value in flags.items():
        if isinstance(value, str | Path):
            table, _, key = path.rpartition(".")
            plain = {**plain, **({table: {**plain.get(table, {}), key: str(value)}} if table else {key: str(value)})}
    return plain


def _has_decoder(plain: dict[str, Any], start: Model | None) -> bool:
    """Whether the model to start from is an encoder-decoder."""
    source = plain["model"]
    if start is not None:
        return start.config.decoder is not None
    if "preset" in source:
        return preset(source["preset"]).decoder is not None
    if "folder" not in source:
        return bool(source.get("network", {}).get("decoder"))
    check_name(source["folder"])  # before the data is read
    try:
        described = read_json(model_folder(source["folder"]) / "config.json")
    except (ValueError, InputError):
        return False  # the error is raised when the model is loaded
    return described.get("model_type") == "marian" or bool(described.get("model", {}).get("decoder"))


def read_settings(
    plain: dict[str, Any],
    kind: str | None,
    columns: Sequence[str],
    train: Sequence[Any] | None,
    dev: Sequence[Any] | None,
    *,
    source: str,
    has_decoder: bool = False,
) -> tuple[FinetuneSettings | TranslationSettings, Tables]:
    """Read the data and return it with the settings; a task that is not set is inferred from the columns."""
    notices: list[str] = []
    rows, dev_rows = _read_tables(plain, train, dev)
    if kind is None and "kind" not in plain.get("task", {}) and has_decoder:
        kind = "translation" if Parsing.find_columns(sample_row(rows)) is None else "parsing"
    if "kind" not in plain.get("task", {}) or kind is not None or columns:
        task = recognise(rows, kind, columns, plain.get("task", {}), plain.get("data"), notices=notices)
        plain = {**plain, "task": task}
    chosen = plain["task"]["kind"]
    has_pairs = chosen == "translation" or (chosen == "parsing" and has_decoder)
    settings_type = TranslationSettings if has_pairs else FinetuneSettings
    settings: FinetuneSettings | TranslationSettings = settings_type.parse(plain, source=source)
    if dev_rows is None:
        # labels are collected before rows are held out, so that no held-out label is unknown
        settings = settings.changed(task=settings.task.resolve(rows))
        rows, dev_rows, notice = hold_out(settings.task, rows, "there is no dev split")
        notices.append(notice)
    return settings, Tables(rows, dev_rows, tuple(notices))


def _read_tables(
    plain: dict[str, Any], train: Sequence[Any] | None, dev: Sequence[Any] | None
) -> tuple[Table, Table | None]:
    """Return the training rows and the dev rows; None if dev has to be held out from train."""
    dev_rows = None
    if train is not None:
        rows, dev_rows = read_rows(train, "train"), None if dev is None else read_rows(dev, "dev")
    elif dev is not None:
        raise InputError("dev is given without train; give both, or data")
    elif plain.get("data") is None:
        raise InputError(
            "data is not given; pass --data with a folder that contains train.jsonl and dev.jsonl, a file, or a data "
            "set on the hub"
        )
    else:
        splits = task_splits(plain["data"])
        rows = splits.read("train")
        dev_rows = None if plain.get("dev") is not None else splits.find("dev")
    if plain.get("dev") is not None:
        if dev_rows is not None:
            raise InputError(f"dev is {plain['dev']!r}, but rows of dev are given as well; give one of them")
        dev_rows = task_splits(plain["dev"], file_is="dev").read("dev")
    return rows, dev_rows


def complete_settings(
    settings: FinetuneSettings | TranslationSettings, plain: dict[str, Any], tables: Tables, start: Model | None = None
) -> Completed:
    """Fill settings that `plain`, their source, does not set with the published defaults."""
    if isinstance(settings, TranslationSettings):
        return Completed(settings, TRANSLATION_DEFAULTS)
    if start is not None and settings.model.overrides:
        raise InputError("model.overrides is set, but the model is a Python object; allowed for a preset or a folder")
    config = settings.model.described_config() if start is None else start.config
    return complete(settings, plain, config, len(tables.train))

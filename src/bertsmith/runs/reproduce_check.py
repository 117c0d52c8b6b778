"""Check tables before they run: settings and networks without any data, then a rehearsal on a sample of the data."""

import gzip
import inspect as signatures
import json
import lzma
import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from bertsmith.errors import InputError
from bertsmith.models.cost import parameters
from bertsmith.models.published import preset
from bertsmith.recipes import merge_settings, resolve_base
from bertsmith.reproduction.measurements import MEASUREMENTS
from bertsmith.reproduction.plan import PlannedRun, RunPlan, find_value
from bertsmith.reproduction.table import ExperimentTable, merge_run_settings
from bertsmith.runs.convert import convert_model
from bertsmith.runs.corpus import corpus
from bertsmith.runs.evaluate import evaluate
from bertsmith.runs.inspect import inspect
from bertsmith.runs.jobs import JobOrder, execute
from bertsmith.runs.shrink import METHODS
from bertsmith.runs.tokenizer import tokenizer
from bertsmith.settings import Plain
from bertsmith.shrinking.context import ShrinkSettings
from bertsmith.shrinking.elastic import ElasticSettings
from bertsmith.shrinking.exits import ExitSettings
from bertsmith.shrinking.prune import PruneSettings
from bertsmith.shrinking.vocabulary import VocabularySettings
from bertsmith.shrinking.weights import WeightSettings
from bertsmith.text.readers import numbered_lines
from bertsmith.training.finetuning import FinetuneSettings, TranslationSettings
from bertsmith.training.pretraining import PretrainSettings

SAMPLE_ROWS, SAMPLE_TEXTS = 48, 24
_NARROW_HEAD = 16
_SHRINK_SETTINGS: dict[str, type[ShrinkSettings]] = dict(
    zip(METHODS, (ElasticSettings, PruneSettings, WeightSettings, ExitSettings, VocabularySettings), strict=True)
)
_ARGUMENTS: dict[str, Callable[..., object]] = {
    "tokenizer": tokenizer,
    "corpus": corpus,
    "convert": convert_model,
    "evaluate": evaluate,
    "inspect": inspect,
}


def check_table(table: ExperimentTable, plan: RunPlan) -> dict[str, int]:
    """Check the settings of every run of a table without data; return the parameters of every fresh network by run.

    Raises InputError for the first run whose settings are invalid.
    """
    sizes = {}
    keys = plan.keys_of(table.name)
    distinct = {job.identity: job for key, job in reversed(plan.jobs.items()) if key in keys}
    for job in distinct.values():
        try:
            size = _check_job(job)
        except InputError as error:
            raise InputError(f"{job.label}: {error}") from None
        if size is not None:
            sizes[job.label] = size
    return sizes


def _check_job(job: PlannedRun) -> int | None:
    """Check the settings of a run; return the number of parameters of a fresh network that it pre-trains."""
    settings = job.settings
    if job.command == "pretrain":
        recipe = PretrainSettings.parse(resolve_base({**settings, "data": None}), source="settings")
        if recipe.model.network is not None:  # it has the vocabulary of its corpus
            return parameters(recipe.model.network)
        return None if recipe.has_folder else parameters(recipe.network(None))
    if job.command == "finetune":
        task = settings.get("task", {})
        task = task if "kind" in task else {**_ANY_TASK, **task}
        name = settings.get("model", {}).get("preset")
        is_pair_model = name is not None and preset(name).decoder is not None
        kind = TranslationSettings if is_pair_model else FinetuneSettings
        kind.parse({**settings, "task": task}, source="settings")
    elif job.command == "shrink":
        method = settings.get("method", "elastic")
        if method not in METHODS:
            raise InputError(f"method is {method!r}; allowed: {', '.join(METHODS)}")
        _SHRINK_SETTINGS[method].parse({"method": method, "task": _ANY_TASK, **settings}, source="settings")
    elif job.command == "measure":
        arguments = dict(settings)
        what = arguments.pop("what", None)
        if what not in MEASUREMENTS:
            raise InputError(f"what is {what!r}; allowed: {', '.join(MEASUREMENTS)}")
        _bind(MEASUREMENTS[what], {**arguments, "device": "cpu"})
        if what == "held_out":
            PretrainSettings.parse(resolve_base({**arguments["recipe"], "data": None}), source="recipe")
    else:
        _bind(_ARGUMENTS[job.command], {**settings, "out": Path("out")})
    return None


_ANY_TASK: Plain = {"kind": "classification", "text": "text"}
"""Stands for the task that the columns of the data show."""


def _bind(function: Callable[..., object], arguments: Plain) -> None:
    """Raise InputError if a function does not take these arguments."""
    try:
        signatures.signature(function).bind(**arguments)
    except TypeError as error:
        raise InputError(f"{function.__name__}: {error}") from None


def rehearse(tables: Sequence[ExperimentTable], data: Path, show: Callable[[str], None]) -> dict[str, str]:
    """Run every distinct run of the tables for a few steps, with one seed, narrow and on a CPU; return the errors.

    Networks keep their depth and get heads of width 16; data are the first rows of every file.
    """
    plan = RunPlan([table.with_seeds(1) for table in tables])
    errors: dict[str, str] = {}
    results: dict[str, Plain] = {}
    with tempfile.TemporaryDirectory(prefix="bertsmith-") as temporary:
        folder, sample = Path(temporary) / "runs", Path(temporary) / "data"
        failed: set[str] = set()
        for number, (key, job) in enumerate(plan.jobs.items(), start=1):
            if failed & plan.ancestors(key):
                failed.add(key)
                continue
            for path in job.data_paths:
                sample_data(data / path, sample / path)
            settings = job.located(sample, {need: folder / need for need in job.needs})
            settings = narrow(job, settings, is_read=key in plan.read_keys)
            outcome = execute(JobOrder(key, job.command, settings, folder / key, "cpu"))
            if "error" in outcome:
                failed.add(key)
                errors[job.label] = outcome["error"]
            else:
                results[key] = outcome["result"]
            show(f"{number}/{len(plan.jobs)} {job.label}: {outcome.get('error') or 'works'}")
    return errors | _missing_values(plan, results)


def _missing_values(plan: RunPlan, results: Mapping[str, Plain]) -> dict[str, str]:
    """Return the metrics whose values are not in the results of their runs, with the reason."""
    errors = {}
    for table in plan.tables:
        for metric in table.metrics:
            for row in table.rows_of(metric):
                key = plan.key_of(table.name, metric, row, 0)
                try:
                    if key in results:
                        find_value(results[key], table.metric_of(metric, row).value)
                except InputError as error:
                    errors[f"{table.name}: {metric} of {table.label(row)}"] = str(error)
    return errors


def narrow(job: PlannedRun, settings: Plain, *, is_read: bool = False) -> Plain:
    """Return the settings of a run for a rehearsal: a few steps of a narrow network.

    A fine-tuned model that other runs read takes more steps, because an untrained one is refused as a teacher.
    """
    settings = merge_run_settings(settings, job.check)
    if job.command == "pretrain":
        plain = resolve_base(settings)
        length = plain.get("sequences", {}).get("length", 128)
        few = {
            "sequences": {"micro_tokens": 2 * length},
            "batch": {"tokens": 2 * length},
            "run": {"steps": 2, "compile": "off", "workers": 0, "evaluate_batches": 1},
        }
        return merge_settings(_narrow_model(plain), few)
    if job.command == "finetune":
        plain = _narrow_model(settings)
        if plain.get("task", {}).get("kind") == "translation" or "micro_tokens" in plain.get("sequences", {}):
            few = {"sequences": {"micro_tokens": 512}, "batch": {"tokens": 512}, "tokenizer": {"vocabulary": 400}}
            return merge_settings(plain, {**few, "run": {"steps": 2, "compile": "off", "evaluate_batches": 1}})
        few = {"batch": {"examples": 16}, "run": {"epochs": 8.0 if is_read else 0.4, "compile": "off"}}
        return merge_settings(plain, few)
    if job.command == "shrink":
        few = {"batch": {"examples": 16}, "run": {"epochs": 0.4}}
        for stage in ("width", "depth", "labels", "gates", "weights"):
            if "epochs" in settings.get(stage, {}):
                few[stage] = {"epochs": 0.4}
        return merge_settings(settings, few)
    return settings


def _narrow_model(plain: Plain) -> Plain:
    """Return the settings with a narrower preset; a model from a folder is narrow already."""
    model = plain.get("model", {})
    if not isinstance(model, dict) or "preset" not in model:
        return plain
    overrides = model.get("overrides", {})
    heads = overrides.get("heads", 4)
    width = _NARROW_HEAD * heads
    small: Plain = {"width": width, "heads": heads}
    small |= {name: width for name in ("embedding_width",) if name in overrides}
    small |= {name: 4 * width for name in ("neurons",) if name in overrides}
    return merge_settings(plain, {"model": {"overrides": small}})


def sample_data(source: Path, target: Path) -> None:
    """Copy the first rows of a .jsonl file, or of all such files of a folder, under the same names."""
    if not source.exists():
        raise InputError(f"{str(source)!r} does not exist; --data must be the folder that contains it")
    if source.is_dir():
        for file in source.iterdir():
            sample_data(file, target / file.name)
        return
    if target.exists() or ".jsonl" not in source.name:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for _, line in islice(numbered_lines(source), SAMPLE_ROWS)]
    is_text = all(len(str(row.get("text", ""))) > 400 for row in rows)
    rows = rows[:SAMPLE_TEXTS] if is_text else rows
    _write_rows(target, rows)


def _write_rows(target: Path, rows: Sequence[Any]) -> None:
    """Write rows to a file with the compression that its name states, so that paths stay valid."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    if target.suffix == ".xz":
        text = lzma.compress(text)
    elif target.suffix == ".gz":
        text = gzip.compress(text)
    target.write_bytes(text)

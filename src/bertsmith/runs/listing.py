"""`bertsmith list` and `bertsmith info`: names that commands accept, and the content of a model folder."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import getdoc
from itertools import takewhile
from pathlib import Path
from typing import Literal

from bertsmith import bundled, recipes
from bertsmith.bundled import bundled_hint, model_folder
from bertsmith.checkpoint.source import ModelSource
from bertsmith.checkpoint.store import read_config
from bertsmith.engines.artefact import ARTEFACT_FILE, read_artefact
from bertsmith.errors import InputError, shorten
from bertsmith.files import read_json
from bertsmith.models.config import ModelConfig
from bertsmith.models.cost import parameters
from bertsmith.models.published import PRESETS, preset
from bertsmith.runs.output import RESULT
from bertsmith.runs.result import OneShotResult, print_plain
from bertsmith.shrinking.elastic_metadata import ELASTIC_FILE, read_elastic_metadata
from bertsmith.tasks import TASKS
from bertsmith.tasks.predictor import has_task_record, read_task_record

MAX_LABELS, MAX_LABEL = 8, 40
"""Labels of a task shown by `info`, and characters of each."""
TITLES = {
    "models": "Bundled models",
    "presets": "Presets: sizes with random weights",
    "recipes": "Recipes of pretrain, finetune (--recipe) and compare",
    "tasks": "Tasks of finetune",
}
ListKind = Literal["models", "presets", "recipes", "tasks"]


@dataclass(frozen=True, kw_only=True)
class ListResult(OneShotResult):
    """The names that commands accept, with one line of description each."""

    names: dict[str, dict[str, str]]


@dataclass(frozen=True, kw_only=True)
class InfoResult(OneShotResult):
    """The facts about a model folder."""

    facts: dict[str, str]


def list_names(kind: ListKind | None = None) -> ListResult:
    """List bundled models, presets, recipes and tasks.

    Parameters
    ----------
    kind
        Kind of names to list; all kinds by default.
    """
    makers = {"models": _models, "presets": _presets, "recipes": _recipes, "tasks": _tasks}
    names = {name: make() for name, make in makers.items() if kind in (None, name)}
    for name, rows in names.items():
        if kind is None:
            print_plain(TITLES[name], style="bold")
        _print_table(rows)
    return ListResult(names=names)


def info(folder: str | Path) -> InfoResult:
    """Describe a model folder: network, task, engine, sizes and score, without loading its weights.

    Parameters
    ----------
    folder
        A bundled model (small), a model folder of Bertsmith or Hugging Face, or an exported artefact.
    """
    path = model_folder(folder)
    if not path.is_dir():
        raise InputError(f"model folder {str(path)!r} does not exist{bundled_hint(folder)}")
    config = _read_config(path)
    facts = {"folder": str(path), **_network_facts(config)}
    if (path / ARTEFACT_FILE).is_file():
        artefact = read_artefact(path)
        facts["engine"] = f"{artefact.engine}, {artefact.precision}"
    if has_task_record(path):
        facts |= _task_facts(path)
    if (path / ELASTIC_FILE).is_file():
        elastic = read_elastic_metadata(path)
        sizes = (f"{one.width:g} × {one.depth:g}: {100 * one.score:.1f}" for one in elastic.grid)
        facts["sizes"] = f"width × depth: {elastic.metric} — {', '.join(sizes)}"
    result = read_json(path / RESULT) if (path / RESULT).is_file() else {}
    if isinstance(result.get("score"), float) and "metric" in result:
        facts["score"] = f"{result['metric']} {100 * result['score']:.1f}"
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    facts["size on disk"] = f"{size / 1e6:,.1f} MB"
    _print_table(facts)
    return InfoResult(facts=facts)


def _models() -> dict[str, str]:
    configs = {name: read_config(folder) for name, folder in bundled.FOLDERS.items()}
    return {name: describe_network(config) for name, config in configs.items()}


def _presets() -> dict[str, str]:
    return {name: describe_network(preset(name)) for name in PRESETS}


def _recipes() -> dict[str, str]:
    named = {name: f"pretrain; tiers: {', '.join(recipes.tiers_of(name))}" for name in recipes.presets()}
    return named | {name: _first_comment(path) for name, path in recipes.FILES.items()}


def _tasks() -> dict[str, str]:
    return {kind: (getdoc(task) or "").split("\n")[0] for kind, task in sorted(TASKS.items())}


def _first_comment(path: Path) -> str:
    """Return the first sentence of a recipe file."""
    lines = takewhile(lambda line: line.startswith("# "), path.read_text(encoding="utf-8").splitlines())
    text = " ".join(line.removeprefix("# ").strip() for line in lines)
    return re.split(r"(?<!et al)\. ", text)[0].rstrip(".")


def describe_network(config: ModelConfig) -> str:
    """Describe a network in a few words."""
    encoder = config.encoder
    decoder = "" if config.decoder is None else f" + {len(config.decoder.layers)}"
    count = parameters(config) / 1e6
    return f"{config.family}, {len(encoder.layers)}{decoder} layers of width {encoder.width}, {count:,.1f} M parameters"


def _read_config(path: Path) -> ModelConfig:
    """Read the config of a folder, ours or Hugging Face's."""
    if not (path / "config.json").is_file():
        raise InputError(f"{str(path)!r} has no config.json, so it is not a model folder")
    is_ours = "bertsmith" in read_json(path / "config.json")
    return read_config(path) if is_ours else ModelSource(folder=str(path)).described_config()


def _network_facts(config: ModelConfig) -> dict[str, str]:
    encoder = config.encoder
    return {
        "network": describe_network(config),
        "vocabulary": f"{encoder.vocabulary:,}",
        "max length": f"{encoder.embedding.max_length:,} tokens",
        "heads": ", ".join(head.kind for head in config.heads) or "none",
    }


def _task_facts(path: Path) -> dict[str, str]:
    task = read_task_record(path).task
    facts = {"task": task.kind, "reads": ", ".join(task.input_columns)}
    labels = getattr(task, "labels", None)
    if labels:
        shown = ", ".join(shorten(label, MAX_LABEL) for label in labels[:MAX_LABELS])
        facts["labels"] = f"{len(labels):,}: {shown}{', …' if len(labels) > MAX_LABELS else ''}"
    return facts


def _print_table(rows: Mapping[str, str]) -> None:
    """Print names and descriptions in two columns."""
    width = max(map(len, rows))
    for name, text in rows.items():
        print_plain(f"{name:<{width}}  {text}")

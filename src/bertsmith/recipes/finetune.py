"""Default settings of fine-tuning: the papers' values, by family, size and task."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from bertsmith.models.config import ModelConfig
from bertsmith.recipes import merge_settings
from bertsmith.recipes.finetune_tables import ALIASES, FAMILIES, FRESH, FROZEN, NAMES, OTHERS, Rows
from bertsmith.recipes.parts import Recipe, Table
from bertsmith.settings import Plain
from bertsmith.training.finetuning import AnySettings, FinetuneSettings

# upper limits in millions of layer weights, shared ones counted once per layer
_SIZES = {"tiny": 2, "mini": 6, "small": 20, "medium": 50, "base": 200, "large": 500}
_MIN_STEPS, _MAX_EPOCHS = 300, 20  # on small data (Mosbach et al. 2021: 20 epochs)
_SMALL_DATA_BATCH = {128: 8, 512: 16}  # fewer examples than this -> maximum batch size


def size_of(config: ModelConfig) -> str:
    """Return the size class of a network; shared weights count once per layer, as in its compute cost."""
    width, layers = config.encoder.width, len(config.encoder.layers)
    millions = 12 * layers * width**2 / 1e6
    return next((name for name, limit in _SIZES.items() if millions < limit), "huge")


def task_name(data: str | None) -> str | None:
    """Return the data set of the papers that a folder, a file or a name on the hub refers to, or None."""
    if data is None:
        return None
    path = PurePath(data.replace(":", "/"))
    for part in (path.name, path.stem, path.parent.name):
        name = ALIASES.get(part.lower(), part.lower())
        if name in NAMES:
            return name
    return None


def finetune_recipe(
    config: ModelConfig,
    kind: str,
    name: str | None = None,
    *,
    examples: int | None = None,
    is_fresh: bool = False,
    is_frozen: bool = False,
) -> Recipe:
    """Return default settings for a network and a task, which files and flags override.

    `name` is the data set's, in lower case; `examples` is the number of training examples.
    """
    family = FAMILIES.get(config.family, OTHERS)
    words = {size_of(config), kind, *([name] if name in NAMES else [])}
    words |= {word for word, applies in (("fresh", is_fresh), ("frozen", is_frozen)) if applies}
    if config.family == "deberta-v2" and all(layer.branch is None for layer in config.encoder.layers):
        words.add("v3")
    settings: Table = {}
    for rows in (family.rows, FRESH, FROZEN):
        for row in _matching_rows(rows, words):
            settings |= row
    if examples is not None:
        settings |= _small_data_settings(settings, examples)
    embedding = config.encoder.embedding
    if embedding.positions != "none":
        settings["sequences.length"] = min(settings["sequences.length"], embedding.max_length)
    source = family.source
    if is_frozen or is_fresh:
        source += "; rate and epochs measured by us, " + ("frozen encoder" if is_frozen else "fresh weights")
    return Recipe(source, settings)


def _matching_rows(rows: Rows, words: set[str]) -> Iterator[Table]:
    return (row for selector, row in rows.items() if set(selector.split()) <= words)


def _small_data_settings(settings: Table, examples: int) -> Table:
    """Return a smaller batch and more epochs for data that would otherwise give too few steps."""
    batch = min(
        settings["batch.examples"], *(size for limit, size in _SMALL_DATA_BATCH.items() if examples < limit), 10**9
    )
    wanted = -(-_MIN_STEPS * batch // examples)
    epochs = max(settings["run.epochs"], float(min(_MAX_EPOCHS, wanted)))
    return {"batch.examples": batch, "run.epochs": epochs}


@dataclass(frozen=True)
class Completed:
    """Complete settings, and the source of the defaults among them."""

    settings: AnySettings
    source: str


def complete(given: FinetuneSettings, plain: Mapping[str, Any], config: ModelConfig, examples: int) -> Completed:
    """Fill in the defaults of model and task for settings that `plain`, from which `given` was read, does not set."""
    name = task_name(given.data)
    recipe = finetune_recipe(
        config,
        given.task.kind,
        name,
        examples=examples,
        is_fresh=given.model.is_preset,
        is_frozen=given.encoder.frozen == "all",
    )
    defaults = recipe.plain()
    fixed: Plain = {"data": given.data, "model": given.model.plain(), "task": given.task.plain()}
    # values that were derived from the data are fixed; the defaults of the task's class are not
    task = _supported(defaults.pop("task", {}), given.task)
    fixed["task"] |= {path: value for path, value in task.items() if path not in plain.get("task", {})}
    settings = FinetuneSettings.parse(merge_settings(defaults, {**plain, **fixed}))
    return Completed(settings, f"{recipe.source} ({size_of(config)}{', ' + name if name else ''})")


def _supported(defaults: Mapping[str, Any], task: Any) -> Plain:
    """Return the defaults that a task has settings for; both_orders only for pairs of texts."""
    fields = type(task).model_fields
    has_pairs = getattr(task, "pair", None) is not None
    return {name: value for name, value in defaults.items() if name in fields and (has_pairs or name != "both_orders")}

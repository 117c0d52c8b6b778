"""The settings a fine-tuning has where nobody says otherwise: the papers', by family, size and task."""

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

# by the weights of the layers, each counted by itself: below so many millions
_SIZES = {"tiny": 2, "mini": 6, "small": 20, "medium": 50, "base": 200, "large": 500}
_LEAST_STEPS, _MOST_EPOCHS = 300, 20  # of a run on little data (Mosbach et al. 2021: 20 epochs where there is little)
_FEW = {128: 8, 512: 16}  # examples below which a step sees fewer of them


def size_of(config: ModelConfig) -> str:
    """The class of a network's size; one whose layers share weights counts as if they did not, as it computes."""
    width, layers = config.encoder.width, len(config.encoder.layers)
    millions = 12 * layers * width**2 / 1e6
    return next((name for name, limit in _SIZES.items() if millions < limit), "huge")


def task_name(data: str | None) -> str | None:
    """The data set that a folder, a file or a name on the hub is called after, if it is one of the papers'."""
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
    """Settings for a network and a task, which files and flags are laid over.

    `name` is that of the data set, in lower case; `examples` how many there are to learn from.
    """
    family = FAMILIES.get(config.family, OTHERS)
    words = {size_of(config), kind, *([name] if name in NAMES else [])}
    words |= {word for word, applies in (("fresh", is_fresh), ("frozen", is_frozen)) if applies}
    if config.family == "deberta-v2" and all(layer.branch is None for layer in config.encoder.layers):
        words.add("v3")
    settings: Table = {}
    for rows in (family.rows, FRESH, FROZEN):
        for row in _applying(rows, words):
            settings |= row
    if examples is not None:
        settings |= _for_few(settings, examples)
    embedding = config.encoder.embedding
    if embedding.positions != "none":
        settings["sequences.length"] = min(settings["sequences.length"], embedding.max_length)
    source = family.source
    if is_frozen or is_fresh:
        source += "; rate and epochs by our own measure, " + ("only the head learns" if is_frozen else "fresh weights")
    return Recipe(source, settings)


def _applying(rows: Rows, words: set[str]) -> Iterator[Table]:
    return (row for selector, row in rows.items() if set(selector.split()) <= words)


def _for_few(settings: Table, examples: int) -> Table:
    """Smaller batches and more epochs where the data alone would give a run too few steps to learn anything."""
    batch = min(settings["batch.examples"], *(size for limit, size in _FEW.items() if examples < limit), 10**9)
    wanted = -(-_LEAST_STEPS * batch // examples)
    epochs = max(settings["run.epochs"], float(min(_MOST_EPOCHS, wanted)))
    return {"batch.examples": batch, "run.epochs": epochs}


@dataclass(frozen=True)
class Completed:
    """Complete settings, and the source of the defaults among them."""

    settings: AnySettings
    source: str


def complete(given: FinetuneSettings, plain: Mapping[str, Any], config: ModelConfig, examples: int) -> Completed:
    """The settings with the defaults of model and task wherever `plain`, which they were read from, is silent."""
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
    said: Plain = {"data": given.data, "model": given.model.plain(), "task": given.task.plain()}
    # what was found out of the task counts as said; what it has by itself does not
    task = _known(defaults.pop("task", {}), given.task)
    said["task"] |= {path: value for path, value in task.items() if path not in plain.get("task", {})}
    settings = FinetuneSettings.parse(merge_settings(defaults, {**plain, **said}))
    return Completed(settings, f"{recipe.source} ({size_of(config)}{', ' + name if name else ''})")


def _known(defaults: Mapping[str, Any], task: Any) -> Plain:
    """The defaults for a task that it has settings for; both orders only where there are pairs."""
    fields = type(task).model_fields
    has_pairs = getattr(task, "pair", None) is not None
    return {name: value for name, value in defaults.items() if name in fields and (has_pairs or name != "both_orders")}

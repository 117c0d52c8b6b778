"""Building blocks of recipes: tables of settings by path; later tables override earlier ones."""

import copy
from dataclasses import dataclass

from bertsmith.settings import Plain

Table = Plain
"""Settings by their paths, such as `optimizer.learning_rate`."""


@dataclass(frozen=True)
class Recipe:
    """Settings of a recipe, and their source."""

    source: str
    settings: Table

    def plain(self) -> Plain:
        """Return a copy of the settings as nested tables."""
        plain: Plain = {}
        for path, value in copy.deepcopy(self.settings).items():
            *groups, last = path.split(".")
            node = plain
            for group in groups:
                node = node.setdefault(group, {})
            node[last] = value
        return plain


def by_preset(source: str, *tables: Table, **sizes: Table | tuple[Table, ...]) -> dict[str, Recipe]:
    """Return a recipe for each preset (its name with _ for -): the common tables, overridden by its own."""
    recipes = {}
    for name, own in sizes.items():
        preset = name.replace("_", "-")
        settings: Table = {"model.preset": preset}
        for table in (*tables, *(own if isinstance(own, tuple) else (own,))):
            settings |= table
        recipes[preset] = Recipe(source, settings)
    return recipes


def steps(count: int, warmup: int) -> Table:
    """Return settings for a number of steps and of warm-up steps."""
    return {"run.steps": count, "schedule.warmup": warmup / count}


def batch(sequences: int, length: int, micro: int) -> Table:
    """Return settings for sequences per step, their length, and micro-batch tokens that fit on a GPU with 80 GB."""
    return {"sequences.length": length, "sequences.micro_tokens": micro, "batch.tokens": sequences * length}


def masking(rate: float, unit: str = "token", mask: float = 0.8, random: float = 0.1) -> Table:
    """Return settings for masking: rate, unit, and shares of mask and random tokens."""
    path = "objective.masking"
    return {f"{path}.rate": rate, f"{path}.unit": unit, f"{path}.mask": mask, f"{path}.random": random}


def without(table: Table, *beginnings: str) -> Table:
    """Return the table without the settings whose paths start with one of the given strings."""
    return {path: value for path, value in table.items() if not path.startswith(beginnings)}

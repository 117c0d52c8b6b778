"""What recipes are written with: tables of settings by path, laid over each other."""

import copy
from dataclasses import dataclass

from bertsmith.settings import Plain

Table = Plain
"""Settings by their paths, such as `optimizer.learning_rate`."""


@dataclass(frozen=True)
class Recipe:
    """Where a recipe comes from, and its settings."""

    source: str
    settings: Table

    def plain(self) -> Plain:
        """The settings as tables inside each other, which belong to whoever asked for them."""
        plain: Plain = {}
        for path, value in copy.deepcopy(self.settings).items():
            *groups, last = path.split(".")
            node = plain
            for group in groups:
                node = node.setdefault(group, {})
            node[last] = value
        return plain


def named(source: str, *tables: Table, **sizes: Table | tuple[Table, ...]) -> dict[str, Recipe]:
    """A recipe for each preset (with _ for - in its name): the tables, then its own ones, later over earlier."""
    found = {}
    for name, own in sizes.items():
        preset = name.replace("_", "-")
        settings: Table = {"model.preset": preset}
        for table in (*tables, *(own if isinstance(own, tuple) else (own,))):
            settings |= table
        found[preset] = Recipe(source, settings)
    return found


def steps(count: int, warmup: int) -> Table:
    """A number of steps, and how many of them the rate rises in."""
    return {"run.steps": count, "schedule.warmup": warmup / count}


def batch(sequences: int, length: int, micro: int) -> Table:
    """Sequences of a step, their length, and the tokens of a micro-batch: what one GPU of 80 GB has room for."""
    return {"sequences.length": length, "sequences.micro_tokens": micro, "batch.tokens": sequences * length}


def masking(rate: float, unit: str = "token", mask: float = 0.8, random: float = 0.1) -> Table:
    """How much is masked, in which units, and what stands there instead."""
    path = "objective.masking"
    return {f"{path}.rate": rate, f"{path}.unit": unit, f"{path}.mask": mask, f"{path}.random": random}


def without(table: Table, *beginnings: str) -> Table:
    """The table without the settings whose paths begin so."""
    return {path: value for path, value in table.items() if not path.startswith(beginnings)}

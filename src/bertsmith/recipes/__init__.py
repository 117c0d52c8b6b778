"""Recipes by name: published pre-trainings such as "electra-small:paper", and the files in files/."""

import copy
import fnmatch
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bertsmith.checkpoint.source import expand_source
from bertsmith.errors import InputError, nearest
from bertsmith.recipes.crammed import CRAMMED
from bertsmith.recipes.modern import MODERN
from bertsmith.recipes.paper import PAPER
from bertsmith.recipes.parts import Recipe
from bertsmith.settings import Plain
from bertsmith.toml import read_toml

TIERS: dict[str, dict[str, Recipe]] = {"paper": PAPER, "crammed": CRAMMED, "modern": MODERN}
DEFAULT_TIER = "crammed"
RECIPE_FILES = Path(__file__).parent / "files"
FILES = {
    path.relative_to(RECIPE_FILES).with_suffix("").as_posix(): path for path in sorted(RECIPE_FILES.rglob("*.toml"))
}
"""Recipe files that come with the package, by name, such as "finetune/patient"."""
# a key that chooses a network removes these keys of the base; overrides belong to a preset
_REPLACES = {
    "preset": ("network", "folder", "subnet", "width", "depth"),
    "network": ("preset", "overrides", "folder", "subnet", "width", "depth"),
    "folder": ("preset", "overrides", "network", "width", "depth"),
    "width": ("preset", "overrides", "network", "folder"),
    "depth": ("preset", "overrides", "network", "folder"),
}


def presets() -> list[str]:
    """Return every preset that has a recipe."""
    return list(dict.fromkeys(preset for recipes in TIERS.values() for preset in recipes))


def names() -> list[str]:
    """Return every recipe name, with its tier."""
    return [f"{preset}:{tier}" for preset in presets() for tier in tiers_of(preset)]


def tiers_of(preset: str) -> list[str]:
    """Return the tiers of a preset's recipes."""
    return [tier for tier, recipes in TIERS.items() if preset in recipes]


def find(name: str) -> tuple[str, Recipe]:
    """Return the tier and the recipe of a name; raise InputError with the nearest name if it is unknown."""
    preset, colon, tier = name.partition(":")
    known = tiers_of(preset)
    if not known:
        raise _unknown_recipe(name)
    if not colon:
        tier = DEFAULT_TIER if DEFAULT_TIER in known else known[0]
    if tier not in known:
        there = f"; {tier} exists for {', '.join(TIERS[tier])}" if tier in TIERS else ""
        raise InputError(f"recipe is {name!r}; allowed for {preset}: {', '.join(known)}{there}")
    return tier, TIERS[tier][preset]


def _unknown_recipe(name: str) -> InputError:
    hint = nearest(name.partition(":")[0], [*presets(), *FILES])
    hint = f"{hint} " if hint.startswith("did you mean") else ""
    return InputError(
        f"recipe is {name!r}; {hint}allowed: a .toml file, or a name that `bertsmith list recipes` prints"
    )


def recipe(name: str, processes: int = 1) -> Plain:
    """Return the settings of NAME[:TIER]; micro-batches are limited to one process's share of the batch."""
    tier, found = find(name)
    plain = {"tier": tier, **found.plain()}
    sequences = plain["sequences"]
    sequences["micro_tokens"] = min(sequences["micro_tokens"], plain["batch"]["tokens"] // processes)
    return plain


def read_recipe(given: str | Path, processes: int = 1) -> Plain:
    """Return the settings of a .toml file, of a file that comes with the package, or of NAME[:TIER]."""
    is_preset = str(given).partition(":")[0] in presets()
    if is_preset and not Path(given).is_file():
        return recipe(str(given), processes)
    return resolve_base(read_toml(recipe_path(given)), processes)


def recipe_path(given: str | Path) -> Path:
    """Return the path of a recipe: a .toml file, or the name of a file that comes with the package."""
    path, name = Path(given), str(given)
    if name in FILES:  # as with bundled models, a name means the same in every working directory
        return FILES[name]
    if path.exists():
        return path
    shipped = name.removeprefix("recipes/").removesuffix(".toml")
    if shipped in FILES:
        raise InputError(f"recipe {name!r} does not exist; did you mean {shipped!r}, which comes with the package?")
    if path.suffix == ".toml":
        raise InputError(f"recipe {name!r} does not exist")
    raise _unknown_recipe(name)


def expand_patterns(given: Sequence[str | Path]) -> list[str | Path]:
    """Return recipe names and paths with patterns such as "families/*" replaced by the names that match them."""
    expanded: list[str | Path] = []
    for name in given:
        expanded += fnmatch.filter(FILES, str(name)) or [name]
    return expanded


def resolve_base(data: Mapping[str, Any], processes: int = 1) -> Plain:
    """Return the settings of a file, merged over the recipe that its key `recipe` names, if any."""
    own = {name: value for name, value in data.items() if name != "recipe"}
    if "recipe" not in data:
        return own
    base = data["recipe"]
    if not isinstance(base, str):
        raise InputError(f"recipe is {base!r}; allowed: a name such as 'bert-base:crammed'")
    return merge_settings(recipe(base, processes), own)


def merge_settings(base: Mapping[str, Any], own: Mapping[str, Any]) -> Plain:
    """Merge settings over a base, table by table; base settings that exclude the new ones are removed."""
    plain = copy.deepcopy(_with_tables(base))
    own = _with_tables(own)
    kind = _group(own, "objective").get("kind")
    if kind is not None and kind != _group(plain, "objective").get("kind"):
        plain.pop("objective", None)
        plain.pop("generator", None)
    for name in ("model", "generator"):
        for key in _group(own, name):
            for other in _REPLACES.get(key, ()):
                _group(plain, name).pop(other, None)
    return _merged(plain, own)


def _with_tables(data: Mapping[str, Any]) -> Plain:
    """Return the settings with a model given by its name alone as a table."""
    names = (name for name in ("model", "generator") if isinstance(data.get(name), str))
    return {**data, **{name: expand_source(data[name]) for name in names}}


def _group(data: Mapping[str, Any], name: str) -> Plain:
    found = data.get(name)
    return found if isinstance(found, dict) else {}


def _merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> Plain:
    merged = dict(base)
    for name, value in own.items():
        is_table = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = _merged(merged[name], value) if is_table else value
    return merged

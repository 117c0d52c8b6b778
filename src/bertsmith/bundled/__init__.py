"""Models that come with the package, each in a folder beside this file; names of models.

These functions resolve model names. A string that equals the name of a bundled model refers to that model, even if the
working directory has a folder with the same name; use `./small` or a `Path` for the folder.
"""

import difflib
import sys
from functools import cache
from pathlib import Path

from bertsmith.bundled.hub import full_hub_name, hub_folder, hub_hint, is_hub_name

FOLDERS = {
    folder.name: folder
    for folder in sorted(Path(__file__).parent.iterdir())
    if not folder.name.startswith(".") and (folder / "config.json").is_file()
}
NAMES = FOLDERS.keys()


def bundled_folder(name: str | Path) -> Path | None:
    """Return the folder of a bundled model, or None if no bundled model has this name."""
    return FOLDERS.get(name) if isinstance(name, str) else None


def model_folder(name: str | Path) -> Path:
    """Return the folder of a bundled model or of a model of the hub, or else `name` as a path, which need not exist."""
    folder = bundled_folder(name)
    if folder is not None and (Path(name) / "config.json").is_file():
        _warn_of_namesake(str(name))
    return folder or hub_folder(name) or Path(name)


@cache
def _warn_of_namesake(name: str) -> None:
    print(f"bertsmith: {name!r} is the bundled model; the folder of that name is './{name}'", file=sys.stderr)


def model_text(name: str | Path) -> str:
    """Return a model name as a string for a recipe; a `Path` that could be read as a name gets the prefix "./"."""
    is_ambiguous = isinstance(name, Path) and (str(name) in FOLDERS or is_hub_name(str(name)))
    return f"./{name}" if is_ambiguous else str(name)


def namesake_hint(name: str | Path) -> str:
    """Return a hint for an error about a bundled model if a folder with the same name exists."""
    has_folder = bundled_folder(name) is not None and Path(name).is_dir()
    return f"; the folder of that name is './{name}'" if has_folder else ""


def bundled_hint(name: str | Path) -> str:
    """Return a hint for an error about a missing model: the closest bundled model, or all of them and the hub."""
    if full := full_hub_name(str(name)):
        return f"; did you mean {full!r}, the model of the Hugging Face hub?"
    close = difflib.get_close_matches(str(name), NAMES, n=1, cutoff=0.6)
    if close:
        return f"; did you mean the bundled model {close[0]!r}?"
    names = f"; bundled models: {', '.join(NAMES)}" if FOLDERS else ""
    return names + hub_hint(name)

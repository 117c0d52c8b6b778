"""The models that come with the package: each a folder beside this file, called by the folder's name.

This is the one place where what a person calls a model becomes a folder. A text that is the name of a bundled model
means that model, even where the working directory has a folder of that name; `./small`, or a `Path`, means the folder.
"""

import difflib
from pathlib import Path

FOLDERS = {
    folder.name: folder
    for folder in sorted(Path(__file__).parent.iterdir())
    if not folder.name.startswith(".") and (folder / "config.json").is_file()
}
NAMES = FOLDERS.keys()


def bundled_folder(name: str | Path) -> Path | None:
    """The folder of the bundled model of this name; None if there is none."""
    return FOLDERS.get(name) if isinstance(name, str) else None


def model_folder(given: str | Path) -> Path:
    """The folder that is meant, whether it exists or not: a bundled model's, or the path as it is given."""
    return bundled_folder(given) or Path(given)


def model_text(given: str | Path) -> str:
    """The same model as a text for a recipe, which knows no paths: a folder that has a bundled name gets its "./"."""
    return f"./{given}" if isinstance(given, Path) and str(given) in FOLDERS else str(given)


def namesake_hint(given: str | Path) -> str:
    """A clause for the end of a sentence about a bundled model, where a folder of its name may have been meant."""
    is_here = bundled_folder(given) is not None and Path(given).is_dir()
    return f"; the folder of that name is './{given}'" if is_here else ""


def bundled_hint(given: str | Path) -> str:
    """A clause for the end of a sentence about a model that is not there: the bundled models, the closest alone."""
    close = difflib.get_close_matches(str(given), NAMES, n=1, cutoff=0.6)
    if close:
        return f"; did you mean the bundled model {close[0]!r}?"
    return f"; bundled models: {', '.join(NAMES)}" if FOLDERS else ""

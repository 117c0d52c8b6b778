"""Data sets of the Hugging Face hub, through the package `datasets`."""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from bertsmith.errors import InputError
from bertsmith.text.rows import Row

_NAME = re.compile(r"[\w-][\w.-]*((/[\w-][\w.-]*){1,2}|(/[\w-][\w.-]*)?:[\w.-]+)")


def is_hub_name(text: str) -> bool:
    """Whether a text has the form of a name on the hub: owner/name, name/config, name:config, owner/name:config."""
    return _NAME.fullmatch(text) is not None


def load_hub_splits(name: str) -> Mapping[str, Iterable[Row]]:
    """Load the splits of a data set by name: "glue/mrpc", "owner/name", "owner/name:config", or a local folder."""
    try:
        import datasets
    except ImportError:
        raise InputError(
            f"--data {name!r} is no file or folder here, and to get it from the hub needs datasets, which is not "
            "installed: pip install 'bertsmith[hf]'"
        ) from None
    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.ERROR)  # it logs every attempt
    is_here = Path(name).is_dir()
    has_bars = is_here and datasets.is_progress_bar_enabled()
    if has_bars:
        datasets.disable_progress_bars()  # nothing is downloaded
    reasons = []
    try:
        for path, config in _interpretations(name):
            try:
                found = datasets.load_dataset(path, config)
            except Exception as error:  # any error: the name may have another interpretation
                reasons.append(next(iter(str(error).strip().splitlines()), type(error).__name__))
                # an unreachable hub takes half a minute: try it once
                if isinstance(error, ConnectionError) and "offline" not in str(error).lower():
                    break
            else:
                return found if isinstance(found, Mapping) else {"train": found}
    finally:
        log.setLevel(level)
        if has_bars:
            datasets.enable_progress_bars()
    if is_here:
        raise InputError(
            f"--data {name!r} has no part of a task: a file train, dev or test that ends in .jsonl, .csv, .tsv (also "
            f".gz, .xz, .zst) or .parquet; nor can datasets read it as a folder of the hub: {reasons[0]}"
        )
    raise InputError(
        f"--data {name!r} is neither a file or folder with a task in it nor to be had from the hub: {reasons[0]}"
    )


def _interpretations(name: str) -> list[tuple[str, str | None]]:
    """Interpretations of a name as name and config, the most likely first."""
    if name.startswith("/"):
        return [(name, None)]
    path, colon, config = name.partition(":")
    if colon:
        return [(path, config)]
    first, *rest = path.split("/")
    if len(rest) == 2:
        return [(f"{first}/{rest[0]}", rest[1])]
    # "glue/mrpc" may be a set with a config, "owner/name" a set of someone's
    return [(path, None), (first, rest[0])] if rest else [(path, None)]


def named_rows(split: Iterable[Row]) -> list[Row]:
    """The rows of a split, with class indices replaced by the names that the data set has for them."""
    features = getattr(split, "features", None) or {}
    names = {column: found for column, feature in features.items() if (found := _class_names(feature)) is not None}
    rows = [dict(row) for row in split]
    for row in rows:
        for column, known in names.items():
            row[column] = _by_name(row[column], known)
    return [*rows]


def _class_names(feature: object) -> Sequence[str] | None:
    """The class names of a feature, or of the entries of a list feature."""
    inner = feature[0] if isinstance(feature, list) and feature else getattr(feature, "feature", feature)
    names = getattr(inner, "names", None)
    return list(names) if isinstance(names, list | tuple) else None


def _by_name(value: object, names: Sequence[str]) -> object:
    if isinstance(value, list):
        return [_by_name(entry, names) for entry in value]
    if isinstance(value, int):
        return names[value] if 0 <= value < len(names) else None  # -1: the label is not published
    return value

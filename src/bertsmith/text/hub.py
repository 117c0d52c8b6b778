"""Datasets of the Hugging Face hub, read with the package `datasets`."""

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
    """Load the splits of a dataset by name: "glue/mrpc", "owner/name", "owner/name:config", or a local folder."""
    try:
        import datasets
    except ImportError:
        raise InputError(
            f"--data {name!r} is not a local file or folder, and loading it from the hub needs datasets, which is not "
            "installed: pip install 'bertsmith[hf]'"
        ) from None
    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.ERROR)  # it logs every attempt
    is_local = Path(name).is_dir()
    has_bars = is_local and datasets.is_progress_bar_enabled()
    if has_bars:
        datasets.disable_progress_bars()  # there is no download
    reasons = []
    try:
        for path, config in _interpretations(name):
            try:
                dataset = datasets.load_dataset(path, config)
            except Exception as error:  # any error: the name may have another interpretation
                reasons.append(next(iter(str(error).strip().splitlines()), type(error).__name__))
                # an unreachable hub takes half a minute to fail: try it only once
                if isinstance(error, ConnectionError) and "offline" not in str(error).lower():
                    break
            else:
                return dataset if isinstance(dataset, Mapping) else {"train": dataset}
    finally:
        log.setLevel(level)
        if has_bars:
            datasets.enable_progress_bars()
    if is_local:
        raise InputError(
            f"--data {name!r} has no split of a task: a file train, dev or test with ending .jsonl, .csv, .tsv (also "
            f".gz, .xz, .zst) or .parquet; and datasets cannot read the folder: {reasons[0]}"
        )
    raise InputError(f"--data {name!r} is neither a local file or folder nor available from the hub: {reasons[0]}")


def _interpretations(name: str) -> list[tuple[str, str | None]]:
    """Return the possible (name, config) pairs of a name, the most likely first."""
    if name.startswith("/"):
        return [(name, None)]
    path, colon, config = name.partition(":")
    if colon:
        return [(path, config)]
    first, *rest = path.split("/")
    if len(rest) == 2:
        return [(f"{first}/{rest[0]}", rest[1])]
    # "glue/mrpc" is a dataset with a config, "owner/name" a dataset of a user
    return [(path, None), (first, rest[0])] if rest else [(path, None)]


def named_rows(split: Iterable[Row]) -> list[Row]:
    """Return the rows of a split, with class indices replaced by class names."""
    features = getattr(split, "features", None) or {}
    names = {column: labels for column, feature in features.items() if (labels := _class_names(feature)) is not None}
    rows = [dict(row) for row in split]
    for row in rows:
        for column, labels in names.items():
            row[column] = _by_name(row[column], labels)
    return [*rows]


def _class_names(feature: object) -> Sequence[str] | None:
    """Return the class names of a feature, or of the elements of a list feature."""
    inner = feature[0] if isinstance(feature, list) and feature else getattr(feature, "feature", feature)
    names = getattr(inner, "names", None)
    return list(names) if isinstance(names, list | tuple) else None


def _by_name(value: object, names: Sequence[str]) -> object:
    if isinstance(value, list):
        return [_by_name(element, names) for element in value]
    if isinstance(value, int):
        return names[value] if 0 <= value < len(names) else None  # -1: unpublished label of a test split
    return value

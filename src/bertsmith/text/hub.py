"""Tasks by their name on the Hugging Face hub, through the package `datasets`."""

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bertsmith.errors import InputError

_NAME = re.compile(r"[\w-][\w.-]*((/[\w-][\w.-]*){1,2}|(/[\w-][\w.-]*)?:[\w.-]+)")


def is_hub_name(text: str) -> bool:
    """Whether a text has the form of a name on the hub: owner/name, name/config, name:config, owner/name:config."""
    return _NAME.fullmatch(text) is not None


def hub_parts(name: str) -> Mapping[str, Any]:
    """The parts of a data set by their names: "glue/mrpc", "owner/name", "owner/name:config", or a local folder."""
    try:
        import datasets
    except ImportError:
        raise InputError(
            f"--data {name!r} is no file or folder here, and to get it from the hub needs datasets, which is not "
            "installed: pip install 'bertsmith[hf]'"
        ) from None
    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.ERROR)  # it tells of every attempt; one sentence at the end is enough
    is_here = Path(name).is_dir()
    has_bars = is_here and datasets.is_progress_bar_enabled()
    if has_bars:
        datasets.disable_progress_bars()  # nothing is downloaded
    reasons = []
    try:
        for path, config in _readings(name):
            try:
                found = datasets.load_dataset(path, config)
            except Exception as error:  # whatever the package raises: the name is one of several readings
                reasons.append(next(iter(str(error).strip().splitlines()), type(error).__name__))
                # a hub that cannot be reached is tried for half a minute, which once is enough
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


def _readings(name: str) -> list[tuple[str, str | None]]:
    """What a name may mean, as name and config, the likeliest first."""
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


def named_rows(part: Any) -> list[dict[str, Any]]:
    """The rows of a part, class numbers turned into the names that the data set gives them."""
    features = getattr(part, "features", None) or {}
    names = {column: found for column, feature in features.items() if (found := _class_names(feature)) is not None}
    rows = [dict(row) for row in part]
    for row in rows:
        for column, known in names.items():
            row[column] = _by_name(row[column], known)
    return rows


def _class_names(feature: Any) -> Sequence[str] | None:
    """The names of the classes that a feature, or each entry of a list of them, counts."""
    inner = feature[0] if isinstance(feature, list) and feature else getattr(feature, "feature", feature)
    names = getattr(inner, "names", None)
    return list(names) if isinstance(names, list | tuple) else None


def _by_name(value: Any, names: Sequence[str]) -> Any:
    if isinstance(value, list):
        return [_by_name(entry, names) for entry in value]
    if isinstance(value, int):
        return names[value] if 0 <= value < len(names) else None  # -1 stands for a label that is kept secret
    return value

"""Models of the Hugging Face hub by name, such as google-bert/bert-base-uncased."""

import re
from functools import lru_cache
from pathlib import Path

_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_OWNERS = {
    "google-bert": r"bert-(base|large)-[\w-]+",
    "FacebookAI": r"(xlm-)?roberta-(base|large)[\w-]*",
    "distilbert": r"distil(bert|roberta)-base[\w-]*",
    "albert": r"albert-x{0,2}(base|large)-v[12]",
    "google": r"electra-(small|base|large)-(discriminator|generator)",
    "answerdotai": r"ModernBERT-(base|large)",
    "sentence-transformers": r"(all|multi-qa|msmarco|paraphrase)-[\w.-]+",
}
"""Owners of models on the hub that people know by the rest of the name."""
_FILES = ("*.json", "*.safetensors", "vocab.txt")  # no pickles, no graphs, no code


def hub_folder(name: str | Path) -> Path | None:
    """Return the local copy of a model of the hub, downloaded unless it is cached; None if it is not available."""
    found = _download(str(name)) if is_hub_name(name) else None
    return found if isinstance(found, Path) else None


def hub_hint(name: str | Path) -> str:
    """Return a hint for an error about a missing model: why it could not be loaded from the hub."""
    reason = _download(str(name)) if is_hub_name(name) else None
    return f"; nor is it available from the Hugging Face hub: {reason}" if isinstance(reason, str) else ""


def full_hub_name(name: str) -> str | None:
    """Return the whole name of a well-known model of the hub that is given without its owner, or None."""
    owner = next((owner for owner, pattern in _OWNERS.items() if re.fullmatch(pattern, name)), None)
    return None if owner is None else f"{owner}/{name}"


def is_hub_name(name: str | Path) -> bool:
    """Whether a name has the form owner/name; if the first part is a local folder or file, it is a path."""
    is_name = isinstance(name, str) and _NAME.fullmatch(name) is not None
    return is_name and not Path(str(name).partition("/")[0]).exists()


@lru_cache(maxsize=64)
def _download(name: str) -> Path | str:
    """Return the local copy of a model, or the reason why there is none."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        return "huggingface_hub is not installed: pip install 'bertsmith[hf]'"
    try:
        cached = Path(snapshot_download(name, allow_patterns=list(_FILES), local_files_only=True))
        if any(cached.glob("*.safetensors")):
            return cached
    except Exception:  # not cached: any other problem shows below
        pass
    try:
        return Path(snapshot_download(name, allow_patterns=list(_FILES)))
    except Exception as error:  # the library raises many kinds: no network, no such model, no access
        return next(iter(str(error).strip().splitlines()), type(error).__name__)

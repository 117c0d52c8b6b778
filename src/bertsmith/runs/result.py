"""Typed results of runs, which console output, reports and result.json are made from."""

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from rich.console import Console

from bertsmith.settings import Record
from bertsmith.toml import to_toml


def spread() -> Any:
    """Declare a field whose items are written at the top level of result.json."""
    return field(metadata={"spread": True})


def to_json(value: object) -> Any:
    """Return a value as JSON-ready data; dataclass fields that are None are omitted unless marked "nullable"."""
    if isinstance(value, Record):
        return value.plain()
    if isinstance(value, Result):
        return value.to_json()
    if is_dataclass(value) and not isinstance(value, type):
        return _fields_to_json(value)
    if isinstance(value, dict):
        return {name: to_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return value


def _fields_to_json(value: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for entry in fields(value):
        inner = None if entry.metadata.get("hidden") else to_json(getattr(value, entry.name))
        if entry.metadata.get("spread"):
            plain |= inner or {}
        elif inner is not None or (entry.metadata.get("nullable") and not entry.metadata.get("hidden")):
            plain[entry.name] = inner
    return plain


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of a run. `result["score"]` returns a value by its key in result.json."""

    is_finished: bool = True

    @property
    def exit_code(self) -> int:
        """Exit code of the command."""
        return 0

    def to_json(self) -> dict[str, Any]:
        """Return the content of result.json."""
        return _fields_to_json(self)

    def __getitem__(self, name: str) -> Any:
        return self.to_json()[name]

    def __contains__(self, name: str) -> bool:
        return name in self.to_json()


@dataclass(frozen=True, kw_only=True)
class OneShotResult(Result):
    """Result of a run that cannot be resumed; result.json has no is_finished."""

    is_finished: bool = field(default=True, metadata={"hidden": True})


@dataclass(frozen=True, kw_only=True)
class StoppedRun(Result):
    """A run that was interrupted; `--resume` continues it."""

    is_finished: bool = False
    steps: int
    stage: str | None = None
    """Name of the interrupted stage or run, if there are several."""


@dataclass(frozen=True, kw_only=True)
class Explanation(OneShotResult):
    """Settings and costs of a run, printed by `--explain`."""

    facts: dict[str, str] = spread()


def print_explanation(settings: Record, facts: dict[str, str]) -> Explanation:
    """Print all settings with their help texts, then the facts."""
    console = Console()
    console.print(to_toml(settings.plain(), settings.help()), highlight=False, markup=False, soft_wrap=True)
    for name, value in facts.items():
        console.print(f"{name:<26}{value}", highlight=False, markup=False)
    return Explanation(facts=facts)


def print_plain(text: str, style: str | None = None) -> None:
    """Print a line without markup, highlighting or wrapping."""
    Console().print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def count_of(number: int, noun: str) -> str:
    """Return a number with its noun in the right form.

    >>> count_of(1, "document"), count_of(2000, "document")
    ('1 document', '2,000 documents')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"

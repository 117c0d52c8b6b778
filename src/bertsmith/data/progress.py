"""A progress bar for terminals."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Watch = Callable[[int, int], None]
"""Progress callback, called with the finished and the total number of items."""


@contextmanager
def progress_bar(name: str, *, is_shown: bool = True) -> Iterator[Watch]:
    """Show a bar on standard error, if that is a terminal; the function that is yielded updates it."""
    columns = TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    is_hidden = not (is_shown and console.is_terminal)
    with Progress(*columns, transient=True, console=console, disable=is_hidden) as progress:
        bar = progress.add_task(name, total=None)
        yield lambda done, total: progress.update(bar, completed=done, total=total)

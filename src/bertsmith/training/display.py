"""The live progress line of a run."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from bertsmith.training.log import LogRow

_MIN_BAR_WIDTH = 6  # characters, with the space behind it
_TIME_WIDTH = 14  # "1:23:45 left" with its spaces


class Display:
    """Show step, losses, speed and time left, on the main process only."""

    def __init__(self, steps: int, done: int, *, visible: bool) -> None:
        self.console = Console(stderr=True)
        self.counter_width = 2 * len(str(steps)) + 1
        self.progress = Progress(
            BarColumn(bar_width=12),
            MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=self.counter_width)),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=self.console,
            disable=not visible,
        )
        self.task = self.progress.add_task("training", total=steps, completed=done, status="")
        self.training = self.held_out = self.rest = ""
        """The parts of the status: last training loss, last evaluation, speed and other metrics."""

    def __enter__(self) -> "Display":
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.progress.stop()

    def advance(self) -> None:
        self.progress.advance(self.task)

    def show(self, row: LogRow) -> None:
        """Show the metrics of a log row beside the bar."""
        if row["kind"] == "held_out":
            self.held_out = f" · {_evaluation(row)}"
            self._update()
            return
        parts = [f"{_short(row['tokens_per_second'])} tokens/s"]
        if "replaced_recall" in row:
            parts.insert(0, f"generator {row['generator_loss']:.3f} · recall {row['replaced_recall']:.0%}")
        if "utilisation" in row:
            parts.append(f"MFU {row['utilisation']:.0%}")
        self.training, self.rest = f"loss {row['loss']:.3f}", "".join(f" · {part}" for part in parts)
        self._update()

    def _update(self) -> None:
        """Update the status beside the bar; drop the speed if the line would be too long."""
        status = f"{self.training}{self.held_out}{self.rest}"
        is_wide = len(status) > self.console.width - _MIN_BAR_WIDTH - self.counter_width - _TIME_WIDTH
        self.progress.update(self.task, status=f"{self.training}{self.held_out}" if is_wide else status)

    def notify(self, text: str) -> None:
        """Print a line above the bar."""
        if not self.progress.disable:
            self.console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)


def _evaluation(row: LogRow) -> str:
    """Format the main metric of an evaluation: the task's score, else the loss."""
    if "score" in row:
        return f"dev {row.get('metric', 'score').replace('_', ' ')} {row['score']:.1f}"
    return f"held out {row['loss']:.3f}"


def _short(number: float) -> str:
    for limit, mark in ((1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f}{mark}"
    return f"{number:.0f}"

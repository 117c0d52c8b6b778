"""New training rows for a command: the model that makes them checked before the work, the rows kept beside it."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bertsmith.models.model import Model
    from bertsmith.shrinking.augmentation.words import AugmentationConfig
    from bertsmith.tasks.base import Task
    from bertsmith.text.rows import Table

AUGMENTED = "augmented"
_ROWS = "rows.jsonl"


@dataclass(frozen=True)
class Augmentation:
    """A masked language model and what it is to make of the training rows of a task."""

    task: "Task[Any]"
    config: "AugmentationConfig"
    model: "Model"

    @classmethod
    def of(cls, task: "Task[Any]", config: "AugmentationConfig") -> "Augmentation | None":
        """That of some settings, a sentence if it cannot be; None where no model is given."""
        from bertsmith.bundled import bundled_hint, model_folder
        from bertsmith.checkpoint.store import load
        from bertsmith.errors import InputError
        from bertsmith.shrinking.augmentation.masked_words import MaskedWords
        from bertsmith.shrinking.augmentation.rows import changed_columns

        if config.model is None:
            return None
        if not model_folder(config.model).is_dir():
            hint = bundled_hint(config.model)
            raise InputError(f"augmentation.model is {config.model!r}, which is no folder; give that of a model{hint}")
        changed_columns(task)
        model = load(config.model)
        MaskedWords(model, config)
        return cls(task, config, model)

    def most(self, rows: int) -> int:
        """The most rows there are with new ones, where there are so many without."""
        from bertsmith.shrinking.augmentation.rows import changed_columns

        return rows * (1 + len(changed_columns(self.task)) * self.config.copies_of(rows))

    def table(self, train: "Table", out: Path, device: str) -> "Table":
        """The training rows and the new ones, which are written to a folder in `out` with what they are made from."""
        from accelerate import PartialState
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        from bertsmith.shrinking.augmentation.masked_words import Processes
        from bertsmith.shrinking.augmentation.rows import augmented

        state = PartialState()
        folder, console = out / AUGMENTED, Console(stderr=True)
        columns = TextColumn("words replaced"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        is_quiet = not console.is_terminal or not state.is_main_process
        processes = Processes(state.process_index, state.num_processes, state.wait_for_everyone)
        with Progress(*columns, transient=True, console=console, disable=is_quiet) as progress:
            bar = progress.add_task("words", total=None)
            found = augmented(
                train,
                self.task,
                self.model.to(device),
                self.config,
                folder=folder,
                watch=lambda done, total: progress.update(bar, completed=done, total=total),
                processes=processes,
            )
        self.model.cpu()
        if state.is_main_process:
            new = found.rows[len(train) :]
            _write_rows(folder, new)
            Console().print(f"{len(new):,} new rows beside {len(train):,}: {folder / _ROWS}", markup=False)
        return found


def _write_rows(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes the new rows for people to look at, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{_ROWS}.{os.getpid()}"
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
    temporary.replace(folder / _ROWS)

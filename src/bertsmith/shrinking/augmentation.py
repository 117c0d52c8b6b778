"""Augment the training rows of a task: copies of its texts with replaced words, labels unchanged."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState
from rich.console import Console

from bertsmith.bundled import bundled_hint, model_folder
from bertsmith.checkpoint.store import load
from bertsmith.data.progress import Watch, progress_bar
from bertsmith.data.random import generator
from bertsmith.errors import InputError
from bertsmith.models.model import Model
from bertsmith.shrinking.masked_words import (
    ENGLISH,
    NONE,
    AugmentationConfig,
    MaskedWords,
    Passage,
    Processes,
    match_case,
    passage_candidates,
)
from bertsmith.tasks.base import Task
from bertsmith.tasks.choice import Choice
from bertsmith.tasks.embedding import TextEmbedding
from bertsmith.tasks.spans import SpanAnswers
from bertsmith.tasks.tagging import Tagging
from bertsmith.tasks.texts import TextTask
from bertsmith.text.rows import Row, Table

AUGMENTED = "augmented"
ROWS = "rows.jsonl"


def augment_table(
    table: Table,
    task: Task[Any],
    model: Model,
    config: AugmentationConfig | None = None,
    *,
    folder: Path | None = None,
    watch: Watch | None = None,
    processes: Processes | None = None,
) -> Table:
    """Return the rows of a table followed by augmented ones (TinyBERT, Jiao et al. 2020, algorithm 1).

    `model` fills masks; `config.model` is not read. In every copy of a text each word is replaced with probability
    `config.share` by one of its candidates; of a pair, one text is changed at a time. Duplicates are left out. Labels
    are copied and may no longer be correct, so train on a teacher's outputs. The same arguments give the same rows.
    With a folder, candidates are cached there.
    """
    config = config or AugmentationConfig()
    columns = changed_columns(task)
    task.examples(table, has_targets=False)  # raises if a row does not belong to the task
    masked_words = MaskedWords(model, config)
    stop_words = ENGLISH if config.stop_words == "english" else frozenset[str]()
    values = [
        (index, field, column, table.value(index, column))
        for index in range(len(table))
        for field, column in enumerate(columns)
    ]
    # a context of several turns is not a single text and is not augmented
    texts = [one for one in values if isinstance(one[3], str) or isinstance(task, Tagging)]
    passages = [Passage.of(value, stop_words) for *_, value in texts]
    candidates = passage_candidates(passages, masked_words, folder, watch, processes)
    key_columns = tuple(dict.fromkeys([*task.input_columns, *columns]))
    seen = {_texts(row, key_columns) for row in table.rows}
    rows, numbers = list(table.rows), list(table.numbers)
    copies = config.copies_of(len(table))
    for (index, field, column, value), passage in zip(texts, passages, strict=True):
        if not passage.positions:
            continue
        draws = generator(config.seed, index, field).random((copies, len(passage.positions), 2))
        for words in _draw_copies(passage, candidates[passage], draws, config.share, masked_words.words):
            changed = passage.replaced(words) if isinstance(value, str) else _items(passage, value, words)
            row = {**table.rows[index], column: changed}
            key = _texts(row, key_columns)
            if key not in seen:
                seen.add(key)
                rows.append(row)
                numbers.append(table.numbers[index])
    return Table(table.name, rows, numbers, table.unit)


@dataclass(frozen=True)
class Augmenter:
    """A masked language model that makes new training rows for a task."""

    task: Task[Any]
    config: AugmentationConfig
    model: Model

    @classmethod
    def open(cls, task: Task[Any], config: AugmentationConfig) -> "Augmenter | None":
        """Load and check `config.model`; None if it is not set."""
        if config.model is None:
            return None
        if not model_folder(config.model).is_dir():
            hint = bundled_hint(config.model)
            raise InputError(
                f"augmentation.model is {config.model!r}, which is not a folder; give the folder of a model{hint}"
            )
        changed_columns(task)
        model = load(config.model)
        MaskedWords(model, config)
        return cls(task, config, model)

    def max_rows(self, rows: int) -> int:
        """Upper bound on the number of rows after augmenting `rows` rows."""
        return rows * (1 + len(changed_columns(self.task)) * self.config.copies_of(rows))

    def augment(self, train: Table, out: Path, device: str) -> Table:
        """Return the training rows plus new ones; write the new rows and their candidates to a folder in `out`."""
        state, folder = PartialState(), out / AUGMENTED
        with progress_bar("words replaced", is_shown=state.is_main_process) as watch:
            table = augment_table(
                train,
                self.task,
                self.model.to(device),
                self.config,
                folder=folder,
                watch=watch,
                processes=Processes(state.process_index, state.num_processes, state.wait_for_everyone),
            )
        self.model.cpu()
        if state.is_main_process:
            new = table.rows[len(train) :]
            _write_rows(folder, new)
            Console().print(f"{len(new):,} augmented rows added to {len(train):,}: {folder / ROWS}", markup=False)
        return table


def _write_rows(folder: Path, rows: Sequence[Row]) -> None:
    """Write the new rows to rows.jsonl for inspection, atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{ROWS}.{os.getpid()}"
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
    temporary.replace(folder / ROWS)


def changed_columns(task: Task[Any]) -> tuple[str, ...]:
    """Return the columns in which words are replaced; InputError if the task does not allow it.

    For answer spans only the question is changed, so that answers keep their positions.
    """
    names: tuple[str | None, ...]
    match task:
        case TextTask():
            names = (task.text, task.pair)
        case TextEmbedding():
            names = (task.text, task.pair, task.negative)
        case Choice():
            names = (task.context, task.question)
        case SpanAnswers():
            names = (task.question,)
        case Tagging():
            if task.context == "document":
                raise InputError(
                    "task.context is 'document', but augmented rows belong to no document; use "
                    "task.context=sentence, or remove augmentation.model"
                )
            names = (task.words,)
        case _:
            names = ()
    columns = tuple(name for name in names if name is not None)
    if not columns:
        raise InputError(f"task.kind is {task.kind!r} and no column of texts is named, so no word can be replaced")
    return columns


def _draw_copies(
    passage: Passage, candidates: np.ndarray, draws: np.ndarray, share: float, words: Mapping[int, str]
) -> Iterator[list[str | None]]:
    """Yield the words of every copy of a passage, None for an unchanged word.

    Shape: candidates (words, candidates), draws (copies, words, 2) between 0 and 1.
    """
    counts = (candidates != NONE).sum(1)
    is_replaced = (draws[..., 0] < share) & (counts > 0)
    choices = (draws[..., 1] * counts).astype(np.int64)
    originals = [passage.text[slice(*position)] for position in passage.positions]
    for replaced, choice in zip(is_replaced, choices, strict=True):
        new: list[str | None] = [None] * len(originals)
        for index in np.flatnonzero(replaced).tolist():
            new[index] = match_case(words[int(candidates[index, choice[index]])], originals[index])
        yield new


def _items(passage: Passage, items: Sequence[str], words: Sequence[str | None]) -> list[str]:
    """Return a list of words with some of them replaced."""
    begins = np.cumsum([0, *(len(item) + 1 for item in items[:-1])]).tolist()
    new = {begin: word for (begin, _), word in zip(passage.positions, words, strict=True) if word is not None}
    return [new.get(begin, item) for begin, item in zip(begins, items, strict=True)]


def _texts(row: Row, columns: Sequence[str]) -> tuple[object, ...]:
    """Return the values of some columns of a row as a hashable key."""
    values = (row.get(column) for column in columns)
    return tuple(tuple(value) if isinstance(value, list) else value for value in values)

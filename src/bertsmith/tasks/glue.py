"""The nine tasks of GLUE: their metrics, their official files, and the files their server takes answers in.

The columns of the official .tsv files are those that BERT's own code reads; quotes mean nothing in them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from bertsmith.errors import InputError
from bertsmith.text.rows import Table

_ENTAILMENT = ("entailment", "not_entailment")


@dataclass(frozen=True)
class GlueTask:
    """One task of GLUE."""

    kind: str
    texts: tuple[str, ...]
    """The columns of its texts, as the folders of rows name them."""
    metrics: tuple[str, ...]
    """What is reported; the first chooses the best weights."""
    columns: tuple[int, ...]
    """Where the texts stand in the official train.tsv and dev.tsv …"""
    label_column: int
    test_columns: tuple[int, ...]
    """… and in test.tsv."""
    labels: tuple[str, ...] = ()
    """The labels in the order of their numbers, as the server wants them; empty where it wants the numbers."""
    has_header: bool = True
    may_be_broken: bool = False
    """Whether the official files have rows that a line break has torn apart, which everyone leaves out."""


def _single(metric: str, column: int, label: int, test: int, *, has_header: bool = True) -> GlueTask:
    return GlueTask("classification", ("sentence",), (metric,), (column,), label, (test,), has_header=has_header)


def _pairs(
    metrics: tuple[str, ...],
    columns: tuple[int, int],
    label: int,
    test: tuple[int, int] | None = None,
    *,
    labels: tuple[str, ...] = (),
    kind: str = "classification",
    may_be_broken: bool = False,
) -> GlueTask:
    names = ("sentence1", "sentence2")
    return GlueTask(kind, names, metrics, columns, label, test or columns, labels=labels, may_be_broken=may_be_broken)


GLUE = {
    "CoLA": _single("matthews", 3, 1, 1, has_header=False),
    "SST-2": _single("accuracy", 0, 1, 1),
    "MRPC": _pairs(("f1", "accuracy"), (3, 4), 0),
    "STS-B": _pairs(("spearman", "pearson"), (-3, -2), -1, (-2, -1), kind="regression"),
    "QQP": _pairs(("f1", "accuracy"), (3, 4), 5, (1, 2), may_be_broken=True),
    "MNLI": _pairs(("accuracy",), (8, 9), -1, labels=("entailment", "neutral", "contradiction")),
    "QNLI": _pairs(("accuracy",), (1, 2), 3, labels=_ENTAILMENT),
    "RTE": _pairs(("accuracy",), (1, 2), 3, labels=_ENTAILMENT),
    "WNLI": _pairs(("accuracy",), (1, 2), 3),
}
"""By the name of the folder a task lies in. The numbers of labels are those of the folders of rows."""

MISMATCHED = "MNLI-mm"  # the name of MNLI where it is asked about texts of other kinds than it was trained on


def glue_settings(folder: str | Path | None, kind: str) -> dict[str, str]:
    """What the name of a data folder tells of a task of this kind: its GLUE name and its main metric, or nothing."""
    name = "" if folder is None else Path(folder).name
    known = next((known for known in GLUE if known.lower() == name.lower()), None)
    if known is None or GLUE[known].kind != kind:
        return {}
    return {"name": known, "metric": GLUE[known].metrics[0]}


def name_in_split(name: str | None, split: str) -> str | None:
    """The name a task has in one part of its folder: MNLI has two dev and two test parts."""
    return MISMATCHED if name == "MNLI" and split.endswith("mismatched") else name


def glue_file(name: str, said: Sequence[str | int | float]) -> dict[str, str]:
    """The answers as the file the GLUE server takes, by its name; nothing where name or labels are not GLUE's.

    `said` are labels by name or by number, or values.
    """
    known = "MNLI" if name == MISMATCHED else name
    if known not in GLUE:
        return {}
    written = _written(GLUE[known], said)
    if written is None:
        return {}
    lines = "".join(f"{index}\t{answer}\n" for index, answer in enumerate(written))
    file = {"MNLI": "MNLI-m"}.get(name, name)
    return {f"{file}.tsv": f"index\tprediction\n{lines}"}


def _written(task: GlueTask, said: Sequence[str | int | float]) -> list[str] | None:
    """Answers as the server wants them; None if there is one it does not know."""
    if task.kind == "regression":
        return [f"{min(5.0, max(0.0, float(value))):.3f}" for value in said]
    wanted = task.labels or ("0", "1")
    names = {**{str(number): name for number, name in enumerate(wanted)}, **{name: name for name in wanted}}
    texts = [str(answer) for answer in said]
    return [names[text] for text in texts] if all(text in names for text in texts) else None


def read_glue(file: Path, name: str) -> Table:
    """An official file of a task as rows of idx, its texts and, but for test, label; labels that are words stay so."""
    task = GLUE[name]
    is_test = file.stem.startswith("test")
    columns = task.test_columns if is_test else task.columns
    rows: list[dict[str, Any]] = []
    numbers: list[int] = []
    lines = file.read_text(encoding="utf-8-sig").split("\n")
    begins = int(task.has_header or is_test)
    for number, line in enumerate(lines[begins:], begins + 1):
        cells = line.removesuffix("\r").split("\t")
        if cells == [""]:
            continue
        needed = [*columns, *([] if is_test else [task.label_column])]
        if any(column >= len(cells) or column < -len(cells) for column in needed):
            if task.may_be_broken:
                continue
            raise InputError(f"file {str(file)!r} line {number} has {len(cells)} columns; {name} needs more")
        row = dict(zip(task.texts, (cells[column] for column in columns), strict=True))
        label = {} if is_test else {"label": _label(cells[task.label_column], task, file, number)}
        rows.append({"idx": len(rows), **row, **label})
        numbers.append(number)
    if not rows:
        raise InputError(f"file {str(file)!r} has no rows")
    return Table(f"file {str(file)!r}", rows, numbers)


def official_file(folder: Path, split: str) -> Path | None:
    """The .tsv file of a part, if there is one; "dev" of MNLI is dev_matched."""
    files = (folder / f"{split}.tsv", folder / f"{split}_matched.tsv")
    return next((file for file in files if file.is_file()), None)


def _label(text: str, task: GlueTask, file: Path, number: int) -> str | int | float:
    if task.kind == "regression":
        try:
            return float(text)
        except ValueError:
            raise InputError(f"file {str(file)!r} line {number}: the score is {text!r}; it must be a number") from None
    allowed = task.labels or ("0", "1")
    if text not in allowed:
        raise InputError(f"file {str(file)!r} line {number}: the label is {text!r}; allowed: {', '.join(allowed)}")
    return text if task.labels else int(text)


def glue_average(scores: Mapping[str, float]) -> float:
    """The mean over eight tasks that gives the last column of Table 1 in BERT's paper: without WNLI, and with the two
    parts of MNLI each as a figure of its own.

    `scores` are by name, MNLI-mm among them, each the task's main figure in percent.
    """
    counted = [name for name in (*GLUE, MISMATCHED) if name != "WNLI"]
    missing = [name for name in counted if name not in scores]
    if missing:
        raise InputError(f"the average over GLUE lacks {', '.join(missing)}")
    return fmean(scores[name] for name in counted)

"""The nine GLUE tasks: metrics, official files, and predictions in the format of the GLUE server.

Columns of the official .tsv files are read as by BERT's run_classifier.py; quotes have no special meaning.
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
    """One GLUE task."""

    kind: str
    texts: tuple[str, ...]
    """Names of the text columns."""
    metrics: tuple[str, ...]
    """Reported metrics; the first selects the best checkpoint."""
    columns: tuple[int, ...]
    """Indices of the text columns in the official train.tsv and dev.tsv."""
    label_column: int
    test_columns: tuple[int, ...]
    """Indices of the text columns in test.tsv."""
    labels: tuple[str, ...] = ()
    """Label names by index, as the server expects them; empty if it expects the indices."""
    has_header: bool = True
    may_be_broken: bool = False
    """Whether the official files contain rows broken by a line break, which are skipped as usual."""


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
"""GLUE tasks by the name of their folder."""

MISMATCHED = "MNLI-mm"  # MNLI evaluated on genres that are not in its training data


def glue_settings(folder: str | Path | None, kind: str) -> dict[str, str]:
    """Return GLUE name and main metric if the folder is named after a GLUE task of this kind, else nothing."""
    name = "" if folder is None else Path(folder).name
    known = next((known for known in GLUE if known.lower() == name.lower()), None)
    if known is None or GLUE[known].kind != kind:
        return {}
    return {"name": known, "metric": GLUE[known].metrics[0]}


def name_in_split(name: str | None, split: str) -> str | None:
    """Return the task name of a split: MNLI has two dev and two test splits."""
    return MISMATCHED if name == "MNLI" and split.endswith("mismatched") else name


def glue_file(name: str, predicted: Sequence[str | int | float]) -> dict[str, str]:
    """Return predictions in the format of the GLUE server, by file name; empty if name or labels are not GLUE's.

    `predicted` are label names, label indices, or values.
    """
    known = "MNLI" if name == MISMATCHED else name
    if known not in GLUE:
        return {}
    answers = _server_answers(GLUE[known], predicted)
    if answers is None:
        return {}
    lines = "".join(f"{index}\t{answer}\n" for index, answer in enumerate(answers))
    file = {"MNLI": "MNLI-m"}.get(name, name)
    return {f"{file}.tsv": f"index\tprediction\n{lines}"}


def _server_answers(task: GlueTask, predicted: Sequence[str | int | float]) -> list[str] | None:
    """Return answers in the server's notation; None if one is not a label of the task."""
    if task.kind == "regression":
        return [f"{min(5.0, max(0.0, float(value))):.3f}" for value in predicted]
    labels = task.labels or ("0", "1")
    names = {**{str(index): name for index, name in enumerate(labels)}, **{name: name for name in labels}}
    texts = [str(answer) for answer in predicted]
    return [names[text] for text in texts] if all(text in names for text in texts) else None


def read_glue(file: Path, name: str) -> Table:
    """Read an official file as rows of idx, texts and label; test has no label, and label names stay strings."""
    task = GLUE[name]
    is_test = file.stem.startswith("test")
    columns = task.test_columns if is_test else task.columns
    rows: list[dict[str, Any]] = []
    numbers: list[int] = []
    lines = file.read_text(encoding="utf-8-sig").split("\n")
    first = int(task.has_header or is_test)
    for number, line in enumerate(lines[first:], first + 1):
        cells = line.removesuffix("\r").split("\t")
        if cells == [""]:
            continue
        required = [*columns, *([] if is_test else [task.label_column])]
        if any(column >= len(cells) or column < -len(cells) for column in required):
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
    """Return the .tsv file of a split, or None; "dev" of MNLI is dev_matched."""
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
    """Mean over eight tasks as in the last column of BERT's Table 1: without WNLI, MNLI-m and MNLI-mm counted apart.

    `scores` are the main metrics in percent by name, including MNLI-mm.
    """
    averaged = [name for name in (*GLUE, MISMATCHED) if name != "WNLI"]
    missing = [name for name in averaged if name not in scores]
    if missing:
        raise InputError(f"the GLUE average needs the scores of {', '.join(missing)}")
    return fmean(scores[name] for name in averaged)

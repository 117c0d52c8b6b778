"""Tasks of fine-tuned Hugging Face folders, which have no task.json: derived from class, labels and problem type."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertsmith.checkpoint.hf.adapter import HfConfig
from bertsmith.checkpoint.hf.reading import ADAPTERS
from bertsmith.checkpoint.hf.sentences import MODULES_FILE, encoder_folder, read_length
from bertsmith.checkpoint.hf.task_heads import PROBLEMS, read_labels
from bertsmith.errors import InputError, nearest
from bertsmith.files import read_json
from bertsmith.settings import InvalidRecord, Plain
from bertsmith.tasks import TASKS
from bertsmith.tasks.base import Task
from bertsmith.tasks.classification import Classification
from bertsmith.tasks.data_source import recognise
from bertsmith.tasks.texts import label_name
from bertsmith.text.rows import Table

_KINDS = {"TokenClassification": "tagging", "QuestionAnswering": "spans", "MultipleChoice": "choice"}
"""Kind of task by the end of a class name; ForSequenceClassification has several."""
_WITH_LABELS = ("classification", "multi_label", "tagging")
_MAX_LENGTH = 512
_SPANS_LENGTH = 384  # of the published SQuAD models; longer passages are split


def hf_task_record(folder: Path) -> Plain | None:
    """Return the task and the sequences of a fine-tuned Hugging Face folder; None if it has no task that we know."""
    path = encoder_folder(folder) / "config.json"
    data = HfConfig(read_json(path)) if path.is_file() else HfConfig()
    architectures = data.get("architectures") or []
    if not isinstance(architectures, list):
        raise InputError(f"{str(path)!r}: architectures is {architectures!r}; allowed: a list of class names")
    architecture = next(iter(architectures), "")
    is_embedder = (folder / MODULES_FILE).is_file()
    kind = "embedding" if is_embedder else _kind(str(architecture).partition("For")[2], data)
    if kind is None:
        return None
    most = _max_length(data)
    if is_embedder:
        length = read_length(path.parent, most) or most
        # trained elsewhere: this loss reads texts or pairs of texts from the usual columns
        return {"task": {"kind": kind, "text": "text", "loss": "dropout"}, "sequences": {"length": length}}
    labels = {"labels": list(read_labels(data))} if kind in _WITH_LABELS else {}
    length = min(_SPANS_LENGTH if kind == "spans" else _MAX_LENGTH, most)
    return {"task": {"kind": kind, **labels}, "sequences": {"length": length}}


def adapt_task(folder: Path, task: Task[Any], table: Table, columns: Sequence[str], data: str | None) -> Task[Any]:
    """Complete the task of a Hugging Face folder with the columns and label names of a table.

    `columns` are of the form role=name. A folder with task.json keeps its task.
    """
    record = None if (folder / "task.json").is_file() else hf_task_record(folder)
    if record is None or record["task"]["kind"] != task.kind:
        return task
    fixed = {name: value for name, value in record["task"].items() if name in ("kind", "labels")}
    found = recognise(table, task.kind, columns, fixed, data)
    adapted: Task[Any] = TASKS[task.kind].parse(found, source="task")
    if isinstance(adapted, Classification):
        return _with_label_names(adapted, table)
    return adapted.resolve(table) if task.kind == "embedding" else adapted


def _kind(ending: str, data: HfConfig) -> str | None:
    if ending != "SequenceClassification":
        return _KINDS.get(ending)
    problem = data.get("problem_type")
    if problem is None:  # the rule of transformers
        return "regression" if len(read_labels(data)) == 1 else "classification"
    kinds = {theirs: ours for ours, theirs in PROBLEMS.items()}
    if not isinstance(problem, str) or problem not in kinds:
        raise InputError(f"config.json: problem_type is {problem!r}; {nearest(str(problem), kinds)}")
    return kinds[problem]


def _max_length(data: HfConfig) -> int:
    """Return the maximum length of a sequence."""
    adapter = ADAPTERS.get(str(data.get("model_type")))
    if adapter is None:
        return int(data.get("max_position_embeddings") or _MAX_LENGTH)
    try:
        return adapter.read_config(data, frozenset()).encoder.embedding.max_length
    except (InvalidRecord, TypeError):  # opening the model gives the reason
        return _MAX_LENGTH


def _with_label_names(task: Classification, table: Table) -> Classification:
    """Return the task with its labels as the table spells them: the same, in another case, or as indices."""
    if task.label not in table.columns:
        return task
    labelled = [index for index, row in enumerate(table.rows) if row.get(task.label) not in (None, "")]
    names = {label_name(table, index, task.label) for index in labelled}
    if names <= set(task.labels):
        return task
    by_lower = {name.lower(): name for name in names}
    spelt = tuple(by_lower.get(label.lower(), label) for label in task.labels)
    if names <= set(spelt):
        return task.changed(labels=spelt)
    indices = tuple(map(str, range(len(task.labels))))
    if names <= set(indices):
        return task.changed(labels=indices)
    raise InputError(
        f"{table.name}: column {task.label!r} has the labels {', '.join(sorted(names))}, but the model's labels are "
        f"{', '.join(task.labels)}; rename the labels of the data, or write their indices 0 to {len(indices) - 1}"
    )

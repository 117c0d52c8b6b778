"""Results of scores.py as Markdown: models by tasks, mean ± standard deviation over seeds."""

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from scores_tasks import TASKS

RATE = "optimizer.learning_rate"
_NAMES = {"f1": "F1", "exact": "EM", "matthews": "Matthews", "pearson": "Pearson", "spearman": "Spearman"}

Line = Mapping[str, Any]


def tables(lines: Sequence[Line]) -> str:
    """Return a table for every number of rows and epochs in the lines."""
    kinds = dict.fromkeys((line["train_rows"], line["dev_rows"], line["epochs"]) for line in lines)
    found = [
        _table([line for line in lines if (line["train_rows"], line["dev_rows"], line["epochs"]) == kind], *kind)
        for kind in kinds
    ]
    return "\n\n".join(found) or "no run is done yet"


def best_settings(lines: Sequence[Line]) -> list[Line]:
    """Return the lines of one model on one task, one per seed, of the settings with the best mean on dev."""
    groups: dict[str, dict[int, Line]] = {}
    for line in lines:
        # a repeated seed counts once
        groups.setdefault(json.dumps(line["settings"], sort_keys=True), {})[line["seed"]] = line
    # settings with missing seeds cannot be compared yet
    most = max(map(len, groups.values()))
    whole = [list(group.values()) for group in groups.values() if len(group) == most]
    return max(whole, key=lambda group: _mean(group, TASKS[group[0]["task"]].metrics[0]))


def _table(lines: Sequence[Line], train_rows: int | None, dev_rows: int | None, epochs: float | None) -> str:
    tasks = [task for task in TASKS if any(line["task"] == task for line in lines)]
    models = list(dict.fromkeys(line["model"] for line in lines))
    heads = [f"{task} {' / '.join(_NAMES.get(name, name) for name in TASKS[task].metrics)}" for task in tasks]
    rows = ["| model | seeds | " + " | ".join([*heads, "mean"]) + " |", "|---|---|" + "---|" * (len(tasks) + 1)]
    notes = [_cut(train_rows, dev_rows, epochs)]
    for model in models:
        own = {task: [line for line in lines if (line["model"], line["task"]) == (model, task)] for task in tasks}
        best = {task: best_settings(found) for task, found in own.items() if found}
        means = [_mean(group, TASKS[task].metrics[0]) for task, group in best.items()]
        mean = f"{statistics.fmean(means):.2f}" if len(best) == len(tasks) else "–"
        counts = sorted({len(group) for group in best.values()})
        seeds = "–".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
        cells = [_cell(best[task], task) if task in best else "–" for task in tasks]
        rows.append(f"| {model} | {seeds} | " + " | ".join([*cells, mean]) + " |")
        notes.append(_rates(model, own, best))
    return "\n".join([*rows, "", *(note for note in notes if note)])


def _cell(group: Sequence[Line], task: str) -> str:
    cells = []
    for name in TASKS[task].metrics:
        values = [line["metrics"][name] for line in group]
        spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
        cells.append(f"{statistics.fmean(values):.2f}{spread}")
    alike = sum(line["is_degenerate"] for line in group)
    return " / ".join(cells) + (f" ({alike} × constant prediction)" if alike else "")


def _mean(group: Sequence[Line], figure: str) -> float:
    return statistics.fmean(line["metrics"][figure] for line in group)


def _cut(train_rows: int | None, dev_rows: int | None, epochs: float | None) -> str:
    notes = ["Dev, weights of the last step; mean ± standard deviation over seeds, all in percent."]
    notes += [] if train_rows is None else [f"At most {train_rows:,} training rows of each task."]
    notes += [] if dev_rows is None else [f"At most {dev_rows:,} rows of dev."]
    notes += [] if epochs is None else [f"{epochs:g} epochs on every task."]
    return " ".join([*notes, "The last column is the mean of the first metric of each task."])


def _rates(model: str, own: Mapping[str, Sequence[Line]], best: Mapping[str, Sequence[Line]]) -> str:
    """Describe the learning rates of a model, their layer-wise decay, and which were chosen."""
    descriptions = []
    for task, group in best.items():
        tried = sorted({_way(line["settings"]) for line in own[task]})
        others = f" (of {', '.join(tried)})" if len(tried) > 1 else ""
        descriptions.append(f"{task} {_way(group[0]['settings'])}{others}")
    is_chosen = any("(of" in part for part in descriptions)
    how = ", chosen task by task by the mean over seeds on dev" if is_chosen else ""
    return f"- {model}: learning rates{how}: {', '.join(descriptions)}"


def _way(settings: Mapping[str, Any]) -> str:
    decay = settings.get("encoder.layer_decay", 1.0)
    return f"{settings[RATE]:g}" + ("" if decay == 1.0 else f" × {decay:g} per layer")

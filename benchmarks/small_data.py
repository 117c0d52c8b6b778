"""Fine-tune a model on a few hundred rows of several tasks with several settings, beside a linear model on words.

    python benchmarks/small_data.py small --data DATA --tasks topics,sentiment --rows 500 --out small.jsonl \
        --settings "default=" "regression=head.pooling=mean head.hidden=none head.start=regression"

Tasks, from the folders of DATA: topics (which of 30 activities a context of HellaSwag describes), sentiment
(glue/SST-2), grammar (glue/CoLA), entailment (pairs/sick); and messages, the support-desk messages of the demo. Both
splits are random samples of fixed rows. Scores are accuracies on dev with the last weights.
Every run is appended to --out and skipped if it is there; the table has mean and standard deviation over --seeds.
"""

import argparse
import random
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import bertsmith
from bertsmith.tasks.linear_baseline import LinearBaseline
from bertsmith.text import support_desk
from bertsmith.text.tables import read_split
from side_by_side import Run, lines_of, read_lines, run_all

DEV_ROWS = 1000
TOPICS = 30
LEAN = ("run.evaluations=0", "run.keep=0", "run.choose='last'")
Rows = list[dict[str, Any]]


def main() -> int:
    options = _options()
    settings = dict(text.split("=", 1) for text in options.settings)
    runs = [
        Run(
            {"model": name, "task": task, "rows": options.rows, "seed": seed, "settings": " ".join(given.split())},
            {"start": options.model, "data": str(options.data)},
        )
        for seed in options.seeds
        for task in options.tasks
        for name, given in settings.items()
    ]
    failed = run_all(finetuned, runs, options.out, processes=options.processes, threads=options.threads)
    lines = lines_of(runs, read_lines(options.out))
    print(f"| rows: {options.rows} | {' | '.join(options.tasks)} |")
    print("|---" * (1 + len(options.tasks)) + "|")
    for name in settings:
        cells = [
            _cell([line["score"] for line in lines if (line["model"], line["task"]) == (name, task)])
            for task in options.tasks
        ]
        print(f"| {name} | {' | '.join(cells)} |")
    print(f"| linear model on words | {' | '.join(_linear(task, options) for task in options.tasks)} |")
    return 1 if failed else 0


def finetuned(run: Run) -> dict[str, Any]:
    """Fine-tune a model with the settings of a run and return its score on dev."""
    record, paths = run.record, run.paths
    train, dev = splits(record["task"], record["rows"], Path(paths["data"]))
    with tempfile.TemporaryDirectory() as folder:
        result = bertsmith.finetune(
            paths["start"],
            train=train,
            dev=dev,
            out=Path(folder) / "run",
            seed=record["seed"],
            set=[*LEAN, *record["settings"].split()],
        )
    return {"score": result.score, "metric": result.metric, "message": f"{record['model']} {result.score:.1f}"}


def splits(task: str, rows: int, data: Path) -> tuple[Rows, Rows]:
    """Return a random sample of `rows` training rows of a task, and one of dev."""
    train, dev = TASKS[task](data)
    return random.Random(0).sample(train, min(rows, len(train))), random.Random(1).sample(dev, min(DEV_ROWS, len(dev)))


def _topics(data: Path) -> tuple[Rows, Rows]:
    parts = (row["context"].partition(": ") for row in read_split(data / "hellaswag", "dev"))
    rows = [{"text": context, "label": activity} for activity, _, context in parts]
    common = {label for label, _ in Counter(row["label"] for row in rows).most_common(TOPICS)}
    rows = [row for row in rows if row["label"] in common]
    return rows[::2], rows[1::2]


def _of_folder(folder: str, *columns: str) -> Callable[[Path], tuple[Rows, Rows]]:
    """Return a reader of a task with these columns of text and a label."""

    def read(data: Path) -> tuple[Rows, Rows]:
        train, dev = (
            [_columns(row, columns) for row in read_split(data / folder, split)] for split in ("train", "dev")
        )
        return train, dev

    return read


def _columns(row: Mapping[str, Any], columns: tuple[str, ...]) -> dict[str, Any]:
    return {**{name: row[name] for name in columns}, "label": str(row["label"])}


def _messages(data: Path) -> tuple[Rows, Rows]:
    train, dev = (list(support_desk.support_desk(split)) for split in ("train", "dev"))
    return train, dev


TASKS: dict[str, Callable[[Path], tuple[Rows, Rows]]] = {
    "topics": _topics,
    "sentiment": _of_folder("glue/SST-2", "sentence"),
    "grammar": _of_folder("glue/CoLA", "sentence"),
    "entailment": _of_folder("pairs/sick", "sentence1", "sentence2"),
    "messages": _messages,
}


def _linear(task: str, options: argparse.Namespace) -> str:
    """Return the accuracy of a linear model on words and characters; a dash for pairs of texts."""
    train, dev = splits(task, options.rows, options.data)
    texts = [name for name in train[0] if name != "label"]
    if len(texts) > 1:
        return "–"
    baseline = LinearBaseline([row[texts[0]] for row in train], [row["label"] for row in train])
    answers = baseline.predict([row[texts[0]] for row in dev])
    return f"{100 * statistics.mean(answer == row['label'] for answer, row in zip(answers, dev, strict=True)):.1f}"


def _cell(scores: list[float]) -> str:
    spread = f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
    return f"{statistics.mean(scores):.1f}{spread}" if scores else "–"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, required=True, help="the folder with glue, pairs and hellaswag")
    parser.add_argument("--tasks", default=[*TASKS], type=lambda text: text.split(","))
    parser.add_argument("--rows", type=int, default=500, help="training rows")
    parser.add_argument("--seeds", default=[0], type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--settings", nargs="+", default=["default="], help="NAME=SETTING=VALUE …, separated by spaces")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="threads per process")
    parser.add_argument("--out", type=Path, required=True, help="JSON Lines file to append to")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""Fine-tune a small model on tasks, make it elastic, and score its sub-networks over several seeds.

    python benchmarks/small_elastic.py MODEL --data DATA --tasks MRPC,STS-B --seeds 0,1,2 --processes 6 --device cuda \
        --out elastic.jsonl
    python benchmarks/small_elastic.py --out elastic.jsonl --table-only

MODEL, tasks and their settings are as in scores.py. --finetune changes settings of the fine-tuning, --set those of the
elastic training, whose other settings are its defaults. This benchmark covers the grid alone, every run in its own
process, and resumes; benchmarks/elastic.py has ablations of one model. Fine-tuned model and sub-networks have the
weights of the last step, so that nothing is selected on dev.
"""

import argparse
import contextlib
import io
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bertsmith.errors import InputError
from scores_plan import carry_out, change, changed, contestant, data_of, judged, options_of, runs_of
from scores_tasks import COMMON, LEAN, TASKS, cost_of, flags, rows_of
from side_by_side import Run

Line = Mapping[str, Any]


def main() -> int:
    return carry_out(elastic, planned, tables, options_of(__doc__ or "", "MRPC,STS-B", _add_options))


def planned(options: argparse.Namespace) -> list[Run]:
    """Return a run for every model, task and seed."""
    models = [contestant(text) for text in options.models]
    names = [model.name for model in models]
    tuning, shrinking = ([change(text, names) for text in given] for given in (options.finetune, options.set))
    runs = []
    for model, task in judged(models, options):
        settings = {**COMMON, **TASKS[task].settings}
        settings |= {} if model.rate is None else {"optimizer.learning_rate": model.rate}
        settings = changed(settings, tuning, task, model.name)
        stages: dict[str, Any] = {"grid.widths": options.widths, "grid.depths": options.depths}
        stages |= {"run.choose": "last", "run.epochs": options.epochs}
        stages = changed(stages, shrinking, task, model.name)
        cost = cost_of(data_of(task, options), options.rows, 1.0)
        runs += runs_of(model, task, options, cost, settings=settings, elastic_settings=stages)
    return runs


def elastic(run: Run) -> dict[str, Any]:
    """Return the dev scores of a fine-tuned model and of all its sub-networks."""
    import bertsmith

    record, told = run.record, io.StringIO()
    with (
        tempfile.TemporaryDirectory(prefix="elastic-") as name,
        contextlib.redirect_stdout(told),
        contextlib.redirect_stderr(told),
    ):
        folder = Path(name)
        common: dict[str, Any] = {"data": _data(run, folder), "seed": record["seed"], "device": run.paths["device"]}
        tuned = bertsmith.finetune(
            run.paths["model"], out=folder / "tuned", set=[*LEAN, *flags(record["settings"])], **common
        )
        if not tuned["is_finished"]:
            raise InputError("stopped: no metrics")
        # no checkpoints for resuming, except the best weights, which are read again
        lean = LEAN if record["elastic_settings"]["run.choose"] == "last" else []
        shrunk = bertsmith.shrink(
            folder / "tuned", out=folder / "elastic", set=[*lean, *flags(record["elastic_settings"])], **common
        )
    if "grid" not in shrunk:
        raise InputError("stopped: no metrics")
    grid = [
        {name: member[name] for name in ("width", "depth", "score", "parameters", "flops")} for member in shrunk["grid"]
    ]
    return {
        "metric": tuned["metric"],
        "finetuned": tuned["score"],
        "is_degenerate": tuned["is_degenerate"],
        "grid": grid,
        "message": f"{tuned['metric']} {tuned['score']:.2f} fine-tuned, {shrunk['score']:.2f} over the grid",
    }


def _data(run: Run, folder: Path) -> str:
    """Return the folder of the rows: the task's own, or a copy of the same name with fewer rows."""
    data, record = run.paths["data"], run.record
    if record["train_rows"] is None and record["dev_rows"] is None:
        return data
    cut = folder / "data" / Path(data).name
    cut.mkdir(parents=True)
    for part in ("train", "dev"):
        rows = rows_of(data, part, record[f"{part}_rows"])
        (cut / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(cut)


def tables(lines: Sequence[Line]) -> str:
    """Return the grid of every model, task and setting."""
    groups: dict[str, dict[int, Line]] = {}
    for line in lines:
        ways = {name: line[name] for name in ("model", "task", "train_rows", "settings", "elastic_settings")}
        groups.setdefault(json.dumps(ways, sort_keys=True), {})[line["seed"]] = line
    return "\n\n".join(_table(list(group.values())) for group in groups.values()) or "no run is done yet"


def _table(runs: Sequence[Line]) -> str:
    first, full = runs[0], [run["finetuned"] for run in runs]
    cut = "" if first["train_rows"] is None else f", at most {first['train_rows']:,} training rows"
    seeds = f"{len(runs)} seed{'s' if len(runs) > 1 else ''}"
    lines = [f"{first['model']} on {first['task']}, {first['metric']}, {seeds}{cut}; fine-tuned {_mean(full)}:", ""]
    widths, depths = (sorted({member[name] for member in first["grid"]}, reverse=True) for name in ("width", "depth"))
    lines.append("| width | " + " | ".join(f"depth {depth:g}" for depth in depths) + " |")
    lines.append("|---|" + "---|" * len(depths))
    for width in widths:
        cells = []
        for depth in depths:
            members = [member for run in runs for member in run["grid"]]
            own = [member for member in members if (member["width"], member["depth"]) == (width, depth)]
            scores = [member["score"] for member in own]
            share = f" ({statistics.fmean(scores) / statistics.fmean(full):.1%})" if statistics.fmean(full) > 0 else ""
            cells.append(f"{_mean(scores)}{share}, {own[0]['parameters'] / 1e6:.1f} M")
        lines.append(f"| {width:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _mean(scores: Sequence[float]) -> str:
    return f"{statistics.fmean(scores):.2f}" + (f" ± {statistics.stdev(scores):.2f}" if len(scores) > 1 else "")


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--widths", nargs="+", type=float, default=[1.0, 0.75, 0.5, 0.25])
    parser.add_argument("--depths", nargs="+", type=float, default=[1.0, 0.75, 0.5])
    parser.add_argument("--epochs", type=float, default=3.0, help="epochs of each of the two stages")
    parser.add_argument(
        "--set", action="append", default=[], help="[TASK:|MODEL:]setting=value for the elastic training"
    )
    parser.add_argument(
        "--finetune", action="append", default=[], help="[TASK:|MODEL:]setting=value for the fine-tuning"
    )


if __name__ == "__main__":
    sys.exit(main())

"""Ablations of elastic training: order of the units, scores of sub-networks, and distillation against labels alone.

    python benchmarks/elastic.py --model FOLDER --data TASK TASK … --seeds 0,1,2 --out metrics.json

For every task and seed, FOLDER is fine-tuned and then trained elastically (width and depth stages) with units ordered
by importance. The width stage is repeated with units in random and in reversed order. The sub-networks of --alone are
extracted from the rewired model and trained on the labels for as many epochs as both stages, without distillation.
Runs are independent; --jobs of them run in parallel.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

import bertsmith
from bertsmith.checkpoint.store import load
from bertsmith.shrinking.elastic_metadata import read_elastic_metadata
from bertsmith.shrinking.importance import Orders, rewire
from bertsmith.training.log import read_log

ORDERS = ("importance", "random", "reversed")
NARROWEST = "width 0.25 depth 1"


def main() -> None:
    options = _options()
    jobs = [(options, task, seed) for task in options.data for seed in options.seeds]
    runs: list[dict[str, Any]] = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        for future in as_completed([pool.submit(_run, *job) for job in jobs]):
            runs.append(future.result())
            if options.out:
                Path(options.out).write_text(json.dumps(runs, indent=2), encoding="utf-8")
            print(f"done: {runs[-1]['task']} seed {runs[-1]['seed']}, {runs[-1]['seconds']:.0f} s", file=sys.stderr)
    for task in dict.fromkeys(run["task"] for run in runs):
        _print([run for run in runs if run["task"] == task])


def _run(options: argparse.Namespace, task: str, seed: int) -> dict[str, Any]:
    """Return all metrics of one task and seed."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as name, open(os.devnull, "w") as devnull:
        sys.stdout, stdout = devnull, sys.stdout
        folder, common = Path(name), {"data": task, "seed": seed, "device": options.device}
        teacher = bertsmith.finetune(options.model, out=folder / "teacher", set=options.finetune, **common)
        metrics: dict[str, Any] = {"task": Path(task).name, "seed": seed, "metric": teacher["metric"]}
        metrics |= {"teacher": teacher["score"], "order": {}, "alone": {}}
        for order in options.orders:
            stages = [] if order == "importance" else ['stages=["width"]']
            bertsmith.shrink(
                folder / "teacher", out=folder / order, set=[*options.set, *stages, f'order="{order}"'], **common
            )
            metrics["order"][order] = _best(folder / order / "width" / "log.jsonl")
            _keep(options, metrics)
            if order == "importance":
                metrics["grid"] = [member.plain() for member in read_elastic_metadata(folder / order).grid]
                _keep(options, metrics)
        for width, depth in options.alone:
            small = _cut(folder / "teacher", folder / "importance", width, depth)
            settings = [*options.finetune, f"run.epochs={options.alone_epochs}"]
            alone = bertsmith.finetune(small, out=folder / f"alone-{width}-{depth}", set=settings, **common)
            metrics["alone"][f"{width:g} {depth:g}"] = alone["score"]
            _keep(options, metrics)
        sys.stdout = stdout
    return {**metrics, "seconds": time.perf_counter() - begin}


def _keep(options: argparse.Namespace, metrics: dict[str, Any]) -> None:
    """Write the metrics so far, in case the run is interrupted."""
    if options.out:
        path = Path(f"{options.out}.{metrics['task']}-{metrics['seed']}")
        path.write_text(json.dumps(metrics), encoding="utf-8")


def _best(log: Path) -> dict[str, float]:
    """Return the scores of all widths at the best evaluation of a width stage."""
    rows = [row for row in read_log(log) if row["kind"] == "held_out"]
    best = max(rows, key=lambda row: row["score"])
    return {name: score for name, score in best.items() if name.startswith("width ")}


def _cut(teacher: Path, elastic: Path, width: float, depth: float) -> bertsmith.Model:
    """Extract a sub-network of the rewired fine-tuned model, before any stage."""
    model, metadata = load(teacher), read_elastic_metadata(elastic)
    rewire(model, Orders(_tensors(metadata.head_order), _tensors(metadata.neuron_order)))
    return bertsmith.extract(model, bertsmith.Subnet(width=width, depth=depth))


def _tensors(orders: Iterable[Sequence[int]]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(order) for order in orders)


def _print(runs: list[dict[str, Any]]) -> None:
    """Print the tables of one task: mean ± standard deviation over seeds."""
    metric, teacher = runs[0]["metric"], [run["teacher"] for run in runs]
    print(f"\n{runs[0]['task']}: {metric}, fine-tuned {_mean(teacher)}, {len(runs)} seeds")
    for order in runs[0]["order"]:
        print(f"  width 0.25 after the width stage, units in the order {order:<11}", end="")
        print(_mean([run["order"][order][NARROWEST] for run in runs]))
    depths = sorted({member["depth"] for member in runs[0]["grid"]}, reverse=True)
    widths = sorted({member["width"] for member in runs[0]["grid"]}, reverse=True)
    print("  width" + "".join(f"{f'depth {depth:g}':>26}" for depth in depths))
    for width in widths:
        cells = [(_scores(runs, width, depth), teacher) for depth in depths]
        print(f"  {width:<5g}" + "".join(f"{f'{_mean(own)} {_retained(own, full):.1%}':>26}" for own, full in cells))
    for name in runs[0]["alone"]:
        width, depth = map(float, name.split())
        alone = [run["alone"][name] for run in runs]
        print(f"  ({width:g}, {depth:g}): elastic {_mean(_scores(runs, width, depth))}, labels alone {_mean(alone)}")


def _scores(runs: list[dict[str, Any]], width: float, depth: float) -> list[float]:
    members = [member for run in runs for member in run["grid"]]
    return [member["score"] for member in members if (member["width"], member["depth"]) == (width, depth)]


def _retained(scores: list[float], teacher: list[float]) -> float:
    return statistics.fmean(scores) / statistics.fmean(teacher)


def _mean(scores: list[float]) -> str:
    spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
    return f"{statistics.fmean(scores):.2f} ± {spread:.2f}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers: Callable[[str], list[int]] = lambda text: [int(item) for item in text.split(",")]  # noqa: E731
    pair: Callable[[str], tuple[float, float]] = lambda text: tuple(map(float, text.split(",")))  # type: ignore[assignment,return-value]  # noqa: E731
    parser.add_argument("--model", required=True, help="folder of a pre-trained model")
    parser.add_argument("--data", nargs="+", required=True, help="task folders")
    parser.add_argument("--seeds", type=numbers, default=[0, 1, 2])
    parser.add_argument("--set", action="append", default=[], help="settings of elastic training")
    parser.add_argument("--finetune", action="append", default=[], help="settings of fine-tuning")
    parser.add_argument("--orders", nargs="+", default=list(ORDERS), choices=ORDERS)
    parser.add_argument("--alone", nargs="*", type=pair, default=[(0.5, 1.0), (0.5, 0.5), (0.25, 0.5)])
    parser.add_argument("--alone-epochs", type=float, default=6.0, help="epochs of training on the labels")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out")
    return parser.parse_args()


if __name__ == "__main__":
    main()

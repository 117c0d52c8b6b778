"""Speed-up of early exits on this machine: texts per second with and without them, in one run.

    python benchmarks/exits.py FOLDER --data TASK                # one text at a time, and batches of 32
    python benchmarks/exits.py FOLDER --data TASK --threads 1 --texts 512 --thresholds 0.8 0.9 0.99

FOLDER is the output of `bertsmith shrink MODEL --method exits`, TASK its data. The same batches of dev run through all
layers and with early exits, alternating; the ratio is of the medians over the rounds. Exits save layers, but cost a
small head after every layer, a decision, and regrouping the batch. For short single texts this can cost as much as a
layer: the ratio is then below 1, and the benchmark reports it.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertsmith.answers.sequences import Features
from bertsmith.checkpoint.store import load
from bertsmith.data.examples import ExampleReader
from bertsmith.data.plan import Cursor, MicroBatchPlan
from bertsmith.engines.exit_runner import ExitRunner
from bertsmith.models.exiting import exits_config
from bertsmith.models.heads.exits import ExitRule
from bertsmith.models.model import Model
from bertsmith.tasks.base import Encoding
from bertsmith.tasks.data_source import task_splits
from bertsmith.tasks.predictor import read_task_record


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    model = load(options.model)
    kept, own = read_task_record(options.model), exits_config(model).rule
    examples = kept.task.examples(task_splits(options.data).read("dev"))[: options.texts]
    features = kept.task.features(examples, Encoding.of(model, kept.sequences.length))
    reader = ExampleReader(features, kept.sequences, model.require_tokenizer().pad)
    metrics = []
    for rule in _rules(own, options.thresholds):
        runner = ExitRunner(model, rule)
        for size in options.batches:
            metrics.append(_measured(model, runner, features, reader, size, options.rounds))
            print(_line(metrics[-1]), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps({"threads": options.threads, "rows": metrics}, indent=2) + "\n")


def _rules(own: ExitRule | None, thresholds: list[float]) -> list[ExitRule]:
    if thresholds:
        measure = "probability" if own is None else own.measure
        return [ExitRule(measure=measure, threshold=threshold) for threshold in thresholds]
    if own is None:
        raise SystemExit("the model has no exit rule; give --thresholds")
    return [own]


@torch.inference_mode()
def _measured(
    model: Model, runner: ExitRunner, features: Features, reader: ExampleReader, size: int, rounds: int
) -> dict[str, Any]:
    """Return the metrics of one batch size."""
    batches = [reader[MicroBatchPlan(items, Cursor())].batch for items in _bins(len(features), size)]
    sizes = [torch.from_numpy(np.diff(features.items)[batch.item.numpy()]) for batch in batches]

    def whole() -> None:
        for batch in batches:
            model.outputs(batch.tokens, batch.layout, batch.types)

    def early() -> None:
        with runner.evaluating():
            for batch, counts in zip(batches, sizes, strict=True):
                runner.outputs(batch.tokens, batch.layout, batch.types, sizes=counts)

    seconds: dict[str, list[float]] = {"whole": [], "early": []}
    for number in range(rounds + 1):
        for name, work in (("whole", whole), ("early", early)):
            took = _timed(work)
            if number:  # the first round warms up
                seconds[name].append(took)
    rates = {name: len(features) / statistics.median(took) for name, took in seconds.items()}
    return {
        "measure": runner.rule.measure,
        "threshold": runner.rule.threshold,
        "batch": size,
        "texts": len(features),
        "whole_per_second": rates["whole"],
        "early_per_second": rates["early"],
        "ratio": rates["early"] / rates["whole"],
        "mean_layers": runner.mean_layers,
        "layers": len(model.config.encoder.layers),
    }


def _bins(count: int, size: int) -> list[np.ndarray]:
    """Yield batches of items in order."""
    return [np.arange(begin, min(begin + size, count)) for begin in range(0, count, size)]


def _timed(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _line(row: dict[str, Any]) -> str:
    slower = "" if row["ratio"] >= 1 else "  (slower: exits cost more than they save)"
    return (
        f"{row['measure']} {row['threshold']:g}, batch {row['batch']:>3}: {row['whole_per_second']:8.1f} texts/s with "
        f"all {row['layers']} layers, {row['early_per_second']:8.1f} with {row['mean_layers']:.2f} on average, ratio "
        f"{row['ratio']:.2f}{slower}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", required=True)
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--thresholds", type=float, nargs="+", default=[])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()

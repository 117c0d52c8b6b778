"""Q-BERT as an experiment: sharpness of every layer, bits by its order, and scores of mixed and uniform bits.

The model must be fine-tuned on the data. Weights have one range for each of 128 groups of rows; the token table and
activations have 8 bits. Without --epochs nothing is trained after quantisation; with it, every row of the table is.

    python benchmarks/mixed_precision.py MODEL DATA                        # 2 and 4 bits mixed, 3 on average
    python benchmarks/mixed_precision.py MODEL DATA --choices 2 3 4 8 --average 3 --epochs 1
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bertsmith
from bertsmith.data.examples import ExamplePlan, ExampleReader, TaskBatch
from bertsmith.layers.quantised import QuantisationConfig
from bertsmith.models.model import Model
from bertsmith.models.quantise import dequantised, measuring, quantised
from bertsmith.shrinking.hessian import Sharpness, allotted_bits, layer_sharpness, matrices
from bertsmith.tasks.data_source import task_splits
from bertsmith.tasks.predictor import Predictor
from bertsmith.text.rows import Table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--choices", nargs="+", default=[2, 4], type=int)
    parser.add_argument("--average", default=3.0, type=float)
    parser.add_argument(
        "--slices", default=5, type=int, help="slices of the data, for mean and standard deviation of the eigenvalues"
    )
    parser.add_argument("--examples", default=32, type=int, help="of one slice")
    parser.add_argument("--steps", default=20, type=int, help="maximum steps of the power iteration")
    parser.add_argument("--groups", default=128, type=int)
    parser.add_argument("--epochs", type=float, help="epochs of quantisation-aware training per row")
    parser.add_argument("--threads", default=1, type=int)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    predictor, parts = Predictor.load(options.model), task_splits(options.data)
    assert isinstance(predictor.model, Model)
    model = dequantised(predictor.model).eval()
    losses = list(_losses(model, predictor, parts.read("train"), options.slices, options.examples))
    sharpness = layer_sharpness(model, losses, steps=options.steps)
    sizes = [sum(matrix.numel() for matrix in matrices(block)) for block in model.encoder.blocks]
    bits = allotted_bits([layer.omega for layer in sharpness], sizes, options.choices, options.average)
    print(f"{'layer':>6}{'omega':>12}{'mean':>12}{'bits':>6}")
    for index, (layer, own) in enumerate(zip(sharpness, bits, strict=True)):
        mean = sum(layer.eigenvalues) / len(layer.eigenvalues)
        print(f"{index:>6}{layer.omega:>12.4g}{mean:>12.4g}{own:>6}")
    layers = len(sizes)
    rows = {"mixed": bits, "reversed": _reversed(sharpness, sizes, options)}
    rows |= {f"all {choice}": (choice,) * layers for choice in sorted({*options.choices, round(options.average), 8})}
    print(f"\n{'bits':<12}{'average':>9}{'score':>9}")
    print(f"{'float32':<12}{32:>9}{_score(model, predictor, parts.read('dev')):>9.2f}", flush=True)
    for name, chosen in rows.items():
        average = sum(b * size for b, size in zip(chosen, sizes, strict=True)) / sum(sizes)
        config = QuantisationConfig(weight_ranges="group", groups=options.groups, layer_bits=chosen)
        if options.epochs is None:
            score = _rounded_score(model, config, predictor, parts.read("train"), parts.read("dev"))
        else:
            score = _trained_score(options, config)
        print(f"{name:<12}{average:>9.2f}{score:>9.2f}", flush=True)


def _reversed(sharpness: list[Sharpness], sizes: list[int], options: argparse.Namespace) -> tuple[int, ...]:
    """Assign the same bits in the opposite order, as a baseline."""
    return allotted_bits([-layer.omega for layer in sharpness], sizes, options.choices, options.average)


def _losses(
    model: Model, predictor: Predictor, train: Table, slices: int, examples: int
) -> Iterator[Callable[[], Tensor]]:
    """Return the mean loss on each slice, with attention that can be differentiated twice."""
    rows = predictor.task.examples(train)
    objective = predictor.task.objective(rows)
    for batch in _batches(predictor, rows, examples, slices):

        def loss(batch: TaskBatch = batch) -> Tensor:
            outputs = model.outputs(batch.tokens, batch.layout, batch.types, backend="reference")
            return objective.sums(outputs, batch).loss / objective.count(batch)

        yield loss


def _batches(predictor: Predictor, rows: Sequence[Any], examples: int, count: int) -> Iterator[TaskBatch]:
    sequences = predictor.record.sequences
    features = predictor.task.features(rows, predictor.encoding)
    reader = ExampleReader(features, sequences, predictor.model.require_tokenizer().pad)
    for plan in islice(ExamplePlan(features, sequences, examples, seed=0).one_epoch(), count):
        batch = reader[plan].batch
        assert isinstance(batch, TaskBatch)
        yield batch


def _score(model: Model, predictor: Predictor, dev: Table) -> float:
    return Predictor(model, predictor.record).evaluate(dev)[0].score


def _rounded_score(model: Model, config: QuantisationConfig, predictor: Predictor, train: Table, dev: Table) -> float:
    rounding = quantised(model, config)
    with measuring(rounding), torch.no_grad():
        for batch in _batches(predictor, predictor.task.examples(train), 32, 16):
            rounding.outputs(batch.tokens, batch.layout, batch.types)
    return _score(rounding, predictor, dev)


def _trained_score(options: argparse.Namespace, config: QuantisationConfig) -> float:
    changes = [f"quantisation.layer_bits={list(config.layer_bits or ())}", "quantisation.weight_ranges=group"]
    changes += [f"quantisation.groups={options.groups}", f"run.epochs={options.epochs}"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        return bertsmith.finetune(options.model, data=options.data, out=out, set=changes, device="cpu")["score"]


if __name__ == "__main__":
    main()

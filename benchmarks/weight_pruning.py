"""Quality, size and time of pruning single weights, beside the dense model and structured pruning of equal size.

    python benchmarks/weight_pruning.py small --data sst2=data/sst2 mrpc=data/mrpc --out runs/weights
    python benchmarks/weight_pruning.py small --data sst2=data/sst2 --sparsities 0.5 0.9 --epochs 1 --out runs/weights

The model is fine-tuned on every task. Its weights are pruned to every sparsity, at once and gradually, and trained
with fixed masks; and heads and neurons are removed until the remaining layer weights take the bytes of a bit mask and
the kept values. A finished run in --out is not repeated. Printed for each model:

    score      on dev
    MB         model.safetensors
    xz MB      the same file, compressed by xz
    time       of one batch, relative to the dense model in the same run (medians; the two alternate)
    CSR time   product of the first feed-forward matrix in PyTorch's sparse CSR format, relative to the dense product

Zeros in dense matrices save no time, so `time` of pruned weights is 1 but for noise.
"""

import argparse
import json
import lzma
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import bertsmith
from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.models.model import Model

WARMUP = 3


def main() -> None:
    options = _options()
    rows: list[dict[str, Any]] = []
    for task in options.data:
        name, _, data = task.partition("=")
        for row in measure_task(options, name, data):
            rows.append(row)
            print(_line(row), flush=True)
    (options.out / "weight_pruning.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def measure_task(options: argparse.Namespace, name: str, data: str) -> Iterator[dict[str, Any]]:
    """Fine-tune the model on a task, shrink it in every way, and yield a row for each result."""
    out, settings = options.out / name, [f"run.epochs={options.epochs}", f"run.seed={options.seed}"]
    dense = out / "dense"
    if not _is_finished(dense):
        bertsmith.finetune(options.model, data=data, out=dense, set=settings, device=options.device, force=True)
    yield _row(name, "dense", 0.0, dense, dense, options)
    for sparsity in options.sparsities:
        runs: dict[str, dict[str, Any]] = {
            "one shot": {"method": "weights", "sparsity": sparsity, "set": ["weights.schedule=one_shot"]},
            "gradual": {"method": "weights", "sparsity": sparsity, "set": []},
            # the kept values and one bit per weight, as a share of dense float32 weights
            "structured": {"method": "prune", "keep": 1 - sparsity + 1 / 32, "set": ["prune.counts=parameters"]},
        }
        for kind, run in runs.items():
            folder = out / f"{kind.replace(' ', '-')}-{sparsity:g}"
            try:
                if not _is_finished(folder):
                    run["set"] += settings
                    bertsmith.shrink(dense, data=data, out=folder, device=options.device, force=True, **run)
            except InputError as error:  # fewer parameters than one head and a few neurons per layer
                print(f"{name} {kind} {sparsity:g}: {error}", flush=True)
                continue
            yield _row(name, kind, sparsity, folder, dense, options)


def _is_finished(folder: Path) -> bool:
    return (folder / "result.json").is_file()


def _row(
    task: str, kind: str, sparsity: float, folder: Path, dense: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Return score, sizes and relative times of a finished run."""
    weights, result = (folder / "model.safetensors").read_bytes(), json.loads((folder / "result.json").read_text())
    model, base = (bertsmith.load(path, device=options.device) for path in (folder, dense))
    return {
        "task": task,
        "kind": kind,
        "sparsity": sparsity,
        "metric": result["metric"],
        "score": result["score"],
        "megabytes": len(weights) / 1e6,
        "xz_megabytes": len(lzma.compress(weights)) / 1e6,
        "time": _relative_time(_batch_of(model, options), _batch_of(base, options), options),
        "csr_time": _csr_time(model, options) if kind in ("one shot", "gradual") else None,
    }


def _batch_of(model: Model, options: argparse.Namespace) -> Callable[[], object]:
    """Return a function that runs one batch of random tokens."""
    draw = torch.Generator().manual_seed(0)
    shape = (options.batch, options.length)
    tokens = torch.randint(model.config.encoder.vocabulary, shape, generator=draw).to(options.device)
    layout = SequenceLayout.full(*shape)
    return lambda: model.outputs(tokens, layout)


def _csr_time(model: Model, options: argparse.Namespace) -> float:
    """Return the time of a sparse product with the first feed-forward matrix relative to the dense product."""
    weight = model.encoder.blocks[0].feedforward.expand.weight.detach().flatten(0, -2)
    inputs = torch.randn(weight.shape[1], options.batch * options.length, device=weight.device)
    sparse = weight.to_sparse_csr()
    return _relative_time(lambda: sparse @ inputs, lambda: weight @ inputs, options)


@torch.inference_mode()
def _relative_time(work: Callable[[], object], base: Callable[[], object], options: argparse.Namespace) -> float:
    """Return the median time of one function divided by that of another; the two alternate."""
    seconds: tuple[list[float], list[float]] = [], []
    for number in range(WARMUP + options.rounds):
        for times, function in zip(seconds, (work, base), strict=True):
            begin = time.perf_counter()
            function()
            if options.device == "cuda":
                torch.cuda.synchronize()
            if number >= WARMUP:
                times.append(time.perf_counter() - begin)
    own, other = map(statistics.median, seconds)
    return own / other


def _line(row: dict[str, Any]) -> str:
    csr = "" if row["csr_time"] is None else f"  CSR time {row['csr_time']:.2f}"
    return (
        f"{row['task']:<10}{row['kind']:<11}{row['sparsity']:<5g}{row['metric']} {row['score']:6.2f}  "
        f"{row['megabytes']:7.2f} MB  xz {row['xz_megabytes']:7.2f} MB  time {row['time']:.2f}{csr}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", nargs="+", required=True, help="tasks, each as NAME=FOLDER")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.3, 0.5, 0.7, 0.9])
    parser.add_argument("--epochs", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


if __name__ == "__main__":
    main()

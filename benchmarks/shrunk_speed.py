"""Speed-up of half the width and half the depth: the extracted network against the whole one.

    python benchmarks/shrunk_speed.py --size minilm --size base --engine torch --engine onnxruntime

Both networks alternate in one process, in every engine and precision, and the ratio of their throughputs is printed.
Weights are random, because speed does not depend on them. int8 is also compared with float32.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

import bertsmith
from bertsmith.data.layout import SequenceLayout
from bertsmith.engines.artefact import ENGINES, write_artefact
from bertsmith.engines.base import Artefact, Inputs
from bertsmith.layers.subnet import Subnet
from bertsmith.models.attach_heads import with_task_head
from bertsmith.models.model import Model
from bertsmith.shrinking.fit.measure import Conditions, Workload, fingerprint, in_fresh_process, usable_cores
from bertsmith.tasks.classification import Classification

SIZES = {"tiny": (128, 4, 2), "minilm": (384, 6, 12), "base": (768, 12, 12)}  # width, layers, heads
HALF = Subnet(width=0.5, depth=0.5)


def main() -> None:
    options = _options()
    print(json.dumps({**fingerprint(), "threads": options.threads}))
    print(
        f"{'size':8} {'engine':12} {'precision':13} {'whole /s':>9} {'half /s':>9} {'ratio':>6} {'MB':>7} {'half':>7}"
    )
    rows = []
    for size in options.size or ["minilm", "base"]:
        whole = _model(size, options.length)
        models = {"whole": whole, "half": bertsmith.extract(whole, HALF)}
        for name in options.engine or list(ENGINES):
            engine = ENGINES[name]
            if engine.missing() is not None:
                print(f"{name}: {engine.missing()}")
                continue
            for precision in engine.precisions:
                if options.precision and precision not in options.precision:
                    continue
                rows.append(
                    {
                        "size": size,
                        "engine": name,
                        "precision": precision,
                        **_compared(models, name, precision, options),
                    }
                )
                _print(rows[-1])
    if options.metrics:
        Path(options.metrics).write_text(json.dumps(rows, indent=2), encoding="utf-8")


def _model(size: str, length: int) -> Model:
    """Return a classifier of two labels with random weights."""
    width, layers, heads = SIZES[size]
    config = bertsmith.preset("bert-base", width=width, layers=layers, heads=heads, max_length=max(length, 128))
    model = bertsmith.build(config, seed=0)
    task = Classification(labels=("no", "yes"))
    return with_task_head(model, task.head(model.config), seed=0).eval()


def _compared(models: dict[str, Model], engine: str, precision: str, options: argparse.Namespace) -> dict[str, Any]:
    conditions = Conditions(
        workloads=(Workload(name="all", lengths=(options.length,)),),
        batch=options.batch,
        threads=options.threads,
        layout="padded",
    )
    artefact = Artefact.parse({"engine": engine, "precision": precision})
    with tempfile.TemporaryDirectory() as temporary:
        folders = [Path(temporary) / name for name in models]
        for folder, model in zip(folders, models.values(), strict=True):
            folder.mkdir()
            write_artefact(model, folder, artefact, _samples(model, options))
        timing = in_fresh_process(folders, conditions, options.runs, options.seconds)
        sizes = [sum(path.stat().st_size for path in folder.rglob("*")) / 1e6 for folder in folders]
    speeds = [1e3 * options.batch / found["all"]["p50"] for found in timing.latencies]
    names = list(models)
    return {
        **{f"{name}_per_second": speed for name, speed in zip(names, speeds, strict=True)},
        **{f"{name}_mb": size for name, size in zip(names, sizes, strict=True)},
        "ratio": speeds[1] / speeds[0],
    }


def _samples(model: Model, options: argparse.Namespace) -> list[Inputs]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(4):
        tokens = torch.randint(model.config.encoder.vocabulary, (4, options.length), generator=generator)
        made.append(Inputs(tokens, SequenceLayout.rows(tokens, None), torch.zeros_like(tokens)))
    return made


def _print(row: dict[str, Any]) -> None:
    print(
        f"{row['size']:8} {row['engine']:12} {row['precision']:13} {row['whole_per_second']:9.1f} "
        f"{row['half_per_second']:9.1f} {row['ratio']:5.2f}x {row['whole_mb']:7.1f} {row['half_mb']:7.1f}",
        flush=True,
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", action="append", choices=list(SIZES))
    parser.add_argument("--engine", action="append", choices=list(ENGINES))
    parser.add_argument("--precision", action="append")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--figures", help="write all metrics to this JSON file")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Compare fine-tuning with the Trainer of transformers: time per step, and scores.

    python benchmarks/finetune.py --model FOLDER --data TASK --speed               # one task folder
    python benchmarks/finetune.py --model FOLDER --data TASK TASK … --quality --seeds 0,1,2 --out metrics.json

FOLDER is a Hugging Face model folder, TASK a folder with train and dev. `--speed` runs the Trainer and alternates a few
of its steps with as many of ours, first on examples truncated to one length, then on the task's own lengths (in random
order, the Trainer's default, and grouped by length). Both use bfloat16 on a GPU. `--quality` trains three times per
seed: the Trainer, ours with the Trainer's settings and ours with its own, and scores all with the same task.
"""

import argparse
import gc
import json
import logging
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

import bertsmith
from bertsmith.answers.sequences import Features
from bertsmith.runs.finetune import read_settings
from bertsmith.tasks.base import Encoding
from bertsmith.tasks.data_source import Tables
from bertsmith.training.finetuning import FinetuneSettings, Finetuning, make_finetuning, read_data
from bertsmith.training.starting_model import finetuning_encoder
from finetune_peer import peer_outputs, peer_trainer

# the Trainer's defaults, except for the batch and the warm-up
PEER_SETTINGS = {
    "sequences": {"length": 128},
    "batch": {"examples": 32},
    "optimizer": {"learning_rate": 5e-5, "betas": [0.9, 0.999], "epsilon": 1e-8, "weight_decay": 0.01, "clip": 1.0},
    "schedule": {"kind": "linear", "warmup": 0.1},
    "encoder": {"layer_decay": 1.0},
    "run": {"epochs": 3.0, "choose": "last"},
}

# cases of --speed: whether all examples have one length, whether batches are grouped by length
CASES = {"equal": (True, False), "mixed": (False, False), "by_length": (False, True)}
SIZES = {"small": (256, 12, 4), "base": (768, 12, 12)}  # width, layers, heads


def main() -> None:
    options = _options()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    if options.size:
        options.model = _fresh_model(options.model, options.size)
    metrics = {}
    if options.speed:
        metrics["speed"] = _speed(options)
    if options.quality:
        metrics["quality"] = _quality(options)
    if options.out:
        Path(options.out).write_text(json.dumps(metrics, indent=2), encoding="utf-8")


class _Interleaved(TrainerCallback):
    """Callback that runs a few of our steps after every few of the Trainer's, and times both."""

    def __init__(self, ours: Finetuning, options: argparse.Namespace) -> None:
        self.trainer, self.each, self.device = ours.trainer, options.each, options.device
        self.clock = {"wall": time.perf_counter, "processor": time.process_time}[options.clock]
        self.feed, self.meter = self.trainer.feed(), self.trainer.meter()
        self.theirs, self.mine = list[float](), list[float]()
        self.step = 0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.mark = self._now()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.each:
            return
        self.theirs.append(self._now() - self.mark)
        begin = self._now()
        draws = torch.get_rng_state()
        for _ in range(self.each):
            self.trainer.rehearse(self.step, self.feed, self.meter)
            self.step += 1
        torch.set_rng_state(draws)
        self.mark = self._now()
        self.mine.append(self.mark - begin)

    def _now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return self.clock()


def _speed(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for case in options.cases:
        is_equal, is_by_length = CASES[case]
        rows.append({"case": case, **_measured(options, is_equal=is_equal, is_by_length=is_by_length)})
        gc.collect()
    threads = "" if options.device == "cuda" else f", {torch.get_num_threads()} threads"
    print(
        f"\ntorch {torch.__version__}, {options.device}{threads}, {options.batch} examples per step, "
        f"ms per step ({options.clock})"
    )
    print(f"{'':<20}{'tokens':>8}{'padded':>8}{'Trainer':>10}{'ours':>10}{'ratio':>8}")
    for row in rows:
        print(
            f"{row['case']:<20}{row['tokens']:>8.0f}{row['padded']:>8.0f}{1000 * row['trainer']:>10.1f}"
            f"{1000 * row['ours']:>10.1f}{row['ratio']:>8.2f}",
            flush=True,
        )
    return rows


def _measured(options: argparse.Namespace, *, is_equal: bool, is_by_length: bool) -> dict[str, Any]:
    """Return the median seconds per step of both, and the median ratio over rounds."""
    steps = options.each * (options.rounds + 1)
    settings, tables = _task(options.data[0], options)
    sequences = settings.sequences.changed(
        length=options.length, layout=options.layout, order="by_length" if is_by_length else "shuffled"
    )
    settings = settings.changed(
        sequences=sequences,
        batch=settings.batch.changed(examples=options.batch),
        run=settings.run.changed(compile=options.compile),
    )
    if is_equal:
        settings, tables = _one_length(settings, tables)
    data = read_data(settings, tables.train, tables.dev.take(range(min(64, len(tables.dev)))))
    with tempfile.TemporaryDirectory() as folder:
        ours = make_finetuning(data, Path(folder) / "ours", device=options.device, show=False)
        watch = _Interleaved(ours, options)
        peer_trainer(
            data.settings,
            ours.trainer.data.phases[0].plan.features,
            Path(folder) / "peer",
            device=options.device,
            is_by_length=is_by_length,
            steps=steps,
            callbacks=[watch],
        ).train()
        ours.trainer.close()
    rounds = list(zip(watch.theirs, watch.mine, strict=True))[1:]  # the first one warms up
    lengths = ours.trainer.data.phases[0].plan.features.tokens.lengths
    order = np.random.default_rng(0).permutation(len(lengths))
    if is_by_length:
        order = np.argsort(lengths)
    batches = lengths[order[: len(order) // options.batch * options.batch]].reshape(-1, options.batch)
    return {
        "tokens": float(lengths.mean() * options.batch),
        "padded": float(batches.max(1).mean() * options.batch),
        "trainer": statistics.median(theirs for theirs, _ in rounds) / options.each,
        "ours": statistics.median(mine for _, mine in rounds) / options.each,
        "ratio": statistics.median(theirs / mine for theirs, mine in rounds),
    }


def _one_length(settings: FinetuneSettings, tables: Tables) -> tuple[FinetuneSettings, Tables]:
    """Return the longer half of the examples, truncated to the shortest of them."""
    lengths = _train_features(settings, tables).tokens.lengths
    length = int(np.median(lengths))
    long = np.flatnonzero(lengths >= length).tolist()
    settings = settings.changed(sequences=settings.sequences.changed(length=length))
    return settings, Tables(tables.train.take(long), tables.dev)


def _quality(options: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for task in options.data:
        for seed in options.seeds:
            for side, train in (("trainer", _peer), ("ours, its settings", _same), ("ours", _own)):
                begin = time.perf_counter()
                row = {"task": Path(task).name, "seed": seed, "side": side, **train(task, seed, options)}
                found.append({**row, "seconds": round(time.perf_counter() - begin, 1)})
                print(json.dumps(found[-1]), flush=True)
                gc.collect()
    _print_quality(found)
    return found


def _peer(task: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    settings, tables = _task(task, options)
    settings = settings.changed(run=settings.run.changed(seed=seed))
    data = read_data(settings, *tables)
    kind = data.settings.task
    encoding = _encoding(data.settings)
    dev = kind.features(data.dev, encoding)
    with tempfile.TemporaryDirectory() as folder:
        train = kind.features(data.train, encoding)
        trainer = peer_trainer(data.settings, train, Path(folder), device=options.device)
        trainer.train()
        evaluation = kind.evaluate(data.dev, kind.answers(data.dev, dev, peer_outputs(trainer, dev)))
    return {"metric": evaluation.metric, "score": evaluation.score, "metrics": evaluation.metrics}


def _same(task: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    return _ours(task, seed, options, [f"sequences.layout={options.layout}", *_as_flags(_peer_settings(options))])


def _own(task: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    return _ours(task, seed, options, [f"run.precision={options.precision}", *(options.set or [])])


def _ours(task: str, seed: int, options: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = bertsmith.finetune(
            options.model,
            data=task,
            out=Path(folder) / "run",
            task=options.task,
            column=options.column,
            set=flags,
            seed=seed,
            device=options.device,
        )
    metrics = {name: value for name, value in result.items() if isinstance(value, float)}
    return {"metric": result["metric"], "score": result["score"], "metrics": metrics}


def _print_quality(found: list[dict[str, Any]]) -> None:
    """Return one row for each task, shared metric, and side."""
    print(f"\n{'':<14}{'':<12}{'':<22}{'mean':>8}{'least':>8}{'most':>8}{'seconds':>9}")
    for task in dict.fromkeys(row["task"] for row in found):
        own = [row for row in found if row["task"] == task]
        for name in (name for name in own[0]["metrics"] if all(name in row["metrics"] for row in own)):
            for side in dict.fromkeys(row["side"] for row in own):
                taken = [row for row in own if row["side"] == side]
                metrics = [row["metrics"][name] for row in taken]
                seconds = statistics.mean(row["seconds"] for row in taken)
                print(
                    f"{task:<14}{name:<12}{side:<22}{statistics.mean(metrics):>8.2f}{min(metrics):>8.2f}"
                    f"{max(metrics):>8.2f}{seconds:>9.1f}"
                )


def _task(task: str, options: argparse.Namespace) -> tuple[FinetuneSettings, Tables]:
    """Return a task with the Trainer's settings, and its data."""
    plain: dict[str, Any] = {"data": task, "model": options.model, **_peer_settings(options)}
    return read_settings(plain, options.task, options.column or [], None, None, source="the benchmark")


def _peer_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of both sides, changed by the options."""
    optimizer = {**PEER_SETTINGS["optimizer"], "learning_rate": options.rate}
    return {
        **PEER_SETTINGS,
        "optimizer": optimizer,
        "run": {**PEER_SETTINGS["run"], "precision": options.precision},
    }


def _encoding(settings: FinetuneSettings) -> Encoding:
    model = finetuning_encoder(settings.model, settings.tokenizer, [], seed=0)
    return Encoding.of(model, settings.sequences.length)


def _train_features(settings: FinetuneSettings, tables: Tables) -> Features:
    data = read_data(settings, *tables)
    return data.settings.task.features(data.train, _encoding(settings))


def _as_flags(tree: dict[str, Any], prefix: str = "") -> list[str]:
    """Format settings as --set arguments."""
    flags = []
    for name, value in tree.items():
        if isinstance(value, dict):
            flags += _as_flags(value, f"{prefix}{name}.")
        else:
            flags.append(f"{prefix}{name}={json.dumps(value)}")
    return flags


def _fresh_model(folder: str, size: str) -> str:
    """Write a folder with random weights of another size and the tokenizer of a model, to measure speed."""
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    width, layers, heads = SIZES[size]
    config = AutoConfig.from_pretrained(folder)
    changes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    for name, value in {**changes, "intermediate_size": 4 * width}.items():
        setattr(config, name, value)
    out = tempfile.mkdtemp()
    AutoModel.from_config(config).save_pretrained(out)
    AutoTokenizer.from_pretrained(folder).save_pretrained(out)
    return out


def _options() -> argparse.Namespace:
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="model folder")
    parser.add_argument("--data", required=True, nargs="+", help="task folders; --speed takes the first")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--quality", action="store_true")
    parser.add_argument("--task", help="task, if the columns are ambiguous")
    parser.add_argument("--column", action="append", help="as for bertsmith finetune")
    parser.add_argument("--device", default="cuda" if has_gpu else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--seeds", default=[0, 1, 2], type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--rate", default=5e-5, type=float, help="learning rate of the Trainer's settings")
    parser.add_argument("--precision", default="auto", choices=["auto", "float32"], help="of all, for --quality")
    parser.add_argument("--set", action="append", help="change one of our default settings, for --quality")
    parser.add_argument("--size", choices=list(SIZES), help="random weights of this size, for --speed")
    parser.add_argument("--batch", default=32, type=int, help="examples per step, for --speed")
    parser.add_argument("--length", default=128, type=int, help="maximum tokens of an example, for --speed")
    parser.add_argument("--layout", default="packed", choices=["packed", "padded"], help="of ours")
    parser.add_argument("--compile", default="off", choices=["off", "whole"], help="of ours, for --speed")
    parser.add_argument("--cases", default=list(CASES), type=lambda text: text.split(","), help="of --speed")
    parser.add_argument("--each", default=10 if has_gpu else 2, type=int, help="steps per turn")
    parser.add_argument("--rounds", default=20 if has_gpu else 8, type=int, help="turns of both")
    parser.add_argument(
        "--clock",
        default="wall",
        choices=["wall", "processor"],
        help="clock of --speed; CPU time suits a busy machine, but is fair with one thread only",
    )
    parser.add_argument("--out", help="write the metrics as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()

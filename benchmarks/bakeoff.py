"""Compare networks and objectives of one size at equal pre-training time.

    python benchmarks/bakeoff.py --data CORPUS --seconds 28 --out runs/bakeoff        # then fine-tune them on tasks:
    python benchmarks/scores.py runs/bakeoff/*/ --data DATA --tasks CoLA,SST-2,MRPC,STS-B,SNLI --rows 10000 …
    python benchmarks/bakeoff.py --out runs/bakeoff --scores scores.jsonl             # the table

CORPUS is a folder that `bertsmith corpus` wrote. Every candidate (bakeoff_candidates.py) runs in its own process.
Groups of them compile in parallel; then each has the device to itself, measures its speed and trains as many steps as
fit into its time, with a full learning-rate schedule. Two-stage candidates split the time evenly and keep the encoder
between stages. With --steps the candidates train in parallel, for the given number of steps of their objective.
Writes to OUT/NAME: the model, log.jsonl and metrics.json.
"""

import argparse
import json
import multiprocessing
import statistics
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from bakeoff_candidates import BASE, CANDIDATES, recipe
from bertsmith.checkpoint.hf.writing import native_export
from bertsmith.checkpoint.store import write_model
from bertsmith.errors import InputError
from bertsmith.models.build import build
from bertsmith.models.config import ModelConfig
from bertsmith.models.generator import fold
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.training.budget import measure_pace
from bertsmith.training.pretraining import PretrainSettings, make_trainer
from bertsmith.training.trainer import Trainer
from scores_table import best_settings
from scores_tasks import TASKS

READY = "ready"


class CandidateSettings(PretrainSettings):
    """Settings that allow segment pairs for networks without token types, separated only by [SEP]."""

    def _check_network(self, config: ModelConfig, vocabulary: int) -> None:
        if config.encoder.embedding.types:
            super()._check_network(config, vocabulary)


def main() -> None:
    options = _options()
    if options.data:
        for first in range(0, len(options.candidates), options.together):
            _race(options.candidates[first : first + options.together], options)
    _print_table(options)


def _race(names: list[str], options: argparse.Namespace) -> None:
    """Compile the candidates in parallel and train them in turn, or, with fixed steps, train them in parallel."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    for name in names:
        parent_end, child_end = context.Pipe()
        context.Process(target=_candidate, args=(name, options, child_end)).start()
        pipes[name] = parent_end
    begin, ready = time.perf_counter(), []
    for name, pipe in pipes.items():
        message = pipe.recv()
        print(f"{name}: {message} after {time.perf_counter() - begin:.0f} s", flush=True)
        ready += [name] if message == READY else []
    if options.steps:
        for name in ready:
            pipes[name].send("go")
    for name in ready:
        if not options.steps:
            pipes[name].send("go")
        print(f"{name}: {pipes[name].recv()}", flush=True)


def _candidate(name: str, options: argparse.Namespace, pipe: Connection) -> None:
    warnings.filterwarnings("ignore")
    torch.backends.cuda.matmul.allow_tf32 = True
    stages = (BASE | CANDIDATES[name])["stages"]
    try:
        # with fixed steps nothing is timed, so a stage may compile while other candidates train
        trainers = {} if options.steps else {stage: _warm_trainer(name, stage, options) for stage in stages}
        pipe.send(READY)
        pipe.recv()
        pipe.send(json.dumps(_train(name, stages, trainers, options)))
    except Exception:  # the other candidates continue
        pipe.send(f"failed: {traceback.format_exc()}")


def _warm_trainer(name: str, stage: str, options: argparse.Namespace) -> Trainer:
    """Return a trainer whose step is compiled."""
    trainer = _trainer(name, stage, options)
    measure_pace(trainer, 1.0)
    return trainer


def _trainer(name: str, stage: str, options: argparse.Namespace) -> Trainer:
    plain = recipe(
        name,
        stage,
        data=options.data,
        vocabulary=Tokenizer.load(Path(options.data)).size,
        micro=options.micro,
        workers=options.workers,
        compiled=options.compile,
    )
    settings = CandidateSettings.parse(plain, source=name)
    return make_trainer(settings, _folder(options, name) / stage, device=options.device, show=False)


def _train(
    name: str, stages: Sequence[str], warm: Mapping[str, Trainer], options: argparse.Namespace
) -> dict[str, Any]:
    """Train the stages in order, each starting from the previous encoder, and write the model and its metrics."""
    rows: list[dict[str, Any]] = []
    trainers: list[Trainer] = []
    for number, stage in enumerate(stages):
        trainer = warm.get(stage) or _trainer(name, stage, options)
        if trainers:
            trainer.model.encoder.load_state_dict(trainers[-1].model.encoder.state_dict())
        begin = time.perf_counter()
        trainer.set_steps(_steps(trainer, stage, len(stages), options))
        trainer.out.mkdir(parents=True, exist_ok=True)
        trainer.run()
        trainers.append(trainer)
        rows += trainer.log.of_kind("training")
        print(f"{name}: stage {number} took {time.perf_counter() - begin:.1f} s", flush=True)
    last, folder = trainers[-1], _folder(options, name)
    held_out = last.log.of_kind("held_out")[-1]
    metrics = {
        "name": name,
        "native": _native(last.model.config),
        "parameters": sum(parameter.numel() for parameter in last.model.parameters()),
        "encoder_parameters": sum(parameter.numel() for parameter in last.model.encoder.parameters()),
        "steps": sum(trainer.method.run.steps for trainer in trainers),
        "tokens": sum(trainer.log.of_kind("training")[-1]["tokens"] for trainer in trainers),
        **({} if options.steps else _speed(rows)),
        "held_out": {key: value for key, value in held_out.items() if key not in ("kind", "step")},
    }
    write_model(fold(last.model), folder)
    (folder / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    return metrics


def _steps(trainer: Trainer, stage: str, stages: int, options: argparse.Namespace) -> int:
    """Return the steps of one stage: its share of the fixed number, or as many as fit into its share of the time."""
    if options.steps:
        return options.steps[stage] // stages
    seconds = options.seconds / stages
    _, step = max(measure_pace(trainer, seconds).steps[0].items())  # evaluations and checkpoints are not counted
    return max(1, int(seconds / step))


def _speed(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {
        "tokens_per_second": round(statistics.median(row["tokens_per_second"] for row in rows)),
        "utilisation": round(statistics.median(row.get("utilisation", 0.0) for row in rows), 3),
        "data_wait": round(statistics.median(row["data_wait"] for row in rows), 4),
    }


def _native(config: ModelConfig) -> str | None:
    """Return the transformers model type that computes this encoder, or None."""
    try:
        return native_export(build(config.changed(heads=(), generator=None), seed=0)).adapter.model_type
    except InputError:
        return None


def _print_table(options: argparse.Namespace) -> None:
    """Print all candidates that have metrics, best mean score first; the mean is over the tasks they have in common."""
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in Path(options.out).glob("*/metrics.json")]
    scores = _scores(options.scores) if options.scores else {}
    tasks = [task for task in TASKS if any(task in by_task for by_task in scores.values())]
    common = [task for task in tasks if all(task in scores.get(_slug(row["name"]), {}) for row in rows)]

    def mean(name: str) -> float:
        by_task = scores.get(_slug(name), {})
        return statistics.mean(statistics.mean(by_task[task]) for task in common) if common else float("nan")

    heads = ["native", "encoder", "tokens/s", "tokens", "MLM loss", "MLM accuracy", "RTD recall", *tasks]
    heads += [f"mean of {len(common)}"]
    print("| | " + " | ".join(heads) + " |")
    print("|---" * (1 + len(heads)) + "|")
    for row in sorted(rows, key=lambda row: -mean(row["name"])):
        held_out = row["held_out"]
        term = "generator" if "generator_loss" in held_out else "masked_tokens"
        recall = f"{held_out['replaced_recall']:.1%}" if "replaced_recall" in held_out else "–"
        size = row.get("encoder_parameters", row["parameters"])
        speed = f"{row['tokens_per_second']:,}" if "tokens_per_second" in row else "–"
        cells = [row["name"], row.get("native") or "–", f"{size / 1e6:.1f} M", speed]
        cells += [
            f"{row['tokens'] / 1e6:.0f} M",
            f"{held_out[f'{term}_loss']:.2f}",
            f"{held_out[f'{term}_accuracy']:.1%}",
            recall,
        ]
        by_task = scores.get(_slug(row["name"]), {})
        cells += [_cell(by_task[task]) if task in by_task else "–" for task in tasks]
        print("| " + " | ".join([*cells, f"{mean(row['name']):.1f}"]) + " |")


def _cell(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


def _scores(path: str) -> dict[str, dict[str, list[float]]]:
    """Return the scores of every model on every task, one per seed, for the settings with the best mean on dev."""
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "metrics" in row:
            runs.setdefault(row["model"], {}).setdefault(row["task"], []).append(row)
    return {
        name: {
            task: [row["metrics"][TASKS[task].metrics[0]] for row in best_settings(rows)]
            for task, rows in by_task.items()
        }
        for name, by_task in runs.items()
    }


def _slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)


def _folder(options: argparse.Namespace, name: str) -> Path:
    folder = Path(options.out) / _slug(name)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _steps_by_objective(text: str) -> dict[str, int]:
    return {stage: int(steps) for stage, _, steps in (item.partition("=") for item in text.split(","))}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="corpus folder; without it only the table is printed")
    parser.add_argument("--out", required=True)
    parser.add_argument("--candidates", default=list(CANDIDATES), type=lambda text: text.split(";"))
    parser.add_argument("--together", default=6, type=int, help="candidates that compile in parallel, 12 GB each")
    parser.add_argument("--seconds", default=28.0, type=float, help="seconds of training per candidate")
    parser.add_argument(
        "--steps",
        type=_steps_by_objective,
        help="masked_lm=N,replaced_tokens=N: train in parallel for fixed steps, halved for two stages",
    )
    parser.add_argument("--micro", default=65536, type=int, help="tokens per micro-batch")
    parser.add_argument("--workers", default=4, type=int)
    parser.add_argument("--compile", default="graphs")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scores", help="file written by scores.py")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Which network and objective to pre-train: candidates of one size, each alone on the device for the same seconds.

    python benchmarks/bakeoff.py --data CORPUS --seconds 28 --out runs/bakeoff        # then, to judge by tasks:
    python benchmarks/scores.py runs/bakeoff/*/ --data DATA --tasks CoLA,SST-2,MRPC,STS-B,SNLI --rows 10000 …
    python benchmarks/bakeoff.py --out runs/bakeoff --scores scores.jsonl             # the table

CORPUS is a folder that `bertsmith corpus` wrote. Every candidate (bakeoff_candidates.py) is a process of its own. Some
compile side by side; then one after the other has the device for itself, measures its pace and trains as many steps as
fit, its rate falling to zero within them. Candidates of two stages share the seconds evenly; the encoder goes on.
Written to OUT/NAME: the model, log.jsonl, and figures.json.
"""

import argparse
import json
import multiprocessing
import statistics
import time
import traceback
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from bakeoff_candidates import BASE, CANDIDATES, recipe
from bertsmith.checkpoint.store import write_model
from bertsmith.models.generator import fold
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.training.budget import measure_pace
from bertsmith.training.pretraining import PretrainSettings, make_trainer
from bertsmith.training.trainer import Trainer
from scores_tasks import TASKS

READY = "ready"


def main() -> None:
    options = _options()
    if options.data:
        for first in range(0, len(options.candidates), options.together):
            _race(options.candidates[first : first + options.together], options)
    _print_table(options)


def _race(names: list[str], options: argparse.Namespace) -> None:
    """Lets the candidates compile together and train in turn."""
    context = multiprocessing.get_context("spawn")
    talks: dict[str, Connection] = {}
    for name in names:
        ours, theirs = context.Pipe()
        context.Process(target=_candidate, args=(name, options, theirs)).start()
        talks[name] = ours
    begin, ready = time.perf_counter(), []
    for name, talk in talks.items():
        said = talk.recv()
        print(f"{name}: {said} after {time.perf_counter() - begin:.0f} s", flush=True)
        ready += [name] if said == READY else []
    for name in ready:
        talks[name].send("go")
        print(f"{name}: {talks[name].recv()}", flush=True)


def _candidate(name: str, options: argparse.Namespace, talk: Connection) -> None:
    warnings.filterwarnings("ignore")
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        trainers = _trainers(name, options)
        talk.send(READY)
        talk.recv()
        talk.send(json.dumps(_trained(name, trainers, options)))
    except Exception:  # the others go on
        talk.send(f"failed: {traceback.format_exc()}")


def _trainers(name: str, options: argparse.Namespace) -> list[Trainer]:
    """A trainer for each stage, which has compiled what it needs."""
    vocabulary = Tokenizer.load(Path(options.data)).size
    trainers = []
    for stage in (BASE | CANDIDATES[name])["stages"]:
        plain = recipe(
            name,
            stage,
            data=options.data,
            vocabulary=vocabulary,
            micro=options.micro,
            workers=options.workers,
            compiled=options.compile,
        )
        settings = PretrainSettings.parse(plain, source=name)
        trainer = make_trainer(settings, _folder(options, name) / stage, device=options.device, show=False)
        measure_pace(trainer, 1.0)
        trainers.append(trainer)
    return trainers


def _trained(name: str, trainers: list[Trainer], options: argparse.Namespace) -> dict[str, Any]:
    """Trains the stages one after the other, each from the encoder of the one before, and writes model and figures."""
    rows = []
    for number, trainer in enumerate(trainers):
        if number:
            trainer.model.encoder.load_state_dict(trainers[number - 1].model.encoder.state_dict())
        begin, seconds = time.perf_counter(), options.seconds / len(trainers)
        _, step = max(measure_pace(trainer, seconds).steps[0].items())  # evaluations and checkpoints are not counted
        trainer.set_steps(max(1, int(seconds / step)))
        trainer.out.mkdir(parents=True, exist_ok=True)  # measuring left nothing behind
        trainer.run()
        rows += trainer.log.of_kind("training")
        print(f"{name}: stage {number} took {time.perf_counter() - begin:.1f} s", flush=True)
    last, folder = trainers[-1], _folder(options, name)
    held_out = last.log.of_kind("held_out")[-1]
    figures = {
        "name": name,
        "parameters": sum(parameter.numel() for parameter in last.model.parameters()),
        "steps": sum(trainer.method.run.steps for trainer in trainers),
        "tokens": sum(trainer.log.of_kind("training")[-1]["tokens"] for trainer in trainers),
        "tokens_per_second": round(statistics.median(row["tokens_per_second"] for row in rows)),
        "utilisation": round(statistics.median(row.get("utilisation", 0.0) for row in rows), 3),
        "data_wait": round(statistics.median(row["data_wait"] for row in rows), 4),
        "held_out": {key: value for key, value in held_out.items() if key not in ("kind", "step")},
    }
    write_model(fold(last.model), folder)
    (folder / "figures.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return figures


def _print_table(options: argparse.Namespace) -> None:
    """All candidates that have figures, best mean score first."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in Path(options.out).glob("*/figures.json")]
    scores = _scores(options.scores) if options.scores else {}
    tasks = sorted({task for own in scores.values() for task in own})

    def mean(name: str) -> float:
        own = scores.get(_slug(name), {})
        return statistics.mean(own.values()) if len(own) == len(tasks) and own else float("nan")

    print("| | parameters | tokens/s | tokens | token loss | guessed | replaced found |", *tasks, "mean |", sep=" | ")
    print("|---" * (8 + len(tasks)) + "|")
    for row in sorted(found, key=lambda row: -mean(row["name"])):
        held = row["held_out"]
        term = "generator" if "generator_loss" in held else "masked_tokens"
        recall = f"{held['replaced_recall']:.1%}" if "replaced_recall" in held else "–"
        cells = [row["name"], f"{row['parameters'] / 1e6:.1f} M", f"{row['tokens_per_second']:,}"]
        cells += [
            f"{row['tokens'] / 1e6:.0f} M",
            f"{held[f'{term}_loss']:.2f}",
            f"{held[f'{term}_accuracy']:.1%}",
            recall,
        ]
        own = scores.get(_slug(row["name"]), {})
        cells += [f"{own[task]:.1f}" if task in own else "–" for task in tasks]
        print("| " + " | ".join([*cells, f"{mean(row['name']):.1f}"]) + " |")


def _scores(path: str) -> dict[str, dict[str, float]]:
    """The mean score of every model folder on every task, from the lines that scores.py wrote."""
    found: dict[str, dict[str, list[float]]] = {}
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "figures" in row:
            score = row["figures"][TASKS[row["task"]].figures[0]]
            found.setdefault(row["model"], {}).setdefault(row["task"], []).append(score)
    return {name: {task: statistics.mean(own) for task, own in tasks.items()} for name, tasks in found.items()}


def _slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)


def _folder(options: argparse.Namespace, name: str) -> Path:
    folder = Path(options.out) / _slug(name)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a corpus folder; without it only the table is printed")
    parser.add_argument("--out", required=True)
    parser.add_argument("--candidates", default=list(CANDIDATES), type=lambda text: text.split(";"))
    parser.add_argument(
        "--together", default=6, type=int, help="candidates that compile and wait side by side: 12 GB each"
    )
    parser.add_argument("--seconds", default=28.0, type=float, help="of training for each candidate")
    parser.add_argument("--micro", default=65536, type=int, help="tokens of a micro-batch")
    parser.add_argument("--workers", default=4, type=int)
    parser.add_argument("--compile", default="graphs")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scores", help="the file that scores.py wrote")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Fine-tunes models on tasks with several seeds, runs side by side on one GPU, and prints one table.

    python benchmarks/scores.py MODEL [MODEL …] --data DATA --tasks SST-2,MRPC,STS-B,CoLA,RTE,SQuAD --seeds 0,1,2 \\
        --processes 8 --device cuda --out scores.jsonl
    python benchmarks/scores.py --out scores.jsonl --table-only

A MODEL is the folder of a model, ours or Hugging Face's, or a name that `bertsmith finetune` knows, written
[NAME=]FOLDER[@RATE]: the name it has in the table (by default that of its folder) and a learning rate of its own.
--fresh does the same with the network of a MODEL from random weights, others for every seed.

DATA is a folder with glue/SST-2/train.jsonl.xz and so on; scores_tasks.py has the table of tasks and their settings,
those that were published for ELECTRA-small. Another rate may suit another model: give it as MODEL@RATE, or let
--learning-rates try several; the table then has, for every model and task, the one with the best mean over the seeds on
dev, and says so. --set changes any other setting: of all runs, or of a task or a model, as in RTE:run.epochs=5 or
minilm:encoder.layer_decay=1.0.

Every run that is done is one line of --out at once, and is not run again if the file has it: same weights, task, rows,
settings and seed. What fails leaves its sentence there, is tried again the next time, and the exit code is 1.
"""

import argparse
import sys
from typing import Any

from scores_plan import Contestant, carry_out, change, changed, contestant, data_of, judged, options_of, runs_of
from scores_table import RATE, tables
from scores_tasks import COMMON, FRESH, TASKS, cost_of, finetuned
from side_by_side import Run


def main() -> int:
    return carry_out(finetuned, planned, tables, options_of(__doc__ or "", "CoLA,SST-2,MRPC,STS-B,RTE", _add_options))


def planned(options: argparse.Namespace) -> list[Run]:
    """All runs that the options ask for."""
    contestants = [*map(contestant, options.models), *(contestant(text, is_fresh=True) for text in options.fresh)]
    runs = []
    for entrant, task in judged(contestants, options):
        for settings in _settings(entrant, task, [one.name for one in contestants], options):
            cost = cost_of(data_of(task, options), options.rows, settings["run.epochs"])
            runs += runs_of(entrant, task, options, cost, epochs=options.epochs, settings=settings)
    return runs


def _settings(entrant: Contestant, task: str, names: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """The settings of a model on a task, for every learning rate that is to be tried."""
    settings = {**COMMON, **TASKS[task].settings, **(FRESH if entrant.is_fresh else {})}
    if options.epochs is not None:
        settings["run.epochs"] = options.epochs
    settings = changed(settings, [change(text, names) for text in options.set], task, entrant.name)
    rates = [entrant.rate] if entrant.rate is not None else options.learning_rates or [settings[RATE]]
    return [{**settings, RATE: rate} for rate in rates]


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fresh", action="append", default=[], metavar="MODEL", help="its network, random weights")
    parser.add_argument("--epochs", type=float, help="on every task, instead of its own")
    parser.add_argument("--learning-rates", nargs="+", type=float, help="to try, for models without one of their own")
    parser.add_argument("--set", action="append", default=[], help="[TASK:|MODEL:]setting=value")


if __name__ == "__main__":
    sys.exit(main())

"""Fine-tune models on tasks with several seeds, in parallel on one GPU, and print one table.

    python benchmarks/scores.py MODEL [MODEL …] --data DATA --tasks SST-2,MRPC,STS-B,CoLA,RTE,SQuAD --seeds 0,1,2 \
        --processes 8 --device cuda --out scores.jsonl
    python benchmarks/scores.py --out scores.jsonl --table-only

A MODEL is a model folder, ours or Hugging Face's, or a name that `bertsmith finetune` accepts, written as
[NAME=]FOLDER[@RATE]: its name in the table (by default the folder name) and its learning rate. --fresh uses the network
of a MODEL with random weights, different for every seed.

DATA is a folder with glue/SST-2/train.jsonl.xz and so on; scores_tasks.py has the table of tasks and their settings,
which are ELECTRA-small's published ones. For another learning rate use MODEL@RATE, or let --learning-rates try several;
the table then has, for every model and task, the rate with the best mean over the seeds on dev, and says so. --set
changes any other setting: of all runs, of a task or of a model, as in RTE:run.epochs=5 or
minilm:encoder.layer_decay=1.0.

Every finished run is appended to --out immediately. A run is skipped if the file has it: same weights, task, rows,
settings and seed. A failed run leaves its error there and is tried again the next time; the exit code is then 1.
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
    """Return all runs that the options select."""
    contestants = [*map(contestant, options.models), *(contestant(text, is_fresh=True) for text in options.fresh)]
    runs = []
    for entrant, task in judged(contestants, options):
        for settings in _settings(entrant, task, [one.name for one in contestants], options):
            cost = cost_of(data_of(task, options), options.rows, settings["run.epochs"])
            runs += runs_of(entrant, task, options, cost, epochs=options.epochs, settings=settings)
    return runs


def _settings(entrant: Contestant, task: str, names: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the settings of a model on a task, one for each learning rate to try."""
    settings = {**COMMON, **TASKS[task].settings, **(FRESH if entrant.is_fresh else {})}
    if options.epochs is not None:
        settings["run.epochs"] = options.epochs
    settings = changed(settings, [change(text, names) for text in options.set], task, entrant.name)
    rates = [entrant.rate] if entrant.rate is not None else options.learning_rates or [settings[RATE]]
    return [{**settings, RATE: rate} for rate in rates]


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fresh", action="append", default=[], metavar="MODEL", help="network of this model with random weights"
    )
    parser.add_argument("--epochs", type=float, help="epochs on every task, instead of its own")
    parser.add_argument(
        "--learning-rates", nargs="+", type=float, help="learning rates to try, for models without @RATE"
    )
    parser.add_argument("--set", action="append", default=[], help="[TASK:|MODEL:]setting=value")


if __name__ == "__main__":
    sys.exit(main())

"""Constituency parsing: labelled F1 of models × seeds on a treebank.

    python benchmarks/parsing.py --data TREEBANK --out FOLDER                       # bundled model, three seeds
    python benchmarks/parsing.py --data TREEBANK --out FOLDER --models small bert-small
    python benchmarks/parsing.py --data TREEBANK --out FOLDER --models transformer-small \\
        --recipe transformer-treebank

TREEBANK is a folder with train, dev and test whose rows have a column `tree`. Each model is fine-tuned with its default
settings (--recipe and --set change them) and every seed, and evaluated on dev and test: the best checkpoint on dev for
encoders, which get a chart head, and the last one for models with a decoder, which write trees as symbols. Prints mean
± standard deviation over seeds beside the right-branching baseline, and writes table.json. Finished runs in FOLDER are
not repeated.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import bertsmith
from bertsmith.answers.trees import leaves
from bertsmith.runs.result import StoppedRun
from bertsmith.tasks.data_source import task_splits
from bertsmith.tasks.metrics.brackets import evaluate_trees, right_branching, score_tree
from bertsmith.tasks.parsing import Parsing, gold_tree

METRICS = ("f1", "precision", "recall", "exact_match")
SPLITS = ("dev", "test")


def main() -> None:
    options = _options()
    table: dict[str, dict[str, list[dict[str, float]]]] = {"right-branching": _baseline(options.data)}
    for model in options.models:
        runs = [_run(model, seed, options) for seed in options.seeds]
        table[model] = {split: [run[split] for run in runs] for split in SPLITS}
        _print(table)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "table.json").write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with train, dev and test")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--models", nargs="+", default=["small"], help="bundled models, folders or presets")
    parser.add_argument("--recipe", type=Path, help="settings of all models")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", type=float, help="epochs of encoders")
    parser.add_argument("--set", nargs="*", default=[], help="settings such as optimizer.learning_rate=1e-3")
    parser.add_argument("--device", default="auto")
    return parser.parse_args()


def _baseline(data: str) -> dict[str, list[dict[str, float]]]:
    """Return the scores of right-branching trees."""
    scores = {}
    for split in SPLITS:
        trees = [gold_tree(example) for example in Parsing().examples(task_splits(data).read(split))]
        found = evaluate_trees([score_tree(tree, right_branching(list(leaves(tree)))) for tree in trees], None)
        scores[split] = [{name: found.metrics[name] for name in METRICS}]
    return scores


def _run(model: str, seed: int, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Fine-tune a model with one seed unless the folder has it already; return its scores by split."""
    folder = options.out / f"{Path(model).name}-seed-{seed}"
    if not (folder / "result.json").is_file():
        is_begun = (folder / "recipe.toml").is_file()
        result = bertsmith.finetune(
            None if is_begun else model,
            data=options.data,
            out=folder,
            recipe=None if is_begun else options.recipe,
            epochs=options.epochs,
            seed=seed,
            set=options.set,
            device=options.device,
            resume=is_begun,
        )
        if isinstance(result, StoppedRun):
            raise SystemExit(f"{folder} was stopped; run the same command again to resume it")
    scores = {}
    for split in SPLITS:
        target = folder.with_name(f"{folder.name}-{split}")
        if not (target / "result.json").is_file():
            bertsmith.evaluate(folder, data=options.data, split=split, out=target, device=options.device, force=True)
        found: dict[str, Any] = json.loads((target / "result.json").read_text(encoding="utf-8"))
        scores[split] = {name: found[name] for name in (*METRICS, "repaired") if name in found}
    return scores


def _print(table: dict[str, dict[str, list[dict[str, float]]]]) -> None:
    print(f"{'':28}{'':6}" + "".join(f"{name:>16}" for name in METRICS) + f"{'runs':>6}")
    for model, by_split in table.items():
        for split, runs in by_split.items():
            cells = "".join(f"{_spread([run[name] for run in runs]):>16}" for name in METRICS)
            repaired = [run["repaired"] for run in runs if "repaired" in run]
            note = f"  repaired {statistics.fmean(repaired):.1f} %" if repaired else ""
            print(f"{Path(model).name:28}{split:6}{cells}{len(runs):>6}{note}", flush=True)


def _spread(values: list[float]) -> str:
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{deviation}"


if __name__ == "__main__":
    main()

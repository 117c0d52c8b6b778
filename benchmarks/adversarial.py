"""Compare fine-tuning without adversarial training, with SiFT and with VAT on a task, over several seeds.

    python benchmarks/adversarial.py MODEL --data TASK                                    # on a GPU, if there is one
    python benchmarks/adversarial.py MODEL --data TASK --kinds none,sift --seeds 0,1 --set run.epochs=6 --device cpu

MODEL is a model folder or a preset, TASK a folder with train.jsonl and dev.jsonl. Every row is a run of
`bertsmith.finetune`; runs with the same seed differ only in the method. Settings such as `--set adversarial.weight=3`
do not affect the runs without adversarial training.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import bertsmith


def main() -> None:
    options = _options()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        # seed by seed, so that an interrupted benchmark has complete comparisons
        for seed in options.seeds:
            for kind in options.kinds:
                rows.append(_run(options, kind, seed, Path(folder) / f"{kind}-{seed}"))
                print(json.dumps(rows[-1]), flush=True)
    _print_table(rows, options.kinds)
    if options.out:
        Path(options.out).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def _run(options: argparse.Namespace, kind: str, seed: int, out: Path) -> dict[str, Any]:
    result = bertsmith.finetune(
        options.model,
        data=options.data,
        out=out,
        adversarial=kind,
        seed=seed,
        set=options.set,
        device=options.device,
    )
    metrics = {name: result[name] for name in ("metric", "score", "best_step", "steps", "seconds")}
    return {"adversarial": kind, "seed": seed, **metrics}


def _print_table(rows: list[dict[str, Any]], kinds: list[str]) -> None:
    """Print mean, standard deviation, minimum and maximum of the score, and the mean seconds, per kind."""
    print(f"\n| adversarial | runs | {rows[0]['metric']} | std | min | max | best step | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    for kind in kinds:
        own = [row for row in rows if row["adversarial"] == kind]
        scores = [row["score"] for row in own]
        spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
        steps, seconds = (statistics.mean(row[name] for row in own) for name in ("best_step", "seconds"))
        print(
            f"| {kind} | {len(own)} | {statistics.mean(scores):.2f} | {spread:.2f} | {min(scores):.2f} "
            f"| {max(scores):.2f} | {steps:.0f} of {own[0]['steps']} | {seconds:.1f} |"
        )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--kinds", default=["none", "sift", "vat"], type=lambda text: text.split(","))
    parser.add_argument("--seeds", default=[0, 1, 2], type=lambda text: [int(seed) for seed in text.split(",")])
    parser.add_argument("--set", action="append", default=[], help="setting for all runs, such as run.epochs=6")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--out", help="write the rows as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Quality of the text embeddings of a model on STS-B, before and after training them from text alone.

    python -c 'import bertsmith; bertsmith.pairs(["wikipedia-en"], out="runs/pairs")'
    python benchmarks/vectors.py MODEL --pairs runs/pairs --dev STS-B --out runs/small
    python benchmarks/vectors.py MODEL --pairs runs/pairs --dev STS-B --rows 100000 \
        --variant "kinds=same,altered" --variant "kinds=neighbours,spans task.scale=40 optimizer.learning_rate=1e-4"

MODEL is a folder or a bundled name. Settings are those of the recipe finetune/vectors-small; --set changes them for
all runs. Every --variant is a separate run: settings separated by spaces, and also rows=… (number of pairs, drawn at
random) and kinds=… (kinds of pairs, separated by commas). Prints one line of JSON for the mean hidden states of the
unchanged model, and one for each run. --out gets the model with the encoder of the best run, all of its own heads, its
generator, and the embedder.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bertsmith
from bertsmith.models.convert import with_encoder
from bertsmith.models.model import Model
from bertsmith.recipes import FILES
from bertsmith.tasks.data_source import task_splits
from bertsmith.tasks.metrics.ranking import evaluate_similarity

RECIPE = FILES["finetune/vectors-small"]
OWN = ("rows", "kinds")
Rows = list[dict[str, Any]]


def spearman(model: Model, dev: Rows, device: str) -> float:
    """Return the Spearman correlation of the cosines with the scores of dev, in percent."""
    model = model.to(device)
    first, second = (
        torch.nn.functional.normalize(model.encode([row[name] for row in dev], batch_size=128).double(), dim=-1)
        for name in ("sentence1", "sentence2")
    )
    cosines = (first * second).sum(-1).cpu().numpy()
    return evaluate_similarity(cosines, np.array([float(row["label"]) for row in dev]), None).score


def chosen(pairs: Rows, kinds: str | None, rows: int | None) -> Rows:
    """Return a random sample of the pairs of some kinds."""
    kept = [row for row in pairs if kinds is None or row["kind"] in kinds.split(",")]
    if not kept:
        there = ", ".join(sorted({row["kind"] for row in pairs}))
        raise SystemExit(f"no pairs of the kinds {kinds}; there are {there}")
    random.Random(0).shuffle(kept)
    return kept[:rows]


def learned(
    model: Model,
    pairs: Rows,
    dev: Rows,
    words: list[str],
    arguments: argparse.Namespace,
) -> tuple[dict[str, Any], Model]:
    """Return the metrics of one run, and the model with the trained encoder."""
    own = {name: value for name, _, value in (word.partition("=") for word in words) if name in OWN}
    settings = [word for word in words if word.partition("=")[0] not in OWN]
    rows = chosen(pairs, own.get("kinds"), int(own["rows"]) if "rows" in own else arguments.rows)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    result = bertsmith.finetune(
        model,
        train=rows,
        dev=dev,
        recipe=RECIPE,
        set=[*arguments.set, *settings],
        seed=arguments.seed,
        device=arguments.device,
    )
    joined = with_encoder(model.cpu(), result.model.cpu().float())
    metrics = {
        "variant": " ".join(words),
        "pairs": len(rows),
        "steps": result["steps"],
        "loss": round(result["training_loss"], 4),
        "spearman": round(result["score"], 2),
        "spearman_of_the_whole": round(spearman(joined, dev, arguments.position), 2),
        "seconds": result["seconds"],
        "tokens_per_second": result["tokens_per_second"],
        "peak_memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if torch.cuda.is_available() else None,
    }
    return metrics, joined.cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--pairs", type=Path, required=True, help="output folder of bertsmith pairs, or its file")
    parser.add_argument("--dev", type=Path, required=True, help="folder with a dev split: sentence1, sentence2, label")
    parser.add_argument("--dev-rows", type=int, default=None, help="maximum rows of dev")
    parser.add_argument("--rows", type=int, default=None, help="maximum pairs, drawn at random")
    parser.add_argument("--set", action="append", default=[], help="setting for all runs, such as run.epochs=2")
    parser.add_argument("--variant", action="append", default=[], help="settings of one run, separated by spaces")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--out", type=Path, default=None, help="folder for the whole model of the best run")
    arguments = parser.parse_args()
    arguments.position = "cuda" if torch.cuda.is_available() and arguments.device != "cpu" else "cpu"
    if arguments.out is not None and arguments.out.exists():
        raise SystemExit(f"--out {str(arguments.out)!r} already exists; give another folder")
    model = bertsmith.load(arguments.model).float()
    pairs = list(task_splits(arguments.pairs).read("train"))
    dev = list(task_splits(arguments.dev, file_is="dev").read("dev"))[: arguments.dev_rows]
    before = spearman(model, dev, arguments.position)
    print(json.dumps({"model": arguments.model, "dev": len(dev), "spearman_before": round(before, 2)}), flush=True)
    best, score = None, -float("inf")
    for variant in arguments.variant or [""]:
        metrics, joined = learned(model.cpu(), pairs, dev, variant.split(), arguments)
        print(json.dumps({"spearman_before": round(before, 2), **metrics}), flush=True)
        if metrics["spearman"] > score:
            best, score = joined, metrics["spearman"]
    if arguments.out is not None and best is not None:
        bertsmith.save(best, arguments.out)
        print(json.dumps({"written": str(arguments.out), "spearman": score}), flush=True)


if __name__ == "__main__":
    main()

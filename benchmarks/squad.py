"""Fine-tune a model on SQuAD and print exact match, F1 and seconds, with the Python interface.

    python benchmarks/squad.py MODEL --data squad/v1.1
    python benchmarks/squad.py bert-tiny --data squad/v2.0 --device cpu --rows 200 --set run.epochs=1

MODEL is a model folder, ours or Hugging Face's, or a preset with random weights. The settings are those of BERT's code
(2 epochs, 3e-5, 384 tokens, stride 128) with a batch of 32; --set changes any of them. Prints one line of JSON per
seed: the metrics on dev, the seconds of the run and of the predictions on dev.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

import bertsmith
from bertsmith.text.tables import read_split

SETTINGS = ["sequences.length=384", "batch.examples=32", "optimizer.learning_rate=3e-5", "run.epochs=2"]
FIGURES = ("f1", "exact", "has_answer_f1", "no_answer_f1", "best_f1", "best_f1_threshold", "seconds", "best_step")


def measured(arguments: argparse.Namespace, seed: int) -> dict[str, object]:
    """Return the metrics of one run."""
    parts = [list(read_split(arguments.data, part))[: arguments.rows] for part in ("train", "dev")]
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        result = bertsmith.finetune(
            arguments.model,
            train=parts[0],
            dev=parts[1],
            task="spans",
            out=Path(folder) / "run",
            device=arguments.device,
            seed=seed,
            set=[*SETTINGS, *arguments.set],
        )
        whole = time.perf_counter() - begun
        begun = time.perf_counter()
        result.predict([{"question": row["question"], "context": row["context"]} for row in parts[1]])
        answering = time.perf_counter() - begun
    found = {name: round(float(result[name]), 3) for name in FIGURES if name in result}
    return {
        "model": arguments.model,
        "data": str(arguments.data),
        "train": len(parts[0]),
        "dev": len(parts[1]),
        "seed": seed,
        **found,
        "seconds_in_all": round(whole, 1),
        "seconds_to_answer_dev": round(answering, 1),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() and arguments.device != "cpu" else "cpu",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with train.jsonl and dev.jsonl, plain or compressed"
    )
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rows", type=int, default=None, help="maximum rows per split")
    parser.add_argument("--set", action="append", default=[], help="one setting, such as run.epochs=3")
    arguments = parser.parse_args()
    for seed in range(arguments.seeds):
        print(json.dumps(measured(arguments, seed)), flush=True)


if __name__ == "__main__":
    main()

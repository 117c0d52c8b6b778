"""What a pre-trained encoder is worth on a task: every weight fine-tuned, a linear layer on the first token's state.

    python benchmarks/downstream.py MODEL… --tasks SST-2 MRPC --data GLUE --seeds 3

GLUE holds one folder a task with train.jsonl.xz and dev.jsonl.xz (fields sentence or sentence1 and sentence2, label).
One plain protocol for all models, so that they can be compared: AdamW, linear decay, no search. Accuracy on dev; for
MRPC also F1.
"""

import argparse
import json
import lzma
import math
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import bertsmith
from bertsmith.models.generator import part_of


class Classifier(nn.Module):
    """A model and a linear layer."""

    def __init__(self, model: bertsmith.Model, dropout: float) -> None:
        super().__init__()
        self.model = model
        self.dropout = nn.Dropout(dropout)
        self.score = nn.Linear(model.config.encoder.width, 2)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.score(self.dropout(self.model(**batch)[:, 0]))


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a task's part."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def encode(model: bertsmith.Model, rows: list[dict[str, Any]], length: int) -> list[dict[str, Any]]:
    """Token ids and types of every row, cut to a length."""
    tokenizer = model.require_tokenizer()
    pairs = "sentence1" in rows[0]
    first = [row["sentence1" if pairs else "sentence"] for row in rows]
    second = [row["sentence2"] for row in rows] if pairs else None
    arrays = tokenizer.encode(first, second, max_length=length) if pairs else tokenizer.encode(first, max_length=length)
    sizes = arrays["attention_mask"].sum(1)
    names = ("input_ids", "token_type_ids")
    return [
        {**{name: arrays[name][i, : sizes[i]] for name in names}, "label": rows[i]["label"]} for i in range(len(rows))
    ]


def collate(items: list[dict[str, Any]], pad: int, types: int, device: str) -> tuple[dict[str, Tensor], Tensor]:
    """A padded batch and its labels; lengths in steps of 16, so that there are few shapes."""
    longest = -(-max(len(item["input_ids"]) for item in items) // 16) * 16
    ids = torch.full((len(items), longest), pad)
    kinds, mask = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, item in enumerate(items):
        size = len(item["input_ids"])
        ids[row, :size] = torch.from_numpy(item["input_ids"])
        kinds[row, :size] = torch.from_numpy(item["token_type_ids"])
        mask[row, :size] = 1
    batch = {"input_ids": ids, "attention_mask": mask, **({"token_type_ids": kinds} if types else {})}
    labels = torch.tensor([item["label"] for item in items])
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}, labels.to(device)


def finetune(folder: Path, task: Path, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """The dev scores of one model after training on one task."""
    torch.manual_seed(seed)
    model = part_of(bertsmith.load(folder, device=options.device), "encoder")
    types, pad = model.config.encoder.embedding.types, model.require_tokenizer().pad
    train = encode(model, read(task / "train.jsonl.xz"), options.length)
    dev = encode(model, read(task / "dev.jsonl.xz"), options.length)
    network = Classifier(model, 0.1).to(options.device).train()
    epochs = options.epochs if len(train) > 10_000 else options.small_epochs
    size = options.batch if len(train) > 10_000 else options.small_batch
    steps = epochs * math.ceil(len(train) / size)
    optimizer = torch.optim.AdamW(network.parameters(), lr=options.rate, weight_decay=0.01)
    warmup = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))
    )
    for _ in range(epochs):
        order = torch.randperm(len(train)).tolist()
        for begin in range(0, len(order), size):
            batch, labels = collate([train[i] for i in order[begin : begin + size]], pad, types, options.device)
            with torch.autocast(options.device, torch.bfloat16, enabled=options.device == "cuda"):
                loss = cross_entropy(network(batch).float(), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return score(network.eval(), dev, pad, types, options.device)


@torch.inference_mode()
def score(network: Classifier, dev: list[dict[str, Any]], pad: int, types: int, device: str) -> dict[str, float]:
    """Accuracy and F1 of the label 1, in percent."""
    right = positives = called = found = 0
    for begin in range(0, len(dev), 256):
        batch, labels = collate(dev[begin : begin + 256], pad, types, device)
        said = network(batch).argmax(-1)
        right += int((said == labels).sum())
        positives, called = positives + int((labels == 1).sum()), called + int((said == 1).sum())
        found += int(((said == 1) & (labels == 1)).sum())
    return {"accuracy": 100 * right / len(dev), "f1": 200 * found / max(1, positives + called)}


def main() -> None:
    options = _options()
    rows = []
    for folder in options.models:
        for task in options.tasks:
            scores = [finetune(folder, options.data / task, seed, options) for seed in range(options.seeds)]
            # `bertsmith compare` leaves its runs as recipe/seed-0
            name = folder.parent.name if folder.name.startswith("seed-") else folder.name
            row: dict[str, Any] = {"model": name, "task": task}
            for metric in ("accuracy", "f1"):
                values = [one[metric] for one in scores]
                row[metric] = round(fmean(values), 2)
                row[f"{metric}_spread"] = round(stdev(values), 2) if len(values) > 1 else None
            rows.append(row)
            print(json.dumps(row), flush=True)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=2), encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--tasks", nargs="+", default=["SST-2", "MRPC"])
    parser.add_argument("--seeds", default=1, type=int)
    parser.add_argument("--length", default=128, type=int)
    parser.add_argument("--rate", default=2e-4, type=float)
    parser.add_argument("--epochs", default=2, type=int, help="where there are more than 10,000 rows")
    parser.add_argument("--batch", default=128, type=int, help="likewise")
    parser.add_argument("--small-epochs", default=5, type=int, help="where there are fewer")
    parser.add_argument("--small-batch", default=32, type=int, help="likewise")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Depth-adaptive translation: BLEU and tokens per second against the mean number of decoder blocks.

    python benchmarks/decoder_exits.py FOLDER --data multi30k                      # the rules that shrink found on dev
    python benchmarks/decoder_exits.py SEED-0 SEED-1 SEED-2 --data multi30k --rules chosen --texts 1000 --batch 1

FOLDER is what `bertsmith shrink MODEL --method exits` wrote for a translation model; its result.json lists the rules.
All blocks, each exit alone and every rule translate the same rows; --rules chosen takes the stored rule alone. The rows
of the table alternate within a round, and speeds are medians over rounds; on one thread they are of CPU time, which
other load on the machine changes less. `loss` is against all blocks, with the upper bound of 95 % confidence of a
paired bootstrap, which holds for all rows together. Several folders, such as seeds, are measured one after the other;
the last table has the means over them. Saved blocks are not saved time: with confidence every exit multiplies by the
whole vocabulary, and rows that leave are regrouped; a ratio below 1 is such a case.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bertsmith.checkpoint.store import load
from bertsmith.engines.exit_runner import AdaptiveTranslator
from bertsmith.layers.context import Memory
from bertsmith.models.adaptive_depth import decoder_exits_config
from bertsmith.models.heads.decoder_exits import DepthRule
from bertsmith.models.seq2seq import GenerationConfig, Seq2Seq, Steps
from bertsmith.shrinking.decoder_exits import fixed_exit
from bertsmith.tasks.data_source import task_splits
from bertsmith.tasks.metrics.base import loss_bounds
from bertsmith.tasks.predictor import read_task_record
from bertsmith.tasks.translation import Translation, require_decoder


@dataclass
class Row:
    """One way to decode."""

    name: str
    translate: Callable[[list[str], GenerationConfig, int], list[str]]
    mean_blocks: Callable[[], float]
    seconds: list[float] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    results = [_measure(folder, options) for folder in options.models]
    if len(results) > 1:
        print(f"means over {len(results)} models; largest loss, smallest ratio")
        for name in [result["name"] for result in results[0]]:
            rows = [result for model in results for result in model if result["name"] == name]
            if len(rows) < len(results):
                continue  # not every model has this rule
            mean = {key: statistics.fmean(row[key] for row in rows) for key in ("blocks", "score", "loss", "ratio")}
            print(
                f"{name:>16} {mean['blocks']:7.2f} {mean['score']:7.2f} {mean['loss']:6.2f} {mean['ratio']:6.2f}   "
                f"{max(row['loss'] for row in rows):6.2f} {min(row['ratio'] for row in rows):6.2f}"
            )
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def _measure(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Print the table of one model and return its rows."""
    model, task = require_decoder(load(folder, device=options.device)), read_task_record(folder).task
    assert isinstance(task, Translation)
    search = task.generation.changed(method="beam", beam=options.beam)
    examples = task.examples(task_splits(options.data).read(options.split))[: options.texts]
    texts, tokenizer = [example.text for example in examples], model.require_tokenizer()
    rows = _rows(model, _rules(folder, model, options.rules))
    clock = time.process_time if options.device == "cpu" and options.threads == 1 else time.perf_counter
    for _ in range(options.rounds):
        for row in rows:
            begin = clock()
            row.outputs = row.translate(texts, search, options.batch)
            row.seconds.append(clock() - begin)
    print(
        f"{folder.name}: {len(texts)} texts of {options.split}, beam {options.beam}, batch {options.batch}, "
        f"{options.device}, {options.threads} thread(s); choose = {decoder_exits_config(model).choose}"
    )
    evaluations = [task.evaluate(examples, [{"answer": output} for output in row.outputs]) for row in rows]
    full, *others = evaluations
    bounds = [0.0, *loss_bounds(full, others, len(examples), level=0.95)]
    print(f"{'':>16} {'blocks':>7} {full.metric:>7} {'loss':>6} {'bound':>6} {'tokens/s':>9} {'ratio':>6}")
    results = []
    for row, evaluation, bound in zip(rows, evaluations, bounds, strict=True):
        seconds = statistics.median(row.seconds)
        result = {
            "model": folder.name,
            "name": row.name,
            "blocks": row.mean_blocks(),
            "score": evaluation.score,
            "loss": full.score - evaluation.score,
            "loss_bound": bound,
            "tokens_per_second": sum(map(len, tokenizer.encode_plain(row.outputs))) / seconds,
        }
        result["ratio"] = result["tokens_per_second"] / results[0]["tokens_per_second"] if results else 1.0
        results.append(result)
        print(
            f"{row.name:>16} {result['blocks']:7.2f} {result['score']:7.2f} {result['loss']:6.2f} {bound:6.2f} "
            f"{result['tokens_per_second']:9.1f} {result['ratio']:6.2f}",
            flush=True,
        )
    return results


def _rules(folder: Path, model: Seq2Seq, which: str) -> dict[str, DepthRule]:
    """Return the rules in result.json and the model's own, by name."""
    own = decoder_exits_config(model).rule
    rules = {} if own is None else {"chosen": own}
    if which == "all" and (folder / "result.json").is_file():
        table = json.loads((folder / "result.json").read_text(encoding="utf-8"))["table"]
        parsed = [DepthRule.parse(row["rule"], source="result.json") for row in table]
        rules |= {f"rule {number + 1}": rule for number, rule in enumerate(parsed) if rule != own}
    return rules


def _rows(model: Seq2Seq, rules: dict[str, DepthRule]) -> list[Row]:
    depth = len(model.decoder.blocks)

    def translate(begin: Callable[[Memory], Steps] | None) -> Callable[[list[str], GenerationConfig, int], list[str]]:
        return lambda texts, search, batch: model.translate(texts, search, batch_size=batch, begin=begin)

    rows = [Row("all blocks", translate(None), lambda: float(depth))]
    for index, layer in enumerate(decoder_exits_config(model).layers):
        rows.append(Row(f"exit {layer} alone", translate(fixed_exit(model, index)), lambda layer=layer: float(layer)))
    for name, rule in rules.items():
        runner = AdaptiveTranslator(model, rule)
        rows.append(
            Row(
                name,
                lambda texts, search, batch, own=runner: own.translate(texts, search, batch_size=batch),
                lambda own=runner: float(own.mean_layers or depth),
            )
        )
    return rows


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--data", required=True)
    parser.add_argument("--split", default="test")
    parser.add_argument("--rules", choices=["all", "chosen"], default="all")
    parser.add_argument("--texts", type=int, default=500)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--beam", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()

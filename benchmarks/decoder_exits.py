"""Depth-adaptive translation: BLEU and tokens per second against the mean number of decoder blocks.

    python benchmarks/decoder_exits.py FOLDER --data multi30k                      # the rules that shrink found on dev
    python benchmarks/decoder_exits.py FOLDER --data multi30k --split test --texts 200 --batch 1 --rules chosen

FOLDER is what `bertsmith shrink MODEL --method exits` wrote for a translation model; its result.json lists the rules.
All blocks, each exit alone and every rule translate the same rows. The rows of the table alternate within a round, and
speeds are medians over rounds; on one thread they are of CPU time, which other load on the machine changes less. Saved
blocks are not saved time: with confidence every exit multiplies by the whole vocabulary, and rows that leave are
regrouped; a ratio below 1 is such a case.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bertsmith.checkpoint.store import load
from bertsmith.engines.exit_runner import AdaptiveTranslator
from bertsmith.layers.context import Memory
from bertsmith.models.adaptive_depth import decoder_exits_config
from bertsmith.models.heads.decoder_exits import DepthRule
from bertsmith.models.seq2seq import GenerationConfig, Seq2Seq, Steps
from bertsmith.shrinking.decoder_exits import fixed_exit
from bertsmith.tasks.data_source import task_splits
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
    model, task = require_decoder(load(options.model, device=options.device)), read_task_record(options.model).task
    assert isinstance(task, Translation)
    search = task.generation.changed(method="beam", beam=options.beam)
    examples = task.examples(task_splits(options.data).read(options.split))[: options.texts]
    texts, tokenizer = [example.text for example in examples], model.require_tokenizer()
    rows = _rows(model, _rules(options.model, model, options.rules))
    clock = time.process_time if options.device == "cpu" and options.threads == 1 else time.perf_counter
    for _ in range(options.rounds):
        for row in rows:
            begin = clock()
            row.outputs = row.translate(texts, search, options.batch)
            row.seconds.append(clock() - begin)
    print(
        f"{len(texts)} texts of {options.split}, beam {options.beam}, batch {options.batch}, "
        f"{options.device}, {options.threads} thread(s); choose = {decoder_exits_config(model).choose}"
    )
    print(f"{'':>16} {'blocks':>7} {task.evaluate(examples, _answers(rows[0])).metric:>7} {'tokens/s':>9} {'ratio':>6}")
    results = []
    for row in rows:
        tokens = sum(map(len, tokenizer.encode_plain(row.outputs)))
        score, speed = task.evaluate(examples, _answers(row)).score, tokens / statistics.median(row.seconds)
        ratio = statistics.median(rows[0].seconds) / statistics.median(row.seconds)
        results.append(
            {"name": row.name, "blocks": row.mean_blocks(), "score": score, "tokens_per_second": speed, "ratio": ratio}
        )
        print(f"{row.name:>16} {row.mean_blocks():7.2f} {score:7.2f} {speed:9.1f} {ratio:6.2f}", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def _rules(folder: Path, model: Seq2Seq, which: str) -> list[DepthRule]:
    """Return the rules in result.json, or the model's own."""
    if which == "all" and (folder / "result.json").is_file():
        table = json.loads((folder / "result.json").read_text(encoding="utf-8"))["table"]
        return [DepthRule.parse(row["rule"], source="result.json") for row in table]
    own = decoder_exits_config(model).rule
    return [] if own is None else [own]


def _rows(model: Seq2Seq, rules: list[DepthRule]) -> list[Row]:
    depth = len(model.decoder.blocks)

    def translate(begin: Callable[[Memory], Steps] | None) -> Callable[[list[str], GenerationConfig, int], list[str]]:
        return lambda texts, search, batch: model.translate(texts, search, batch_size=batch, begin=begin)

    rows = [Row("all blocks", translate(None), lambda: float(depth))]
    for index, layer in enumerate(decoder_exits_config(model).layers):
        rows.append(Row(f"exit {layer} alone", translate(fixed_exit(model, index)), lambda layer=layer: float(layer)))
    for number, rule in enumerate(rules):
        runner = AdaptiveTranslator(model, rule)
        rows.append(
            Row(
                f"rule {number + 1}",
                lambda texts, search, batch, own=runner: own.translate(texts, search, batch_size=batch),
                lambda own=runner: float(own.mean_layers or depth),
            )
        )
    return rows


def _answers(row: Row) -> list[dict[str, str]]:
    return [{"answer": output} for output in row.outputs]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
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

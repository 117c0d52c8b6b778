"""8-bit translation on a CPU: BLEU, length ratio, size and sentences per second of every precision.

    python benchmarks/int8_translation.py FOLDER --data multi30k
    python benchmarks/int8_translation.py FOLDER --data multi30k --split test --texts 1000 --beam 4 --rounds 3

FOLDER is a fine-tuned translation model; one that learned with rounding keeps its ranges, and int8_static is then
calibrated on nothing. The length ratio (tokens written : tokens of the references) is printed because the end symbol is
what breaks first. Precisions alternate within a round, and speeds are medians over rounds.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from bertsmith.checkpoint.files import find_weights
from bertsmith.checkpoint.store import load
from bertsmith.engines.artefact import open_runner, write_artefact
from bertsmith.engines.base import Artefact, Precision
from bertsmith.engines.int8 import calibrate, float_inputs
from bertsmith.models.seq2seq import Seq2Seq
from bertsmith.tasks.data_source import task_splits
from bertsmith.tasks.predictor import read_task_record, sample_inputs
from bertsmith.tasks.translation import Translation, require_decoder

ROWS: dict[str, tuple[Precision, str]] = {
    "float32": ("float32", ""),
    "int8_weights": ("int8_weights", ""),
    "int8": ("int8", ""),
    "int8_static, mean-max": ("int8_static", "mean_max"),
    "int8_static, KL": ("int8_static", "kl"),
}


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    model, record = require_decoder(load(options.model)), read_task_record(options.model)
    task, splits = record.task, task_splits(options.data)
    assert isinstance(task, Translation)
    search = task.generation.changed(method="beam", beam=options.beam)
    examples = task.examples(splits.read(options.split))[: options.texts]
    samples = sample_inputs(model, record, splits.read("train"), rows=options.samples)
    texts, tokenizer = [example.text for example in examples], model.require_tokenizer()
    runners: dict[str, Seq2Seq] = {}
    sizes: dict[str, int] = {}
    for name, (precision, ranges) in ROWS.items():
        source = model
        if ranges and model.config.quantisation is None:
            source = require_decoder(calibrate(model, samples, "kl" if ranges == "kl" else "mean_max"))
            if float_inputs(source):
                print(f"{name}: inputs left in float32: {', '.join(float_inputs(source))}")
        elif ranges == "kl":
            continue  # the model has learned its ranges
        with tempfile.TemporaryDirectory() as made:
            write_artefact(source, Path(made), Artefact(engine="torch", precision=precision))
            sizes[name] = find_weights(Path(made)).stat().st_size
            runners[name] = require_decoder(open_runner(Path(made)))
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    outputs: dict[str, list[str]] = {}
    for _ in range(options.rounds):
        for name, runner in runners.items():
            begin = time.perf_counter()
            outputs[name] = runner.translate(texts, search, batch_size=options.batch)
            seconds[name].append(time.perf_counter() - begin)
    wanted = sum(map(len, tokenizer.encode_plain([task.gold(example) for example in examples])))
    sizing = f"beam {options.beam}, batch {options.batch}, {options.threads} thread(s)"
    print(f"{len(texts)} texts of {options.split}, {sizing}")
    print(f"{'':>22} {'score':>6} {'length':>7} {'MB':>6} {'texts/s':>8}")
    results = []
    for name, answers in outputs.items():
        score = task.evaluate(examples, [{"answer": answer} for answer in answers]).score
        ratio = sum(map(len, tokenizer.encode_plain(answers))) / wanted
        speed, size = len(texts) / statistics.median(seconds[name]), sizes[name] / 1e6
        results.append(
            {"name": name, "score": score, "length_ratio": ratio, "megabytes": size, "texts_per_second": speed}
        )
        print(f"{name:>22} {score:6.2f} {ratio:7.3f} {size:6.2f} {speed:8.1f}", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", required=True)
    parser.add_argument("--split", default="test")
    parser.add_argument("--texts", type=int, default=500)
    parser.add_argument("--samples", type=int, default=128, help="training pairs that calibrate int8_static")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--beam", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()

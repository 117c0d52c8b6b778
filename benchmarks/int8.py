"""Speed, size and score of every precision in eager PyTorch on a CPU, for one linear layer or for a model.

python benchmarks/int8.py                            # 384 → 1536, as in a small encoder, one thread
python benchmarks/int8.py --inputs 768 --outputs 3072 --threads 2
python benchmarks/int8.py --model FOLDER             # all layers of a model, by batch and length
python benchmarks/int8.py --model FOLDER --data DATA # file size and dev score in each precision
"""

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

from bertsmith import Model, Predictor, load
from bertsmith.data.examples import ExamplePlan, ExampleReader, TaskBatch
from bertsmith.engines.artefact import write_artefact
from bertsmith.engines.base import Artefact, Inputs
from bertsmith.engines.int8 import Int8Linear, int8_model
from bertsmith.engines.torch_engine import TorchEngine
from bertsmith.layers.linear import ElasticLinear
from bertsmith.tasks.data_source import task_splits
from bertsmith.tasks.predictor import read_task_record, write_task_record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", default=384, type=int)
    parser.add_argument("--outputs", default=1536, type=int)
    parser.add_argument("--tokens", nargs="+", default=[16, 128, 1024], type=int)
    parser.add_argument("--threads", default=1, type=int)
    parser.add_argument("--model")
    parser.add_argument("--data", help="task data of the fine-tuned --model")
    parser.add_argument("--shapes", nargs="+", default=["1x16", "1x128", "8x64"], help="batch x length, for --model")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.data:
        _measure_quality(Path(options.model), options.data)
        return
    if options.model:
        _measure_model(load(options.model), [tuple(map(int, shape.split("x"))) for shape in options.shapes])
        return
    layer = ElasticLinear(options.inputs, options.outputs)
    torch.nn.init.normal_(layer.weight, std=0.05)
    torch.nn.init.zeros_(layer.bias)
    ways = _ways(layer)
    print(f"median microseconds, {options.inputs} -> {options.outputs}, {options.threads} thread(s)")
    print(f"{'tokens':>7}" + "".join(f"{name:>18}" for name in ways))
    with torch.inference_mode():
        for tokens in options.tokens:
            hidden = torch.randn(tokens, options.inputs)
            print(f"{tokens:>7}" + "".join(f"{_median(way, hidden):>18.0f}" for way in ways.values()), flush=True)


def _measure_quality(folder: Path, data: str) -> None:
    model, kept, parts = load(folder), read_task_record(folder), task_splits(data)
    predictor = Predictor(model, kept)
    features = kept.task.features(kept.task.examples(parts.read("train")), predictor.encoding)
    reader = ExampleReader(features, kept.sequences, model.require_tokenizer().pad)
    plans = islice(ExamplePlan(features, kept.sequences, 32, seed=0).one_epoch(), 16)
    batches = [reader[plan].batch for plan in plans]
    samples = [Inputs(batch.tokens, batch.layout, batch.types) for batch in batches if isinstance(batch, TaskBatch)]
    print(f"{'precision':<14}{'file MB':>9}{'score':>9}")
    for precision in TorchEngine.precisions:
        with tempfile.TemporaryDirectory() as made:
            write_artefact(model, Path(made), Artefact(engine="torch", precision=precision), samples)
            write_task_record(kept, Path(made))
            size = (Path(made) / "model.safetensors").stat().st_size / 1e6
            score = Predictor.load(made).evaluate(parts.read("dev"))[0].score
        print(f"{precision:<14}{size:>9.1f}{score:>9.2f}", flush=True)


@torch.inference_mode()
def _measure_model(model: Model, shapes: list[tuple[int, ...]]) -> None:
    ways = {"float32": model, "bfloat16": copy.deepcopy(model).bfloat16()}
    ways |= {precision: int8_model(model, precision) for precision in ("int8_weights", "int8")}
    print("median milliseconds")
    print(f"{'batch':>7}{'length':>8}" + "".join(f"{name:>14}" for name in ways))
    for batch, length in shapes:
        ids = torch.randint(5, model.config.encoder.vocabulary, (batch, length))
        times = (_median(way, ids) / 1000 for way in ways.values())
        print(f"{batch:>7}{length:>8}" + "".join(f"{time_:>14.1f}" for time_ in times), flush=True)


def _ways(layer: ElasticLinear) -> dict[str, Callable[[Tensor], Tensor]]:
    half = layer.weight.detach().bfloat16(), layer.bias.detach().bfloat16()
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "float32": layer,
        "bfloat16": lambda hidden: linear(hidden.bfloat16(), *half),
        "int8_weights": Int8Linear(layer, "float"),
        "int8": Int8Linear(layer, "token"),
    }
    return ways


def _median(way: Callable[[Tensor], Tensor], hidden: Tensor) -> float:
    times = []
    for _ in range(60):
        begin = time.perf_counter()
        way(hidden)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[10:]) * 1e6


if __name__ == "__main__":
    main()

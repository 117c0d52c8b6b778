"""Model of the load test: random weights in an elastic model folder, and texts of many lengths."""

import statistics
import time
from pathlib import Path

import numpy as np
import torch

import bertsmith
from bertsmith.data.batch import packed
from bertsmith.layers.subnet import Subnet
from bertsmith.models.attach_heads import with_task_head
from bertsmith.models.model import Model
from bertsmith.shrinking.elastic_metadata import ElasticMetadata, SubnetworkMetadata, write_elastic_metadata
from bertsmith.tasks.predictor import TaskRecord, write_task_record
from bertsmith.text.learn import learn_tokenizer

SIZES = {"mini": (256, 4, 4), "minilm": (384, 6, 12), "base": (768, 12, 12)}  # width, layers, heads
GRID = ((1.0, 1.0), (0.75, 1.0), (0.5, 1.0), (0.5, 0.5), (0.25, 0.5))
LONGEST = 256
WORDS = ("iron", "river", "gate", "lantern", "clock", "smith", "harbour", "seven", "broken", "old")


def write_folder(folder: Path, size: str) -> None:
    """Write an elastic classifier with random weights. Its latencies are measured, its scores are invented."""
    width, layers, heads = SIZES[size]
    config = bertsmith.preset("bert-base", width=width, layers=layers, heads=heads, max_length=LONGEST)
    model = bertsmith.build(config, seed=0)
    model.tokenizer = learn_tokenizer([" ".join(WORDS)] * 8, "wordpiece", 120, progress=False)
    task = {"kind": "classification", "text": "text", "label": "label", "labels": ["a", "b", "c"]}
    kept = TaskRecord.parse({"task": task, "sequences": {"length": LONGEST}})
    model = with_task_head(model, kept.task.head(model.config), seed=0).eval()
    with torch.no_grad():  # make the outputs of different texts differ
        model.task_head.get_parameter(_last_matrix(model)).normal_(generator=torch.Generator().manual_seed(1))
    bertsmith.save(model, folder)
    write_task_record(kept, folder)
    write_elastic_metadata(_record(model), folder)


def _last_matrix(model: Model) -> str:
    return [name for name, parameter in model.task_head.named_parameters() if parameter.dim() == 2][-1]


def _record(model: Model) -> ElasticMetadata:
    """Return the grid with the latencies of extracted networks at 64 tokens."""
    members = []
    for position, (width, depth) in enumerate(GRID):
        small = bertsmith.extract(model, Subnet(width=width, depth=depth))
        metrics = {"parameters": sum(parameter.numel() for parameter in small.parameters()), "flops": 1.0}
        members.append(
            SubnetworkMetadata(width=width, depth=depth, score=90.0 - position, latency_ms=_latency(small), **metrics)
        )
    return ElasticMetadata(
        metric="accuracy",
        teacher_score=90.0,
        depth_rule="keep_last",
        length=64,
        grid=tuple(members),
        head_scores=(),
        head_order=(),
        neuron_order=(),
    )


@torch.inference_mode()
def _latency(model: Model) -> float:
    tokens, layout = packed([np.arange(5, 69)], 0)
    times = []
    for _ in range(8):
        begin = time.perf_counter()
        model.outputs(tokens, layout)
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[2:])


def make_texts(count: int, median: float, seed: int = 0) -> list[str]:
    """Return texts of one-token words: a long-tailed mix of 4 to 256 tokens, including special tokens."""
    random = np.random.default_rng(seed)
    lengths = np.clip(np.exp(random.normal(np.log(median), 0.9, size=count)), 4, LONGEST).astype(int)
    return [" ".join(random.choice(WORDS, size=length - 2)) for length in lengths]

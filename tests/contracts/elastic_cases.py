"""Elastic models of every family with task heads, batches for them, and random sub-networks."""

from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
from cases import FAMILIES, SEQ2SEQ, packed_layout, padded_layout, rows_of, tiny_model
from torch import Tensor

from bertsmith.answers.sequences import IGNORED
from bertsmith.data.examples import TaskBatch
from bertsmith.layers.elementwise import NormConfig
from bertsmith.layers.subnet import LayerCut, Subnet
from bertsmith.models.attach_heads import with_task_head
from bertsmith.models.heads import HeadConfig
from bertsmith.models.heads.task import ClassifierConfig, HiddenLayerConfig, SpansConfig, TaggerConfig
from bertsmith.models.model import Model
from bertsmith.objectives.base import Objective
from bertsmith.objectives.supervised import Classes, Spans, Supervised, Tags, Values
from bertsmith.training.meter import Meter
from bertsmith.training.optimizer import OptimizerConfig, ScheduleConfig
from bertsmith.training.phases import ExamplePhase
from bertsmith.training.run_config import Method, RunConfig
from bertsmith.training.step import TrainStep

# without the encoder-decoder, which has no task head, and generators, which differ from their families in size only
ENCODERS = [name for name in FAMILIES if name not in SEQ2SEQ and not name.endswith("-generator")]
LENGTHS = (7, 1, 4, 6)
LABELS = ("a", "b", "c")

NORMED = HiddenLayerConfig(has_bias=False, norm=NormConfig(epsilon=1e-5, has_bias=False), drops_input=False)
"""The hidden layer of ModernBERT's task classes."""

HEADS: dict[str, tuple[HeadConfig, Supervised]] = {
    "classification": (ClassifierConfig(labels=LABELS, dropout=0.0), Classes()),
    "regression": (ClassifierConfig(labels=("value",), dropout=0.0, pooling="mean"), Values()),
    "tagging": (TaggerConfig(labels=LABELS, dropout=0.0), Tags()),
    "spans": (SpansConfig(), Spans()),
    "classification after a normed layer": (
        ClassifierConfig(labels=LABELS, dropout=0.0, pooling="mean", hidden=NORMED),
        Classes(),
    ),
    "tagging after a normed layer": (TaggerConfig(labels=LABELS, dropout=0.0, hidden=NORMED), Tags()),
    "spans after a normed layer": (SpansConfig(hidden=NORMED), Spans()),
}


def elastic_model(name: str, task: str = "classification", seed: int = 0, layers: int = 3) -> Model:
    """Build a tiny model of a family with a task head, in float64, without dropout."""
    head, _ = HEADS[task]
    model = with_task_head(tiny_model(name, seed, layers), head, seed=seed).double().eval()
    with torch.no_grad():
        for parameter in model.task_head.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed + 2)) * 0.3)
    return model


def task_batch(layout: str = "packed", lengths: Sequence[int] = LENGTHS, first: int = 0) -> TaskBatch:
    """Build a batch with targets of every task; a sequence with the same number is the same in every batch."""
    draws = [torch.Generator().manual_seed(first + position) for position in range(len(lengths))]
    texts = [torch.randint(1, 50, (length,), generator=draw) for length, draw in zip(lengths, draws, strict=True)]
    tags = [torch.randint(-1, 3, (length,), generator=draw) for length, draw in zip(lengths, draws, strict=True)]
    tags = [torch.where(tag < 0, IGNORED, tag) for tag in tags]
    numbers = torch.arange(first, first + len(lengths))
    is_packed = layout == "packed"

    def join(rows: list[Tensor], padding: int) -> Tensor:
        return torch.cat(rows) if is_packed else rows_of(rows, extra=2, padding=padding)

    return TaskBatch(
        tokens=join(texts, 0),
        layout=packed_layout(list(lengths)) if is_packed else padded_layout(list(lengths), extra=2),
        types=None,
        item=numbers,
        targets={
            "label": numbers % 3,
            "value": numbers.double() - 1.5,
            "tags": join(tags, IGNORED),
            "start": torch.zeros(len(lengths), dtype=torch.long),
            "end": torch.tensor([length - 1 for length in lengths]),
        },
        real_tokens=sum(lengths),
    )


def random_subnet(units: Sequence[LayerCut], draw: Random) -> Subnet:
    """Draw a sub-network with some of the layers and different heads and neurons in each."""
    layers = tuple(sorted(draw.sample(range(len(units)), draw.randint(1, len(units)))))
    heads = tuple(draw.randint(1, units[index].heads) for index in layers)
    groups = [units[index].groups for index in layers]
    neurons = tuple(
        draw.randint(1, units[index].neurons // count) * count for index, count in zip(layers, groups, strict=True)
    )
    return Subnet(layers=layers, heads=heads, neurons=neurons)


def step_gradients(
    model: Model, objective: Objective, batches: Sequence[TaskBatch], out: Path, seed: int = 0
) -> dict[str, Tensor]:
    """Return the gradients of one optimiser step of the trainer."""
    optimizer = OptimizerConfig(learning_rate=1e-3, clip=0.0)
    method = Method(RunConfig(steps=1), optimizer, ScheduleConfig(), (ExamplePhase(0.0, 16, len(batches), 1),))
    engine = TrainStep(model, objective, method, out, device="cpu")
    gradients: dict[str, Tensor] = {}

    def step() -> None:
        gradients.update({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})

    engine.optimizer.step = step  # type: ignore[method-assign]
    prepared = [engine.objective.prepare(batch, seed) for batch in batches]
    engine.learn(
        prepared, [(position,) for position in range(len(batches))], 1e-3, Meter(objective.terms, engine.device)
    )
    return gradients

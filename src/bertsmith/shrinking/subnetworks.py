"""Scores and costs of the sub-networks of an elastic model."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import torch

from bertsmith.answers.sequences import Features
from bertsmith.data.examples import ExampleConfig
from bertsmith.data.layout import SequenceLayout
from bertsmith.layers.subnet import Subnet
from bertsmith.models.build import extract
from bertsmith.models.cost import parameters
from bertsmith.models.model import Model
from bertsmith.objectives.supervised import Supervised
from bertsmith.tasks.base import Evaluation, Task
from bertsmith.training.evaluator import Evaluator, MeanLoss
from bertsmith.training.log import LogRow
from bertsmith.training.step import TrainStep

TIMED_ROUNDS = 21
MAX_SECONDS = 10.0  # for all sub-networks together, after at least 4 rounds


@dataclass(frozen=True)
class SubnetScore:
    """Evaluation and loss of a sub-network."""

    subnet: Subnet
    evaluation: Evaluation
    loss: float


class GridEvaluator(Evaluator):
    """Evaluate every sub-network of a grid on dev; they are extracted, which is faster than running them in place."""

    def __init__(
        self,
        task: Task[Any],
        examples: Sequence[Any],
        features: Features,
        sequences: ExampleConfig,
        objective: Supervised,
        subnets: Sequence[Subnet],
    ) -> None:
        super().__init__(task, examples, features, sequences, objective)
        self.subnets = subnets

    def __call__(self, step: TrainStep) -> LogRow:
        """Return the log row of an evaluation; its score is the mean over all sub-networks."""
        with step.accelerator.autocast():
            scores = self.evaluate_grid(step.model)
        row: LogRow = {
            "loss": fmean(score.loss for score in scores),
            "metric": scores[0].evaluation.metric,
            "score": fmean(score.evaluation.score for score in scores),
        }
        return row | {subnet_name(score.subnet): score.evaluation.score for score in scores}

    @torch.no_grad()
    def evaluate_grid(self, model: Model) -> list[SubnetScore]:
        """Score every sub-network of a model."""
        scores = []
        for subnet in self.subnets:
            small = extract(model, subnet)
            loss = MeanLoss(self.objective.for_model(small))
            scores.append(SubnetScore(subnet, self.evaluate(small, loss), loss.value))
        return scores


def subnet_name(subnet: Subnet) -> str:
    """Name of a sub-network in logs and tables.

    >>> subnet_name(Subnet(width=0.5, depth=0.75))
    'width 0.5 depth 0.75'
    """
    return f"width {subnet.width:g} depth {subnet.depth:g}"


@dataclass(frozen=True)
class SubnetCost:
    """Size and speed of a sub-network."""

    parameters: int
    flops: float
    latency_ms: float


@torch.inference_mode()
def subnet_costs(model: Model, subnets: Sequence[Subnet], length: int) -> list[SubnetCost]:
    """Count parameters and FLOP and time one sequence; sub-networks take turns, so that noise affects all alike."""
    with model.evaluating():
        extracted = [extract(model, subnet) for subnet in subnets]
    tokens = torch.zeros(1, length, dtype=torch.long, device=model.device)
    layout = SequenceLayout.full(1, length)
    types = tokens if model.config.encoder.embedding.types else None
    times: list[list[float]] = [[] for _ in extracted]
    start = time.perf_counter()
    for turn in range(TIMED_ROUNDS + 1):
        for small, latencies in zip(extracted, times, strict=True):
            begin = time.perf_counter()
            small.outputs(tokens, layout, types)
            if model.device.type == "cuda":
                torch.cuda.synchronize()
            if turn:  # the first turn is a warm-up
                latencies.append(1000 * (time.perf_counter() - begin))
        if turn > 3 and time.perf_counter() - start > MAX_SECONDS:
            break
    return [
        SubnetCost(parameters(small.config), float(small.config.encoder.flops(length)) * length, median(latencies))
        for small, latencies in zip(extracted, times, strict=True)
    ]

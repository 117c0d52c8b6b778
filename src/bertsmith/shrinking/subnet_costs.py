"""What the sub-networks of an elastic model cost: parameters, operations and latency, side by side."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from bertsmith.data.layout import SequenceLayout
from bertsmith.layers.subnet import Subnet
from bertsmith.models.build import extract
from bertsmith.models.cost import parameters
from bertsmith.models.model import Model

_ROUNDS = 21
_SECONDS = 10.0  # for all sub-networks together, once each was timed a few times


@dataclass(frozen=True)
class Cost:
    """What one sub-network costs."""

    parameters: int
    flops: float
    latency_ms: float


@torch.inference_mode()
def member_costs(model: Model, subnets: Sequence[Subnet], length: int) -> list[Cost]:
    """The costs of sub-networks for one sequence of a length, timed in turns so that noise hits all of them alike."""
    with model.evaluating():
        members = [extract(model, subnet) for subnet in subnets]
    tokens = torch.zeros(1, length, dtype=torch.long, device=model.device)
    layout = SequenceLayout.full(1, length)
    types = tokens if model.config.encoder.embedding.types else None
    times: list[list[float]] = [[] for _ in members]
    begin = time.perf_counter()
    for turn in range(_ROUNDS + 1):
        for member, own in zip(members, times, strict=True):
            started = time.perf_counter()
            member.outputs(tokens, layout, types)
            if model.device.type == "cuda":
                torch.cuda.synchronize()
            if turn:  # the first turn warms up
                own.append(1000 * (time.perf_counter() - started))
        if turn > 3 and time.perf_counter() - begin > _SECONDS:
            break
    return [
        Cost(parameters(member.config), float(member.config.encoder.flops(length)) * length, median(own))
        for member, own in zip(members, times, strict=True)
    ]

"""elastic.json: what the folder of an elastic model says of its sub-networks."""

from pathlib import Path
from typing import Literal

from bertsmith.checkpoint.files import read_json, write_json
from bertsmith.errors import InputError
from bertsmith.layers.subnet import Subnet
from bertsmith.settings import Record

ELASTIC_FILE = "elastic.json"


class MemberFigures(Record):
    """A sub-network of the grid and what is known of it."""

    width: float
    depth: float
    score: float
    """On dev, by the task's main figure."""
    parameters: int
    flops: float
    """Of the forward pass of one sequence of the record's length."""
    latency_ms: float
    """The median over such sequences, one at a time, in PyTorch on the CPU of the machine of the training."""


class ElasticRecord(Record):
    """The sub-networks of an elastic model, and where its units stood in the model it was made from."""

    metric: str
    teacher_score: float
    """Of the fine-tuned model, on dev."""
    depth_rule: Literal["keep_last", "drop_last"]
    length: int
    """Of the sequences that operations and latencies are given for."""
    grid: tuple[MemberFigures, ...]
    head_scores: tuple[tuple[float, ...], ...]
    """The importance of the heads of every layer, by their numbers before rewiring."""
    head_order: tuple[tuple[int, ...], ...]
    """The number each head had before rewiring, in the order they stand in now."""
    neuron_order: tuple[tuple[int, ...], ...]

    @property
    def subnets(self) -> tuple[Subnet, ...]:
        """The sub-networks that were trained."""
        return tuple(Subnet(width=member.width, depth=member.depth, depth_rule=self.depth_rule) for member in self.grid)


def write_record(record: ElasticRecord, folder: Path) -> None:
    """Puts the record beside an elastic model."""
    write_json(folder / ELASTIC_FILE, record.plain())


def read_record(folder: Path) -> ElasticRecord:
    """The record of the elastic model in a folder."""
    path = folder / ELASTIC_FILE
    if not path.is_file():
        raise InputError(f"{str(folder)!r} has no {ELASTIC_FILE}, so its model is not elastic; use bertsmith shrink")
    return ElasticRecord.parse(read_json(path), source=str(path))

"""elastic.json: scores and costs of the sub-networks of an elastic model."""

from pathlib import Path
from typing import Literal

from bertsmith.checkpoint.files import read_json, write_json
from bertsmith.errors import InputError
from bertsmith.layers.subnet import Subnet
from bertsmith.settings import Record

ELASTIC_FILE = "elastic.json"


class SubnetworkRecord(Record):
    """A sub-network of the grid with its score and costs."""

    width: float
    depth: float
    score: float
    """Main metric of the task on dev."""
    parameters: int
    flops: float
    """Of the forward pass of one sequence of `length` tokens."""
    latency_ms: float
    """Median for such sequences, one at a time, in PyTorch on the CPU of the training machine."""


class ElasticRecord(Record):
    """The sub-networks of an elastic model, and the order of its units in the fine-tuned model."""

    metric: str
    teacher_score: float
    """Score of the fine-tuned model on dev."""
    depth_rule: Literal["keep_last", "drop_last"]
    length: int
    """Tokens of the sequences that operations and latencies are given for."""
    grid: tuple[SubnetworkRecord, ...]
    head_scores: tuple[tuple[float, ...], ...]
    """Importance of the heads of every layer, by their indices before rewiring."""
    head_order: tuple[tuple[int, ...], ...]
    """Index of each head before rewiring, in the present order."""
    neuron_order: tuple[tuple[int, ...], ...]

    @property
    def subnets(self) -> tuple[Subnet, ...]:
        """The sub-networks that were trained."""
        return tuple(Subnet(width=own.width, depth=own.depth, depth_rule=self.depth_rule) for own in self.grid)


def write_record(record: ElasticRecord, folder: Path) -> None:
    """Write elastic.json beside an elastic model."""
    write_json(folder / ELASTIC_FILE, record.plain())


def read_record(folder: Path) -> ElasticRecord:
    """Read elastic.json from the folder of an elastic model."""
    path = folder / ELASTIC_FILE
    if not path.is_file():
        raise InputError(f"{str(folder)!r} has no {ELASTIC_FILE}, so its model is not elastic; use bertsmith shrink")
    return ElasticRecord.parse(read_json(path), source=str(path))

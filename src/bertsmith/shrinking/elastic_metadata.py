"""elastic.json: scores and costs of the sub-networks of an elastic model."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AllowInfNan, Field

from bertsmith.errors import InputError
from bertsmith.files import read_json, write_json
from bertsmith.layers.subnet import Subnet
from bertsmith.settings import Record

ELASTIC_FILE = "elastic.json"
Score = Annotated[float, AllowInfNan(True)]
"""A score, NaN if it is undefined, such as the correlation of a constant prediction."""


class SubnetworkMetadata(Record):
    """A sub-network of the grid with its score and costs."""

    width: float = Field(gt=0, le=1)
    depth: float = Field(gt=0, le=1)
    score: Score
    """Main metric of the task on dev."""
    parameters: int
    flops: float
    """FLOP of a forward pass over one sequence of `length` tokens."""
    latency_ms: float
    """Median latency of such a sequence at batch size 1, in PyTorch on the CPU of the training machine."""


class ElasticMetadata(Record):
    """The sub-networks of an elastic model, and the order of its units in the fine-tuned model."""

    metric: str
    teacher_score: Score
    """Score of the fine-tuned model on dev."""
    depth_rule: Literal["keep_last", "drop_last"]
    length: int
    """Sequence length in tokens for `flops` and `latency_ms`."""
    grid: tuple[SubnetworkMetadata, ...]
    head_scores: tuple[tuple[Score, ...], ...]
    """Importance of the heads of every layer, by their indices before rewiring."""
    head_order: tuple[tuple[int, ...], ...]
    """Index of each head before rewiring, in the order after rewiring."""
    neuron_order: tuple[tuple[int, ...], ...]

    @property
    def subnets(self) -> tuple[Subnet, ...]:
        """The sub-networks that were trained."""
        return tuple(Subnet(width=one.width, depth=one.depth, depth_rule=self.depth_rule) for one in self.grid)


def write_elastic_metadata(record: ElasticMetadata, folder: Path) -> None:
    """Write elastic.json beside an elastic model."""
    write_json(folder / ELASTIC_FILE, record.plain())


def read_elastic_metadata(folder: Path) -> ElasticMetadata:
    """Read elastic.json from the folder of an elastic model."""
    path = folder / ELASTIC_FILE
    if not path.is_file():
        raise InputError(
            f"{str(folder)!r} has no {ELASTIC_FILE}, so its model is not elastic; make it so with bertsmith shrink"
        )
    return ElasticMetadata.parse(read_json(path), source=str(path))

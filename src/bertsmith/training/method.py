"""How a run is carried out and how weights are moved, as settings."""

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from bertsmith.models.config import ModelConfig
from bertsmith.models.cost import parameters, training_flops
from bertsmith.settings import Record
from bertsmith.training.hardware import device_type
from bertsmith.training.optimizer import BatchConfig, OptimizerConfig, ScheduleConfig


class RunConfig(Record):
    """How long a run takes and how it is carried out."""

    steps: int = Field(default=1000, gt=0)
    seed: int = Field(default=0, ge=0, lt=2**62)
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the matrix products; "auto" is bfloat16 on a GPU and float32 elsewhere. Weights stay float32."""
    compile: Literal["off", "on", "graphs"] = "off"
    """torch.compile the forward and backward pass; "graphs" also replays them as CUDA graphs, for GPUs."""
    workers: int = Field(default=0, ge=0)
    """Processes that read batches."""
    log_every: int = Field(default=10, gt=0)
    evaluate_every: int = Field(default=500, gt=0)
    evaluate_batches: int = Field(default=16, gt=0)
    """Micro-batches of the held-out part that an evaluation reads."""
    checkpoint_every: int = Field(default=500, gt=0)
    average_last: int = Field(default=1, ge=1)
    """The model at the end is the mean of the weights of the last so many checkpoints."""
    track: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Trackers that get the log, too."""

    def is_half(self, device: str) -> bool:
        """Whether the matrix products are in bfloat16 on a device asked for as "auto", "cpu" or "cuda"."""
        if self.precision == "auto":
            return device_type(device) == "cuda"
        return self.precision == "bfloat16"


@dataclass(frozen=True)
class Method:
    """How weights are moved."""

    run: RunConfig
    batch: BatchConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        return self.optimizer.learning_rate * self.schedule.factor(step, self.run.steps)

    def costs(
        self, config: ModelConfig, length: int, targets_per_token: float, micro_tokens: int, passes: int = 1
    ) -> dict[str, str]:
        """What training a network on sequences of a length takes on one device, as names and values to print."""
        flops, steps = passes * training_flops(config, length, targets_per_token), self.run.steps
        tokens = sum(self.batch.micro_batches(step, steps, micro_tokens, 1) * micro_tokens for step in range(steps))
        return {
            "parameters": f"{parameters(config):,}",
            "training FLOPs per token": f"{flops:.3e}",
            "tokens": f"{tokens:,} in {steps:,} steps",
            "training FLOPs in all": f"{flops * tokens:.3e}",
        }

"""Size and costs of a finished training, for the results of runs."""

from dataclasses import dataclass

from bertsmith.models.cost import parameters_by_part
from bertsmith.training.trainer import Trainer


@dataclass(frozen=True)
class Notice:
    """A warning in the log of a run, at a step."""

    step: int
    text: str


@dataclass(frozen=True, kw_only=True)
class TrainingSummary:
    """Size and costs of a finished training."""

    steps: int
    processes: int
    threads: int | None
    """CPU threads of each process, on which the last bits of the weights depend; None on a GPU."""
    parameters: int
    generator_parameters: int | None
    tokens: int
    training_flops: float
    seconds: float
    tokens_per_second: float
    training_loss: float
    notices: tuple[Notice, ...]


def summarise_training(trainer: Trainer) -> TrainingSummary:
    """Return size and costs of a finished training."""
    progress, counts = trainer.progress, parameters_by_part(trainer.model.config)
    return TrainingSummary(
        steps=progress.step,
        processes=trainer.processes,
        threads=trainer.threads,
        parameters=counts["parameters"],
        generator_parameters=counts.get("generator_parameters"),
        tokens=progress.tokens,
        training_flops=progress.flops,
        seconds=round(progress.seconds, 1),
        tokens_per_second=round(progress.tokens / max(progress.seconds, 1e-9), 1),
        training_loss=trainer.log.of_kind("training")[-1]["loss"],
        notices=tuple(Notice(row["step"], row["text"]) for row in trainer.log.of_kind("notice")),
    )

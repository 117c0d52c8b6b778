"""Branches of a run: decay the learning rate from any checkpoint, so that one long run gives several final models."""

from pathlib import Path
from typing import TYPE_CHECKING

from bertsmith.errors import InputError
from bertsmith.files import read_json
from bertsmith.training.budget import Budget
from bertsmith.training.checkpoint import check_complete
from bertsmith.training.phases import borders

if TYPE_CHECKING:
    from bertsmith.training.pretraining import PretrainSettings


def branch_step(checkpoint: Path) -> int:
    """Return the step of a checkpoint; raise InputError if it is not complete."""
    if not (checkpoint / "progress.json").is_file():
        raise InputError(f"branch {str(checkpoint)!r} is not a checkpoint of a run; allowed: RUN/checkpoints/step-…")
    check_complete(checkpoint)
    return int(read_json(checkpoint / "progress.json")["step"])


def check_branch(settings: "PretrainSettings") -> None:
    """Raise InputError if the run cannot start from the checkpoint that the settings name."""
    if settings.branch is None:
        return
    step = branch_step(Path(settings.branch))
    if step >= settings.run.steps:
        raise InputError(f"run.steps is {settings.run.steps}; the branch starts after step {step} already")


def branch_settings(settings: "PretrainSettings", checkpoint: Path, decay: str) -> "PretrainSettings":
    """Return the settings of a run that continues from a checkpoint with the decay only.

    Warm-up, ramp and phases keep their steps: their shares are recomputed for the new number of steps. Without `branch`
    the same settings describe an uninterrupted run with the same result.
    """
    schedule, batch, old = settings.schedule, settings.batch, settings.run.steps
    step = branch_step(checkpoint)
    if schedule.kind not in ("wsd", "constant"):
        raise InputError(
            f"branch: the run's schedule.kind is {schedule.kind!r}, whose rate falls throughout; allowed: wsd, constant"
        )
    warmup = round(schedule.warmup * old)
    last = old - round(schedule.decay * old) if schedule.kind == "wsd" else old
    if not warmup <= step <= last:
        raise InputError(
            f"branch: {checkpoint.name} is not in the constant part of the schedule; allowed: steps {warmup} to {last}"
        )
    count = decay_steps(settings, decay, step)
    steps = step + count
    ramp = batch.ramp * old / steps if batch.ramp_from is not None else batch.ramp
    if ramp > 1:
        raise InputError(
            f"branch: the batch grows until step {round(batch.ramp * old)}, and the branch ends at {steps}; "
            "give a later checkpoint or a longer decay"
        )
    begins = borders(settings.method.phases, old)[1:-1]
    phases = [
        phase.changed(begin=begin / steps)
        for phase, begin in zip(settings.phases, begins, strict=True)
        if begin < steps
    ]
    return settings.changed(
        branch=str(checkpoint),
        phases=tuple(phases),
        batch=batch.changed(ramp=ramp),
        schedule=schedule.changed(kind="wsd", warmup=warmup / steps, decay=count / steps),
        run=settings.run.changed(steps=steps),
    )


def decay_steps(settings: "PretrainSettings", decay: str, step: int) -> int:
    """Return the steps of a decay after a step, given as "500", "20%" (of the resulting run) or "50M tokens"."""
    text = decay.strip()
    if text.isdecimal() and int(text):
        return int(text)
    if text.endswith("%") and text[:-1].strip().isdecimal() and 0 < (share := int(text[:-1]) / 100) < 1:
        return max(1, round(step * share / (1 - share)))
    try:
        budget = Budget.parse(text)
    except InputError:
        budget = None
    if budget is None or budget.kind != "tokens":
        raise InputError(f'--decay is {decay!r}; allowed: steps, a share or tokens, such as 500, 20% or "50M tokens"')
    # after a ramp the batch has its full size
    return max(1, int(budget.amount / settings.all_phases[settings.method.phase(step)].batch.tokens))

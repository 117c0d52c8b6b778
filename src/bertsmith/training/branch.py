"""A run that leaves another one at a checkpoint and brings its learning rate down: one long run, many finished ones."""

from pathlib import Path
from typing import TYPE_CHECKING

from bertsmith.checkpoint.files import read_json
from bertsmith.errors import InputError
from bertsmith.training.budget import Budget
from bertsmith.training.checkpoint import check_whole
from bertsmith.training.phases import borders

if TYPE_CHECKING:
    from bertsmith.training.pretraining import PretrainSettings


def branch_step(checkpoint: Path) -> int:
    """The steps a checkpoint has behind it, after making sure that it is whole."""
    if not (checkpoint / "progress.json").is_file():
        raise InputError(f"branch {str(checkpoint)!r} is no checkpoint of a run; allowed: RUN/checkpoints/step-…")
    check_whole(checkpoint)
    return int(read_json(checkpoint / "progress.json")["step"])


def check_branch(settings: "PretrainSettings") -> None:
    """Raises a sentence if the settings name a checkpoint that the run cannot begin from."""
    if settings.branch is None:
        return
    step = branch_step(Path(settings.branch))
    if step >= settings.run.steps:
        raise InputError(f"run.steps is {settings.run.steps}; the branch begins after step {step} already")


def branch_settings(settings: "PretrainSettings", checkpoint: Path, decay: str) -> "PretrainSettings":
    """The settings of a run that goes on from a checkpoint of the given ones, with the decay only.

    Warm-up, ramp and phases keep their steps: their shares are taken anew of the number of steps. Without `branch` the
    same settings are the straight run that the branch equals.
    """
    schedule, batch, old = settings.schedule, settings.batch, settings.run.steps
    step = branch_step(checkpoint)
    if schedule.kind not in ("wsd", "constant"):
        raise InputError(
            f"branch: the run's schedule.kind is {schedule.kind!r}, whose rate falls all the time; "
            "allowed: wsd, constant"
        )
    warmup = round(schedule.warmup * old)
    last = old - round(schedule.decay * old) if schedule.kind == "wsd" else old
    if not warmup <= step <= last:
        raise InputError(
            f"branch: {checkpoint.name} is not on the level part of the schedule; allowed: steps {warmup} to {last}"
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
    """The steps of a decay after a step, from "500", "20%" (of the whole run then) or "50M tokens"."""
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
    # the batch is at its full size after a ramp
    return max(1, int(budget.amount / settings.all_phases[settings.method.phase(step)].batch.tokens))

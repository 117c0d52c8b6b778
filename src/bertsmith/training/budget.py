"""How long a run may be: in seconds, in tokens or in operations, instead of in steps."""

import math
import os
import re
import shutil
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import torch
from accelerate.utils import broadcast_object_list

from bertsmith.errors import InputError
from bertsmith.training.checkpoint import Progress
from bertsmith.training.interrupts import StopRequest
from bertsmith.training.phases import TokenPhase, borders, timetable
from bertsmith.training.run_config import Method

if TYPE_CHECKING:
    from bertsmith.training.feed import Feed
    from bertsmith.training.run_config import Method
    from bertsmith.training.trainer import Trainer

MOST_STEPS = 2**30

_FORM = re.compile(r"\s*(\d[\d_,]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([kKMBT]?)\s*([A-Za-z]*)\s*")
_SCALES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_UNITS: dict[str, tuple[Literal["seconds", "tokens", "flops"], float]] = {
    **dict.fromkeys(("s", "sec", "second", "seconds"), ("seconds", 1.0)),
    **dict.fromkeys(("min", "minute", "minutes"), ("seconds", 60.0)),
    **dict.fromkeys(("h", "hour", "hours"), ("seconds", 3600.0)),
    **dict.fromkeys(("token", "tokens"), ("tokens", 1.0)),
    **dict.fromkeys(("flop", "flops"), ("flops", 1.0)),
}


@dataclass(frozen=True)
class Budget:
    """An amount of seconds, tokens or floating-point operations, and the words it was given in."""

    kind: Literal["seconds", "tokens", "flops"]
    amount: float
    text: str

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """The budget that words such as "10min" or "300M tokens" name.

        >>> Budget.parse("1.5h").amount, Budget.parse("300M").kind
        (5400.0, 'tokens')
        """
        match = _FORM.fullmatch(text)
        number, scale, unit = match.groups() if match else ("0", "", "")
        unit = "tokens" if scale and not unit else unit.lower()
        kind, size = _UNITS.get(unit, ("tokens", 0.0))
        amount = float(re.sub("[_,]", "", number)) * _SCALES[scale] * size
        if not 0 < amount < float("inf") or (kind == "seconds" and scale):
            raise InputError(
                f"the budget is {text!r}; allowed: a time, tokens or operations, "
                'such as 90s, 10min, 2h, 300M, "1.5B tokens" or "1e18 flops"'
            )
        return cls(kind, amount, text.strip())

    @property
    def explanation(self) -> str:
        """What it means for the figures of a run that has not begun."""
        if self.kind == "seconds":
            return (
                f"{self.text}: the run measures its first steps and sets run.steps by them; above, those of the recipe"
            )
        return f"{self.text}: sets run.steps"


def steps_within(method: Method, budget: Budget, flops_per_token: Sequence[float] = ()) -> int:
    """The most steps of a run within a budget of tokens or operations, ramp and phases counted in.

    Tokens are counted as `batch.tokens` counts them, pads included. A budget of operations needs those of a token in
    each phase.
    """
    if budget.kind == "seconds":
        raise InputError(f"the budget {budget.text!r} is a time, which has to be measured; allowed: tokens, operations")
    prices = flops_per_token if budget.kind == "flops" else [1.0] * len(method.phases)

    def cost(steps: int) -> float:
        return sum(tokens * price for tokens, price in zip(method.with_steps(steps).tokens(), prices, strict=True))

    return most_steps(cost, budget)


def most_steps(cost: Callable[[int], float], budget: Budget) -> int:
    """The most steps that cost no more than a budget; more steps cost more."""
    high = 1
    while cost(high) <= budget.amount:
        high *= 2
        if high > MOST_STEPS:
            raise InputError(f"the budget {budget.text!r} is more than {MOST_STEPS:,} steps; give less")
    # half of `high` is affordable; the place of the first of the steps 1, 2, … that is not
    steps = bisect_right(range(1, high), budget.amount, lo=high // 2, key=cost)
    if not steps:
        raise InputError(f"the budget {budget.text!r} is less than one step takes; give more, or lower batch.tokens")
    return steps


RESERVE = 0.03  # of the time, for what a measurement cannot foresee
MEASURED = 30  # steps of one kind at most …
SHARE = 0.05  # … and not more than this share of the time for all kinds
WARM_UP = 3  # steps that are not counted: they compile, and capture graphs
FRAME = 1_000_000  # steps of the run that is imagined, enough for every phase to have some


@dataclass(frozen=True)
class Pace:
    """How long the parts of a run take, in seconds."""

    steps: tuple[dict[int, float], ...]
    """Of each phase, a step with so many micro-batches: the fewest and the most that the phase has."""
    evaluation: float
    checkpoint: float
    tokens_per_second: float
    """Of the first phase with a full batch, pads counted in."""

    def seconds(self, method: "Method", processes: int) -> float:
        """How long a whole run takes."""
        run, total = method.run, 0.0
        for known, counts in zip(self.steps, timetable(method.phases, run.steps, processes), strict=True):
            total += sum(_between(known, count) * steps for count, steps in counts.items())
        stops, often = [run.evaluate_every, run.checkpoint_every], math.lcm(run.evaluate_every, run.checkpoint_every)
        evaluations = -(-run.steps // run.evaluate_every)
        # an evaluation may be the best so far, which is saved; the model is written once more at the end
        checkpoints = sum(run.steps // every for every in stops) - run.steps // often + 2
        return total + evaluations * self.evaluation + checkpoints * self.checkpoint


def calibrate(trainer: "Trainer", seconds: float) -> int:
    """The steps of a run that takes so many seconds, this measurement counted in; the trainer is left as it was."""
    begin = time.perf_counter()
    pace = measure_pace(trainer, seconds)
    return steps_at(pace, trainer, seconds, spent=time.perf_counter() - begin)


def steps_at(pace: Pace, trainer: "Trainer", seconds: float, *, spent: float) -> int:
    """The steps that fit into a time of which some is spent; every process gets the main one's answer."""
    answer: int | InputError = 0
    if trainer.engine.is_main:
        try:
            answer = _steps_at(pace, trainer, seconds, spent)
        except InputError as error:
            answer = error
    answer = broadcast_object_list([answer])[0]
    if isinstance(answer, InputError):
        raise answer
    return answer


def _steps_at(pace: Pace, trainer: "Trainer", seconds: float, spent: float) -> int:
    left = (1 - RESERVE) * seconds - spent
    if left <= 0:
        raise InputError(
            f"the budget of {seconds:g} s is spent: {spent:.0f} s went into the start and into measuring how long a "
            "step takes; give more"
        )
    method, budget = trainer.method, Budget("seconds", left, f"{seconds:g}s")
    return most_steps(lambda steps: pace.seconds(method.with_steps(steps), trainer.processes), budget)


def measure_pace(trainer: "Trainer", seconds: float) -> Pace:
    """How long the parts of the trainer's run take, from a few steps on its own data."""
    first = trainer.method.phases[0]
    assert isinstance(first, TokenPhase), "budgets are for runs that count tokens"
    with _put_back(trainer), StopRequest() as stop:
        steps = _measure_steps(trainer, seconds, stop)
        trainer.evaluate()  # the first one finds the device's kernels
        evaluation = _timed(trainer.evaluate)
        _check(stop)
        checkpoint = _timed(trainer.save)
    count, step = max(steps[0].items())
    return Pace(steps, evaluation, checkpoint, count * first.micro_tokens * trainer.processes / step)


def _measure_steps(trainer: "Trainer", seconds: float, stop: StopRequest) -> tuple[dict[int, float], ...]:
    method, real = trainer.method.with_steps(FRAME), trainer.method
    trainer.method = method
    try:
        feed, found = trainer.feed(), []
        kinds = [  # of each phase its first and its last step, where the batch is smallest and largest
            {method.micro_batches(step, trainer.processes): step for step in (begin, end - 1)}
            for begin, end in pairwise(borders(method.phases, FRAME))
        ]
        share = SHARE * seconds / sum(map(len, kinds))
        for phase in kinds:
            found.append({count: _step_seconds(trainer, feed, step, share, stop) for count, step in phase.items()})
    finally:
        trainer.method = real
    return tuple(found)


def _step_seconds(trainer: "Trainer", feed: "Feed", step: int, share: float, stop: StopRequest) -> float:
    """The mean time of steps like this one, of which as many are done as fit into a share of the time."""

    def several(count: int) -> float:
        meter = trainer.meter()
        for _ in range(count):
            _check(stop)
            trainer.rehearse(step, feed, meter)
        float(meter.gradient_norm)  # waits for the device
        return meter.seconds() / count

    several(WARM_UP - 1)
    count = max(1, min(MEASURED, int(share / several(1))))
    return several(int(broadcast_object_list([count])[0]))  # all processes must do equally many


def _between(known: dict[int, float], count: int) -> float:
    """The time of a step with a number of micro-batches, on the line through those that were measured."""
    (few, low), (many, high) = min(known.items()), max(known.items())
    return low if few == many else low + (high - low) * (count - few) / (many - few)


def _timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _check(stop: StopRequest) -> None:
    if stop.is_made:
        raise InputError("asked to stop while the budget was being measured: the run has not begun, nothing is kept")


@contextmanager
def _put_back(trainer: "Trainer") -> Iterator[None]:
    """Whatever happens inside, the trainer stands at the beginning of its run again, and its folder is as it was."""
    tensors = [*trainer.model.parameters(), *trainer.model.buffers()]
    before = [tensor.detach().clone() for tensor in tensors]
    optimizer = trainer.engine.optimizer
    # Adam counts its steps there
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    out, folder = trainer.out, trainer.out / f".calibration-{os.getpid()}"
    made = [path for path in (folder, *folder.parents) if not path.exists()][-1]
    trainer.out = folder  # where a checkpoint is tried
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)
        optimizer.state.clear()
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update(values)
        trainer.progress, trainer.out = Progress(), out
        if trainer.engine.is_main:  # another process might do so late, when the main one has begun the run there
            shutil.rmtree(made, ignore_errors=True)

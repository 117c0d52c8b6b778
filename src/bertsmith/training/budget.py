"""Training budgets: a limit in seconds, tokens or FLOPs that determines the number of steps."""

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

MAX_STEPS = 2**30

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
    """An amount of seconds, tokens or FLOPs, and the text it was parsed from."""

    kind: Literal["seconds", "tokens", "flops"]
    amount: float
    text: str

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """Parse a budget such as "10min" or "300M tokens".

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
        """Effect on the number of steps, for `--explain`."""
        if self.kind == "seconds":
            return f"{self.text}: the run times its first steps and sets run.steps; the steps above are the recipe's"
        return f"{self.text}: sets run.steps"


def steps_within(method: Method, budget: Budget, flops_per_token: Sequence[float] = ()) -> int:
    """Return the most steps of a run within a budget of tokens or FLOPs, including ramp and phases.

    Tokens are counted like `batch.tokens`, padding included. A budget of FLOPs needs the FLOPs per token of each phase.
    """
    if budget.kind == "seconds":
        raise InputError(f"the budget {budget.text!r} is a time, which has to be measured; allowed: tokens, operations")
    prices = flops_per_token if budget.kind == "flops" else [1.0] * len(method.phases)

    def cost(steps: int) -> float:
        return sum(tokens * price for tokens, price in zip(method.with_steps(steps).tokens(), prices, strict=True))

    return max_steps(cost, budget)


def max_steps(cost: Callable[[int], float], budget: Budget) -> int:
    """Return the most steps within a budget; `cost` must increase with the steps."""
    high = 1
    while cost(high) <= budget.amount:
        high *= 2
        if high > MAX_STEPS:
            raise InputError(f"the budget {budget.text!r} is more than {MAX_STEPS:,} steps; give less")
    # half of `high` is affordable; find the first of the steps 1, 2, … that is not
    steps = bisect_right(range(1, high), budget.amount, lo=high // 2, key=cost)
    if not steps:
        raise InputError(f"the budget {budget.text!r} is less than one step takes; give more, or lower batch.tokens")
    return steps


RESERVED_SHARE = 0.03  # of the time, for costs that the measurement does not include
MAX_TIMED_STEPS = 30  # per phase and batch size
TIMING_SHARE = 0.05  # of the time, for all timed steps
WARM_UP_STEPS = 3  # not timed: they compile and capture graphs
REHEARSED_STEPS = 1_000_000  # assumed length of the run while timing, so that every phase has steps


@dataclass(frozen=True)
class Pace:
    """Seconds that steps, evaluations and checkpoints of a run take."""

    steps: tuple[dict[int, float], ...]
    """For each phase, seconds per step by number of micro-batches, for its smallest and largest batch."""
    evaluation: float
    checkpoint: float
    tokens_per_second: float
    """In the first phase with a full batch, padding included."""

    def seconds(self, method: "Method", processes: int) -> float:
        """Return the seconds that a whole run takes."""
        run, total = method.run, 0.0
        for known, counts in zip(self.steps, timetable(method.phases, run.steps, processes), strict=True):
            total += sum(_between(known, count) * steps for count, steps in counts.items())
        stops, often = [run.evaluate_every, run.checkpoint_every], math.lcm(run.evaluate_every, run.checkpoint_every)
        evaluations = -(-run.steps // run.evaluate_every)
        # an evaluation may be the best so far, which is saved; the model is written once more at the end
        checkpoints = sum(run.steps // every for every in stops) - run.steps // often + 2
        return total + evaluations * self.evaluation + checkpoints * self.checkpoint


def calibrate(trainer: "Trainer", seconds: float) -> int:
    """Return the steps that fit into a time, including this measurement; the trainer is restored afterwards."""
    begin = time.perf_counter()
    pace = measure_pace(trainer, seconds)
    return steps_at(pace, trainer, seconds, spent=time.perf_counter() - begin)


def steps_at(pace: Pace, trainer: "Trainer", seconds: float, *, spent: float) -> int:
    """Return the steps that fit into the rest of a time; the main process decides for all."""
    answer: int | InputError = 0
    if trainer.train_step.is_main:
        try:
            answer = _steps_at(pace, trainer, seconds, spent)
        except InputError as error:
            answer = error
    answer = broadcast_object_list([answer])[0]
    if isinstance(answer, InputError):
        raise answer
    return answer


def _steps_at(pace: Pace, trainer: "Trainer", seconds: float, spent: float) -> int:
    left = (1 - RESERVED_SHARE) * seconds - spent
    if left <= 0:
        raise InputError(
            f"the budget of {seconds:g} s is spent: start-up and timing of the first steps took {spent:.0f} s; "
            "give more"
        )
    method, budget = trainer.method, Budget("seconds", left, f"{seconds:g}s")
    return max_steps(lambda steps: pace.seconds(method.with_steps(steps), trainer.processes), budget)


def measure_pace(trainer: "Trainer", seconds: float) -> Pace:
    """Time a few steps, an evaluation and a checkpoint of the trainer's run on its own data."""
    first = trainer.method.phases[0]
    assert isinstance(first, TokenPhase), "budgets are for runs that count tokens"
    with _restored(trainer), StopRequest() as stop:
        steps = _measure_steps(trainer, seconds, stop)
        trainer.evaluate()  # warm-up: selects the device's kernels
        evaluation = _timed(trainer.evaluate)
        _check(stop)
        checkpoint = _timed(trainer.save)
    count, step = max(steps[0].items())
    return Pace(steps, evaluation, checkpoint, count * first.micro_tokens * trainer.processes / step)


def _measure_steps(trainer: "Trainer", seconds: float, stop: StopRequest) -> tuple[dict[int, float], ...]:
    method, real = trainer.method.with_steps(REHEARSED_STEPS), trainer.method
    trainer.method = method
    try:
        feed, found = trainer.feed(), []
        kinds = [  # first and last step of each phase, with its smallest and largest batch
            {method.micro_batches(step, trainer.processes): step for step in (begin, end - 1)}
            for begin, end in pairwise(borders(method.phases, REHEARSED_STEPS))
        ]
        share = TIMING_SHARE * seconds / sum(map(len, kinds))
        for phase in kinds:
            found.append({count: _step_seconds(trainer, feed, step, share, stop) for count, step in phase.items()})
    finally:
        trainer.method = real
    return tuple(found)


def _step_seconds(trainer: "Trainer", feed: "Feed", step: int, share: float, stop: StopRequest) -> float:
    """Return the mean time of a step, over as many repetitions as fit into `share` seconds."""

    def several(count: int) -> float:
        meter = trainer.meter()
        for _ in range(count):
            _check(stop)
            trainer.rehearse(step, feed, meter)
        float(meter.gradient_norm)  # waits for the device
        return meter.seconds() / count

    several(WARM_UP_STEPS - 1)
    count = max(1, min(MAX_TIMED_STEPS, int(share / several(1))))
    return several(int(broadcast_object_list([count])[0]))  # the same number on all processes


def _between(known: dict[int, float], count: int) -> float:
    """Interpolate the time of a step linearly between the measured numbers of micro-batches."""
    (few, low), (many, high) = min(known.items()), max(known.items())
    return low if few == many else low + (high - low) * (count - few) / (many - few)


def _timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _check(stop: StopRequest) -> None:
    if stop.is_made:
        raise InputError("interrupted while timing steps for the budget: the run has not started, nothing is saved")


@contextmanager
def _restored(trainer: "Trainer") -> Iterator[None]:
    """Restore the trainer to the start of its run, and its folder, when the block ends."""
    tensors = [*trainer.model.parameters(), *trainer.model.buffers()]
    before = [tensor.detach().clone() for tensor in tensors]
    optimizer = trainer.train_step.optimizer
    # Adam stores its step counts there
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    out, folder = trainer.out, trainer.out / f".calibration-{os.getpid()}"
    made = [path for path in (folder, *folder.parents) if not path.exists()][-1]
    trainer.out = folder  # for the timed checkpoint
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
        if trainer.train_step.is_main:  # another process could be late and delete files of the started run
            shutil.rmtree(made, ignore_errors=True)

"""How long a run may be: in seconds, in tokens or in operations, instead of in steps."""

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from bertsmith.errors import InputError
from bertsmith.training.method import Method

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

"""Health checks of a run, based on the rows of its log alone."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from bertsmith.training.log import LogRow

PLATEAU_RATIO = 0.95  # of the unigram level: with a higher loss, only token frequencies are learned
EXPLOSION_RATIO = 10.0  # of the median gradient norm
FIRST_STEP = 50  # earlier steps are not checked
NORM_WINDOW, MIN_NORMS = 100, 10  # most and fewest rows for the median gradient norm


@dataclass(frozen=True)
class Baseline:
    """Loss of predicting tokens by their frequency alone, and the objective's term to compare with it."""

    term: str
    level: Callable[[], float]


def non_finite_reason(row: LogRow) -> str | None:
    """Return a clause that names the first non-finite metric of a row, or None."""
    for name in ("loss", "gradient_norm"):
        if name in row and not math.isfinite(row[name]):
            return f"the {name.replace('_', ' ')} is {row[name]} after step {row['step']}"
    return None


class HealthMonitor:
    """Examine the rows of a log one by one and return notices."""

    def __init__(self, steps: int, warmup: int, baseline: Baseline | None) -> None:
        self.steps, self.warmup, self.baseline = steps, warmup, baseline
        self._reported: set[str] = set()
        self._is_exploded = False
        self._norms: deque[float] = deque(maxlen=NORM_WINDOW)

    def examine(self, row: LogRow) -> list[LogRow]:
        """Return rows of kind "notice" for a row of the log, usually none."""
        if row["kind"] != "training":
            return []
        found = [*self._plateau(row), *self._recall(row), *self._gradient(row)]
        return [{"kind": "notice", "step": row["step"], "name": name, "text": text} for name, text in found]

    def _turn(self, name: str, is_wrong: bool, begin: str, end: str) -> list[tuple[str, str]]:
        """Return `begin` when a problem appears for the first time, and `end` when it disappears."""
        if is_wrong and name not in self._reported:
            self._reported.add(name)
            return [(name, begin)]
        if not is_wrong and name in self._reported and f"{name}_left" not in self._reported:
            self._reported.add(f"{name}_left")
            return [(f"{name}_left", end)]
        return []

    def _plateau(self, row: LogRow) -> list[tuple[str, str]]:
        """Check whether token predictions are better than token frequencies."""
        step = row["step"]
        if self.baseline is None or step <= max(self.warmup, 0.1 * self.steps, FIRST_STEP):
            return []
        loss, level = row[f"{self.baseline.term}_loss"], self.baseline.level()
        remedy = (
            "a pre-norm network, a smaller batch with a higher learning rate, or a larger init_std of fresh weights"
        )
        if "replaced_recall" in row:
            remedy += ", a wider generator, or masked_lm first and replaced_tokens after it"
        begin = (
            f"step {step}: the loss of predicted tokens is {loss:.2f}, no better than token frequencies alone "
            f"(unigram level {level:.2f}); try {remedy}"
        )
        return self._turn("plateau", loss > PLATEAU_RATIO * level, begin, f"left the unigram plateau at step {step}")

    def _recall(self, row: LogRow) -> list[tuple[str, str]]:
        """Check whether the encoder predicts "original" for every token, which is right for most of them."""
        step = row["step"]
        if "replaced_recall" not in row or step <= max(0.2 * self.steps, FIRST_STEP):
            return []
        begin = (
            f"step {step}: the encoder detects {row['replaced_recall']:.1%} of the replaced tokens: it has learned "
            f"only their frequency (replaced share {row['replaced_share']:.1%}, generator accuracy "
            f"{row['generator_accuracy']:.1%}); try a higher learning rate, masked_lm first, or a wider generator"
        )
        end = f"the encoder detects replaced tokens since step {step}"
        return self._turn("recall", row["replaced_recall"] < 0.01, begin, end)

    def _gradient(self, row: LogRow) -> list[tuple[str, str]]:
        """Check whether the gradient norm is far above its median."""
        usual = median(self._norms) if len(self._norms) >= MIN_NORMS else math.inf
        was_exploded, self._is_exploded = self._is_exploded, row["gradient_norm"] > EXPLOSION_RATIO * usual
        self._norms.append(row["gradient_norm"])
        if not self._is_exploded or was_exploded:
            return []
        text = (
            f"step {row['step']}: the gradient norm is {row['gradient_norm']:.3g}, more than ten times its median "
            f"{usual:.3g}; if the loss rises too, lower optimizer.learning_rate or optimizer.clip"
        )
        return [("gradient", text)]

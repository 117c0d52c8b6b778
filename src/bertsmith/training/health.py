"""Is a run well? Judged by the rows of its log alone."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from bertsmith.training.log import LogRow

NEAR = 0.95  # of the unigram level: a loss above that has learned nothing but frequencies
EXPLODED = 10.0  # times the median gradient norm
EARLIEST = 50  # steps before which nothing can be expected of any run
REMEMBERED, ENOUGH = 100, 10  # rows the median is taken over, and the fewest that make one


@dataclass(frozen=True)
class Baseline:
    """The loss that guesses tokens by their frequency alone, to be compared with that of a term of the objective."""

    term: str
    level: Callable[[], float]


def not_finite(row: LogRow) -> str | None:
    """The first figure of a row that is no number, as a clause; None if all are."""
    for name in ("loss", "gradient_norm"):
        if name in row and not math.isfinite(row[name]):
            return f"the {name.replace('_', ' ')} is {row[name]} after step {row['step']}"
    return None


class HealthMonitor:
    """Reads one row after the other and says what a person should notice."""

    def __init__(self, steps: int, warmup: int, baseline: Baseline | None) -> None:
        self.steps, self.warmup, self.baseline = steps, warmup, baseline
        self._said: set[str] = set()
        self._is_exploded = False
        self._norms: deque[float] = deque(maxlen=REMEMBERED)

    def examine(self, row: LogRow) -> list[LogRow]:
        """The rows of kind "notice" that a row of the log gives rise to, mostly none."""
        if row["kind"] != "training":
            return []
        found = [*self._plateau(row), *self._recall(row), *self._gradient(row)]
        return [{"kind": "notice", "step": row["step"], "name": name, "text": text} for name, text in found]

    def _turn(self, name: str, is_wrong: bool, begin: str, end: str) -> list[tuple[str, str]]:
        """What to say when something goes wrong for the first time, and when it is right again."""
        if is_wrong and name not in self._said:
            self._said.add(name)
            return [(name, begin)]
        if not is_wrong and name in self._said and f"{name}_left" not in self._said:
            self._said.add(f"{name}_left")
            return [(f"{name}_left", end)]
        return []

    def _plateau(self, row: LogRow) -> list[tuple[str, str]]:
        """Whether the guesses of tokens are no better than their frequencies."""
        step = row["step"]
        if self.baseline is None or step <= max(self.warmup, 0.1 * self.steps, EARLIEST):
            return []
        loss, level = row[f"{self.baseline.term}_loss"], self.baseline.level()
        remedy = (
            "a pre-norm network, a smaller batch with a higher learning rate, or fresh weights of a larger deviation"
        )
        if "replaced_recall" in row:
            remedy += ", a wider generator, or masked_lm first and replaced_tokens after it"
        begin = (
            f"step {step}: the loss of guessed tokens is {loss:.2f}, which word frequencies alone reach "
            f"(unigram level {level:.2f}); what helps: {remedy}"
        )
        return self._turn("plateau", loss > NEAR * level, begin, f"left the unigram plateau at step {step}")

    def _recall(self, row: LogRow) -> list[tuple[str, str]]:
        """Whether the encoder calls every token genuine, which is right for most and teaches nothing."""
        step = row["step"]
        if "replaced_recall" not in row or step <= max(0.2 * self.steps, EARLIEST):
            return []
        begin = (
            f"step {step}: the encoder finds {row['replaced_recall']:.1%} of the replaced tokens, so it has learned "
            f"only how many there are (replaced share {row['replaced_share']:.1%}, generator accuracy "
            f"{row['generator_accuracy']:.1%}); what helps: a higher learning rate, masked_lm first, a wider generator"
        )
        end = f"the encoder tells replaced tokens apart since step {step}"
        return self._turn("recall", row["replaced_recall"] < 0.01, begin, end)

    def _gradient(self, row: LogRow) -> list[tuple[str, str]]:
        """Whether the gradient is far larger than it has been."""
        usual = median(self._norms) if len(self._norms) >= ENOUGH else math.inf
        was_exploded, self._is_exploded = self._is_exploded, row["gradient_norm"] > EXPLODED * usual
        self._norms.append(row["gradient_norm"])
        if not self._is_exploded or was_exploded:
            return []
        text = (
            f"step {row['step']}: the gradient norm is {row['gradient_norm']:.3g}, more than ten times its median "
            f"{usual:.3g}; if the loss rises too, lower optimizer.learning_rate or optimizer.clip"
        )
        return [("gradient", text)]

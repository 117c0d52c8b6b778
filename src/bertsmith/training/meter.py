"""Sums of losses and metrics between two rows of the log."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from bertsmith.objectives.base import Sums, Term


class Meter:
    """Accumulate losses and metrics on the device: reading them at every step would stall the loop."""

    def __init__(self, terms: Mapping[str, Term], device: torch.device) -> None:
        zero = torch.zeros((), dtype=torch.float64, device=device)  # counts stay exact
        self.terms = terms
        self.sums: dict[str, Tensor] = {}
        for name, term in terms.items():
            for key in (
                "loss",
                "count",
                *(f"{metric}.{side}" for metric in term.metrics for side in ("part", "whole")),
            ):
                self.sums[f"{name}.{key}"] = zero
        self.gradient_norm, self.steps = zero, 0
        self.tokens = 0
        self.flops = 0.0
        self.waited = 0.0
        """Seconds in which the loop waited for data."""
        self._begin = time.perf_counter()
        self._pause: float | None = None

    def add(self, sums: Mapping[str, Sums], counts: Mapping[str, Tensor]) -> None:
        """Add one micro-batch."""
        for name, value in sums.items():
            new = {"loss": value.loss.detach(), "count": counts[name]}
            for metric, share in value.metrics.items():
                new |= {f"{metric}.part": share.part.detach(), f"{metric}.whole": share.whole}
            for key, summand in new.items():
                self.sums[f"{name}.{key}"] = self.sums[f"{name}.{key}"] + summand

    def add_step(self, gradient_norm: Tensor) -> None:
        """Count an optimiser step and add its gradient norm."""
        self.gradient_norm = self.gradient_norm + gradient_norm
        self.steps += 1

    def metrics(self, totals: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the total loss, and loss and metrics of each term, from the sums over all processes."""
        # one transfer from the device for all values
        values = dict(zip(totals, torch.stack(list(totals.values())).tolist(), strict=True))
        metrics = {"loss": 0.0}
        for name, term in self.terms.items():
            metrics[f"{name}_loss"] = values[f"{name}.loss"] / max(1.0, values[f"{name}.count"])
            for metric in term.metrics:
                part, whole = values[f"{name}.{metric}.part"], values[f"{name}.{metric}.whole"]
                metrics[f"{name}_{metric}"] = part / max(1.0, whole)
            metrics["loss"] += term.weight * metrics[f"{name}_loss"]
        return metrics

    def record(self, totals: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the sums over all processes as plain numbers, for a checkpoint."""
        if not self.steps:
            return {}
        own = {"steps": self.steps, "tokens": self.tokens, "flops": self.flops, "waited": self.waited}
        own |= {"gradient_norm": float(self.gradient_norm), "seconds": self.seconds()}
        return {**own, **dict(zip(totals, torch.stack(list(totals.values())).tolist(), strict=True))}

    def restore(self, record: Mapping[str, float], *, is_main: bool) -> None:
        """Continue from a record; the main process takes over the sums of all processes."""
        if not record:
            return
        self.steps, self.tokens = int(record["steps"]), int(record["tokens"])
        self.flops, self.waited = record["flops"], record["waited"]
        self.gradient_norm = self.gradient_norm + record["gradient_norm"]
        self._begin -= record["seconds"]
        if is_main:
            self.sums = {name: value + record[name] for name, value in self.sums.items()}

    def seconds(self) -> float:
        """Return the time since the meter was made, without pauses."""
        return (self._pause or time.perf_counter()) - self._begin

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as waiting for data."""
        begin = time.perf_counter()
        yield
        self.waited += time.perf_counter() - begin

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside, such as an evaluation or a checkpoint."""
        self._pause = time.perf_counter()
        yield
        self._begin += time.perf_counter() - self._pause
        self._pause = None

"""The one training loop.

    resume, if there is a checkpoint
    for step in steps:
        renew: parts that draw random features draw them anew           (model.renew)
        take this step's micro-batches; prepare them                    (objective.prepare)
        add up the targets of all micro-batches and processes
        for each micro-batch: forward, divide by the targets, backward  (objective)
        clip, optimiser step, learning rate
        log            every `log_every` steps
        evaluate       every `evaluate_every` steps and at the end
        checkpoint     every `checkpoint_every` steps, at a best held-out loss, at the end, and when asked to stop
    average the last checkpoints, if asked for

Every random draw (order of the data, masks, dropout) is a function of the seed and the micro-batch's place in the data,
so neither the number of processes nor an interruption changes it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from bertsmith.batches.loader import Loaded, load_batches
from bertsmith.batches.plan import Cursor, Stream
from bertsmith.batches.random import key
from bertsmith.errors import InputError
from bertsmith.models.model import Model
from bertsmith.objectives.base import Objective
from bertsmith.training.checkpoint import (
    Progress,
    find_checkpoint,
    load_average,
    load_checkpoint,
    remove_leftovers,
    save_checkpoint,
)
from bertsmith.training.display import Display
from bertsmith.training.engine import Engine
from bertsmith.training.hardware import peak_flops
from bertsmith.training.log import RunLog
from bertsmith.training.meter import Meter
from bertsmith.training.method import Method
from bertsmith.training.sharding import whole_model
from bertsmith.training.signals import StopRequest


@dataclass(frozen=True)
class TrainingData:
    """The stream to learn from and the part that is held out."""

    plan: Stream[Any]
    reader: Dataset[Loaded]
    held_out_plan: Stream[Any] | None
    held_out_reader: Dataset[Loaded] | None


class Trainer:
    """Trains a model; `run` returns where it stands at the end or when it was asked to stop."""

    def __init__(
        self,
        model: Model,
        objective: Objective[Any, Any],
        data: TrainingData,
        method: Method,
        out: Path,
        *,
        fingerprint: str,
        flops_per_token: float,
        device: str = "auto",
        show: bool = True,
    ) -> None:
        self.data, self.method, self.out = data, method, out
        self.fingerprint = fingerprint
        self.engine = Engine(model, objective, method, out, device=device)
        self.model, self.processes = self.engine.model, self.engine.processes
        micro, whole = data.plan.config.micro_tokens, method.batch.tokens
        if whole % (micro * self.processes):
            raise InputError(
                f"batch.tokens is {whole}, which is not a multiple of sequences.micro_tokens {micro} times the "
                f"{self.processes} processes; change one of them"
            )
        self.log = RunLog(out / "log.jsonl", self.engine.accelerator)
        self.progress = Progress()
        peak = peak_flops(self.engine.device)
        self.peak_tokens = None if peak is None else peak * self.processes / flops_per_token
        self.show = show and self.engine.is_main

    def run(self, *, resume: bool = False) -> Progress:
        """Trains to the last step, or until SIGTERM or SIGINT; either way everything is saved."""
        run = self.method.run
        complaints = self._resume() if resume else []
        self.log.rewind(self.progress.step)
        if run.track:
            self.engine.accelerator.init_trackers("bertsmith", config={"steps": run.steps, "seed": run.seed})
        batches = self._stream()
        with StopRequest() as stop, Display(run.steps, self.progress.step, visible=self.show) as display:
            for complaint in complaints:
                display.say(complaint)
            self._loop(batches, stop, display)
            if self.is_finished and run.average_last > 1:
                self._average(display)
        if self.is_finished:
            self.model = whole_model(self.model, self.engine.device)
        return self.progress

    def close(self) -> None:
        """Ends trackers and the talk between processes; nothing may follow that waits for the others."""
        self.engine.close()

    @property
    def is_finished(self) -> bool:
        return self.progress.step >= self.method.run.steps

    def _loop(self, batches: Iterator[Loaded], stop: StopRequest, display: Display) -> None:
        run = self.method.run
        meter = self._meter()
        while not self.is_finished:
            self._step(batches, meter)
            step = self.progress.step
            is_last = self.is_finished
            display.advance()
            if step % run.log_every == 0 or is_last:
                row = self._training_row(meter)
                self.log.write(row)
                if not math.isfinite(row["loss"]):
                    raise InputError(
                        f"the loss is {row['loss']} after step {step} with a learning rate of "
                        f"{row['learning_rate']:g}; start again with a lower optimizer.learning_rate"
                    )
                display.show(row)
                meter = self._meter()
            with meter.paused():
                is_best = (step % run.evaluate_every == 0 or is_last) and self._evaluate(display)
                is_asked = self._is_asked_to_stop(stop, step)
                if step % run.checkpoint_every == 0 or is_best or is_last or is_asked:
                    self.save()
            if is_asked and not is_last:
                display.say(f"asked to stop: saved after step {step}; go on with --resume")
                return

    def _step(self, batches: Iterator[Loaded], meter: Meter) -> None:
        """One optimiser step."""
        step, run = self.progress.step, self.method.run
        self.model.renew(step, run.seed)
        micro = self.data.plan.config.micro_tokens
        count = self.method.batch.micro_batches(step, run.steps, micro, self.processes)
        with meter.waiting():
            loaded = [next(batches) for _ in range(count)]
        engine = self.engine
        prepared = [engine.objective.prepare(item.batch.to(engine.device), key(run.seed, 5)) for item in loaded]
        draws = [(run.seed, item.cursor.epoch, item.cursor.window, item.cursor.index) for item in loaded]
        engine.learn(prepared, draws, self.method.rate(step), meter)
        tokens = sum(item.batch.real_tokens for item in loaded)
        cursor = loaded[-1].cursor
        self.progress.step += 1
        meter.tokens += tokens
        self.progress.tokens += tokens * self.processes
        # process 0 stands at the first micro-batch of the round; all of the round is done
        self.progress.cursor, self.progress.skip = (cursor.epoch, cursor.window, cursor.index), self.processes

    def _evaluate(self, display: Display) -> bool:
        """Measures the held-out loss; True if it is the best so far."""
        row = self.evaluate()
        if row is None:
            return False
        self.log.write({"kind": "held_out", "step": self.progress.step, **row})
        display.show({"kind": "held_out", **row})
        if self.progress.best_loss is not None and not row["loss"] < self.progress.best_loss:
            return False
        self.progress.best_loss, self.progress.best_step = row["loss"], self.progress.step
        return True

    def evaluate(self) -> dict[str, float] | None:
        """The losses and accuracies on the held-out part with masks that never change; None without such a part."""
        if self.data.held_out_plan is None or self.data.held_out_reader is None:
            return None
        engine, meter = self.engine, self._meter()
        plans = list(islice(self.data.held_out_plan.one_epoch(), self.method.run.evaluate_batches))
        for first in range(0, len(plans), self.processes):
            # sharded weights want every process: one for which nothing is left measures a batch that does not count
            own = first + engine.rank
            plan = plans[own] if own < len(plans) else plans[first]
            batch = self.data.held_out_reader[plan].batch.to(engine.device)
            prepared = engine.evaluation.prepare(batch, 0)
            sums = engine.measure(prepared)
            if own < len(plans):
                meter.add(sums, engine.evaluation.counts(prepared))
        return meter.figures(engine.reduce([meter.sums]))

    def save(self) -> None:
        """Writes a checkpoint."""
        self.engine.accelerator.wait_for_everyone()
        if self.engine.is_main or self.engine.is_sharded:
            save_checkpoint(
                self.out / "checkpoints",
                self.model,
                self.engine.optimizer,
                self.progress,
                self.fingerprint,
                keep=max(2, self.method.run.average_last),
                writes=self.engine.is_main,
            )
        self.engine.accelerator.wait_for_everyone()

    def _average(self, display: Display) -> None:
        """Leaves the model with the mean of the last checkpoints' weights, and measures it."""
        count = load_average(self.out / "checkpoints", self.model, self.method.run.average_last)
        row = self.evaluate()
        if row is not None:
            self.log.write({"kind": "held_out", "step": self.progress.step, "averaged": count, **row})
            display.show({"kind": "held_out", **row})

    def _resume(self) -> list[str]:
        folder = self.out / "checkpoints"
        remove_leftovers(folder)
        path, complaints = find_checkpoint(folder)
        if path is None and complaints:
            raise InputError(f"{str(folder)!r} has no whole checkpoint: {complaints[0]}")
        if path is not None:
            self.progress = load_checkpoint(path, self.model, self.engine.optimizer, self.fingerprint)
        found = torch.tensor(self.progress.step, device=self.engine.device)
        if self.engine.reduce([{"step": found}])["step"] != found * self.processes:
            raise InputError(
                f"the processes found different checkpoints in {str(folder)!r}; all machines must share it"
            )
        return complaints

    def _stream(self) -> Iterator[Loaded]:
        """This process's micro-batches from where the run stands."""
        skip = self.progress.skip + self.engine.rank
        plans = self.data.plan.from_cursor(Cursor(*self.progress.cursor), skip=skip, every=self.processes)
        is_pinned = self.engine.device.type == "cuda"
        return iter(load_batches(self.data.reader, plans, workers=self.method.run.workers, pin=is_pinned))

    def _is_asked_to_stop(self, stop: StopRequest, step: int) -> bool:
        """Whether any process was asked to stop; several agree on it at logged steps only, which costs no waiting."""
        if self.processes == 1:
            return stop.is_made
        if step % self.method.run.log_every:
            return False
        flag = torch.tensor(float(stop.is_made), device=self.engine.device)
        return bool(self.engine.reduce([{"stop": flag}])["stop"] > 0)

    def _training_row(self, meter: Meter) -> dict[str, Any]:
        figures = meter.figures(self.engine.reduce([meter.sums]))
        seconds = meter.seconds()
        speed = meter.tokens * self.processes / seconds
        self.progress.seconds += seconds
        row = {"kind": "training", "step": self.progress.step, **figures}
        row["gradient_norm"] = float(meter.gradient_norm) / max(1, meter.steps)
        row |= {"learning_rate": self.method.rate(self.progress.step - 1), "tokens": self.progress.tokens}
        row |= {"seconds": round(self.progress.seconds, 3), "tokens_per_second": round(speed, 1)}
        row["data_wait"] = round(meter.waited / seconds, 4)
        if self.peak_tokens is not None:
            row["utilisation"] = round(speed / self.peak_tokens, 4)
        return row

    def _meter(self) -> Meter:
        return Meter(self.engine.objective.terms, self.engine.device)

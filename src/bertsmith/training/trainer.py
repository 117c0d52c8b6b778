"""The one training loop.

    resume, if there is a checkpoint; or begin from the one to branch from
    for step in steps:
        redraw_features: parts that draw random features draw them anew           (model.redraw_features)
        take this step's micro-batches of its phase; prepare them       (feed.py, objective.prepare)
        add up the targets of all micro-batches and processes
        for each micro-batch: forward, divide by the targets, backward  (objective)
        clip, optimiser step, learning rate
        log            every `log_every` steps; look after the run's health     (health.py)
        evaluate       every `evaluate_every` steps and at the end
        checkpoint     every `checkpoint_every` steps, at a best evaluation, at the end, and when asked to stop
        end early      after `patience` evaluations without a better one
    take the best evaluation's weights or the mean of the last checkpoints', if asked for

Every random draw (order of the data, masks, dropout) is a function of the seed and the micro-batch's place in the data,
so neither the number of processes nor an interruption changes it.
"""

from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from bertsmith.data.random import key
from bertsmith.errors import InputError
from bertsmith.models.model import Model
from bertsmith.objectives.base import Objective
from bertsmith.training.checkpoint import (
    Progress,
    find_checkpoint,
    load_average,
    load_checkpoint,
    load_weights,
    remove_leftovers,
    save_checkpoint,
)
from bertsmith.training.display import Display
from bertsmith.training.feed import Feed, TrainingData
from bertsmith.training.health import Baseline, HealthMonitor, not_finite
from bertsmith.training.interrupts import StopRequest, describe_checkpoint
from bertsmith.training.log import LOG, LogRow, RunLog
from bertsmith.training.meter import Meter
from bertsmith.training.run_config import Method, peak_flops
from bertsmith.training.sharding import whole_model
from bertsmith.training.step import TrainStep

EvaluateStep = Callable[[TrainStep], LogRow]
"""Says how good the model is, as the row of an evaluation: "loss", and "score", the higher the better, of "metric"."""


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
        evaluator: EvaluateStep | None = None,
        baseline: Baseline | None = None,
        branch: Path | None = None,
        device: str = "auto",
        show: bool = True,
        notices: Sequence[str] = (),
    ) -> None:
        self.notices, self.evaluator = notices, evaluator
        self.data, self.method, self.out = data, method, out
        self.fingerprint, self.baseline, self.branch = fingerprint, baseline, branch
        self.engine = TrainStep(model, objective, method, out, device=device)
        self.model, self.processes = self.engine.model, self.engine.processes
        for number, phase in enumerate(method.phases):
            phase.check(number, self.processes)
        self.log = RunLog(out / LOG, self.engine.accelerator)
        self.progress = Progress()
        self.peak = peak_flops(self.engine.device)
        self.show = show and self.engine.is_main

    def set_steps(self, steps: int) -> None:
        """Gives the run another length, before it begins."""
        self.method = self.method.with_steps(steps)

    def run(self, *, resume: bool = False) -> Progress:
        """Trains to the last step, or until SIGTERM or SIGINT; either way everything is saved."""
        run = self.method.run
        complaints = self._begin(resume)
        self.log.rewind(self.progress.step)
        if run.track:
            self.engine.accelerator.init_trackers("bertsmith", config={"steps": run.steps, "seed": run.seed})
        with StopRequest() as stop, Display(run.steps, self.progress.step, visible=self.show) as display:
            for notice in (*self.notices, *complaints):
                display.say(notice)
            self._loop(self.feed(), stop, display)
            if self.is_finished and run.average_last > 1:
                self._average(display)
            if self.is_finished and run.choose == "best" and self.progress.best_step >= 0:
                load_weights(self.out / "checkpoints", self.progress.best_step, self.model)
        if self.is_finished:
            self.model = self.engine.objective.finish(whole_model(self.model, self.engine.device))
        return self.progress

    def close(self, *, is_last: bool = True) -> None:
        """Ends trackers and, after the last training of a command, the talk between processes: nothing may follow then
        that waits for the others."""
        self.engine.close(is_last=is_last)

    @property
    def is_finished(self) -> bool:
        patience = self.method.run.patience
        is_over = patience is not None and self.progress.since_best >= patience
        return is_over or self.progress.step >= self.method.run.steps

    def feed(self) -> Feed:
        """This process's micro-batches from where the run stands."""
        engine, workers = self.engine, self.method.run.workers
        pin = engine.device.type == "cuda"
        return Feed(self.data, self.progress, rank=engine.rank, processes=self.processes, workers=workers, pin=pin)

    def meter(self) -> Meter:
        """An empty meter for the objective's figures."""
        return Meter(self.engine.objective.terms, self.engine.device)

    def _loop(self, feed: Feed, stop: StopRequest, display: Display) -> None:
        run = self.method.run
        health = self._health()
        meter = self.meter()
        meter.restore(self.progress.meter, is_main=self.engine.is_main)
        while not self.is_finished:
            self._step(feed, meter)
            step = self.progress.step
            is_last = self.is_finished
            display.advance()
            if step % run.log_every == 0 or is_last:
                row = self._training_row(meter)
                self._write(row, display)
                self._notice(health.examine(row), display)
                meter = self.meter()
            with meter.paused():
                is_best = (step % run.evaluate_every == 0 or is_last) and self._evaluate(display)
                is_asked = self._is_asked_to_stop(stop, step)
                if step % run.checkpoint_every == 0 or is_best or self.is_finished or is_asked:
                    self._checkpoint(meter)
            if self.is_finished and not is_last:
                display.say(f"no better evaluation since step {self.progress.best_step}: ended after step {step}")
            elif is_asked and not is_last:
                end = "saved; go on with --resume" if run.keep else "nothing is saved, since run.keep is 0"
                display.say(f"asked to stop after step {step}: {end}")
                return

    def rehearse(self, step: int, feed: Feed, meter: Meter) -> None:
        """One optimiser step as if it had this number, to see how long it takes; the caller puts the weights back."""
        self.progress.step = step
        self._step(feed, meter)

    def _step(self, feed: Feed, meter: Meter) -> None:
        """One optimiser step."""
        step, run, engine = self.progress.step, self.method.run, self.engine
        self.model.redraw_features(step, run.seed)
        phase = self.method.phase(step)
        data = self.data.phases[phase]
        with meter.waiting():
            loaded = feed.take(phase, self.method.micro_batches(step, self.processes))
        prepared = [engine.objective.prepare(item.batch.to(engine.device), key(data.seed, 5)) for item in loaded]
        draws = [(data.seed, item.cursor.epoch, item.cursor.window, item.cursor.index) for item in loaded]
        engine.learn(prepared, draws, self.method.rate(step), meter)
        tokens = sum(item.batch.real_tokens for item in loaded)
        flops = tokens * data.flops_per_token
        meter.tokens, meter.flops = meter.tokens + tokens, meter.flops + flops
        progress = self.progress
        progress.step += 1
        progress.tokens += tokens * self.processes
        progress.flops += flops * self.processes

    def _evaluate(self, display: Display) -> bool:
        """Evaluates on the held-out part; True if it is the best evaluation so far."""
        row = self.evaluate()
        if row is None:
            return False
        self._write({"kind": "held_out", "step": self.progress.step, **row}, display)
        progress = self.progress
        # of equal scores, which are common on little data, the surer one is better
        score = row.get("score", -row["loss"]), -row["loss"]
        if progress.best is not None and not score > progress.best:
            progress.since_best += 1
            return False
        progress.best, progress.best_step, progress.since_best = score, progress.step, 0
        return True

    def evaluate(self) -> LogRow | None:
        """The losses and accuracies on the held-out part with masks that never change; None without such a part.

        With an evaluator its "score" decides which evaluation is the best, otherwise the loss.
        """
        if self.evaluator is not None:
            return self.evaluator(self.engine)
        if self.data.held_out_plan is None or self.data.held_out_reader is None:
            return None
        engine = self.engine
        meter = Meter(engine.evaluation.terms, engine.device)
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
        return meter.metrics(engine.reduce([meter.sums]))

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
                keep=max(self.method.run.keep, self.method.run.average_last),
                writes=self.engine.is_main,
            )
        self.engine.accelerator.wait_for_everyone()

    def _checkpoint(self, meter: Meter) -> None:
        """Saves the run with what the meter holds; where that is not finite, the weights are not either."""
        self.progress.meter = meter.record(self.engine.reduce([meter.sums]))
        if self.progress.meter:
            self._check_finite(self._figures(meter))
        if self.method.run.keep:
            self.save()

    def _average(self, display: Display) -> None:
        """Leaves the model with the mean of the last checkpoints' weights, and measures it."""
        count = load_average(self.out / "checkpoints", self.model, self.method.run.average_last)
        row = self.evaluate()
        if row is not None:
            self._write({"kind": "held_out", "step": self.progress.step, "averaged": count, **row}, display)

    def _begin(self, resume: bool) -> list[str]:
        """Puts the run where its newest checkpoint, or the one to branch from, left off; returns complaints."""
        folder = self.out / "checkpoints"
        path, complaints = None, list[str]()
        if resume:
            remove_leftovers(folder)
            path, complaints = find_checkpoint(folder)
            if path is None and complaints:
                raise InputError(f"{str(folder)!r} has no whole checkpoint: {complaints[0]}")
        path = path or self.branch
        if path is not None:
            self.progress = load_checkpoint(path, self.model, self.engine.optimizer, self.fingerprint)
        found = torch.tensor(self.progress.step, device=self.engine.device)
        if self.engine.reduce([{"step": found}])["step"] != found * self.processes:
            raise InputError(
                f"the processes found different checkpoints in {str(folder)!r}; all machines must share it"
            )
        return complaints

    def _is_asked_to_stop(self, stop: StopRequest, step: int) -> bool:
        """Whether any process was asked to stop; several agree on it at logged steps only, which costs no waiting."""
        if self.processes == 1:
            return stop.is_made
        if step % self.method.run.log_every:
            return False
        flag = torch.tensor(float(stop.is_made), device=self.engine.device)
        return bool(self.engine.reduce([{"stop": flag}])["stop"] > 0)

    def _health(self) -> HealthMonitor:
        """The watch over the run, which knows the rows that are already in the log."""
        steps = self.method.run.steps
        # only the main process speaks, so only it need know the unigram level
        baseline = self.baseline if self.engine.is_main else None
        if baseline is not None and self.engine.objective.terms[baseline.term].weight == 0:
            baseline = None  # what is not learned need not get better
        health = HealthMonitor(steps, round(self.method.schedule.warmup * steps), baseline)
        for row in self.log.rows:
            health.examine(row)
        return health

    def _figures(self, meter: Meter) -> LogRow:
        """What the meter has added up, as the beginning of a row of the log."""
        metrics = meter.metrics(self.engine.reduce([meter.sums]))
        row = {"kind": "training", "step": self.progress.step, **metrics}
        row["gradient_norm"] = float(meter.gradient_norm) / max(1, meter.steps)
        row["learning_rate"] = self.method.rate(self.progress.step - 1)
        return row

    def _training_row(self, meter: Meter) -> LogRow:
        row, seconds, progress = self._figures(meter), meter.seconds(), self.progress
        progress.seconds += seconds
        row |= {"tokens": progress.tokens, "flops": progress.flops, "seconds": round(progress.seconds, 3)}
        row["tokens_per_second"] = round(meter.tokens * self.processes / seconds, 1)
        row["data_wait"] = round(meter.waited / seconds, 4)
        if self.peak is not None:
            row["utilisation"] = round(meter.flops / seconds / self.peak, 4)
        return row

    def _write(self, row: LogRow, display: Display) -> None:
        """Logs and shows a row, unless it tells that the run is lost."""
        self._check_finite(row)
        self.log.write(row)
        display.show(row)

    def _notice(self, rows: list[LogRow], display: Display) -> None:
        for row in rows:
            self.log.write(row)
            display.say(row["text"])

    def _check_finite(self, row: LogRow) -> None:
        trouble = not_finite(row)
        if trouble is not None:
            step = self.progress.step
            text = (
                f"{trouble} with a learning rate of {self.method.rate(step - 1):g}; {describe_checkpoint(self.out)}; "
                "start again with a lower optimizer.learning_rate, a longer schedule.warmup or a lower optimizer.clip"
            )
            self.log.write({"kind": "notice", "step": step, "name": "not_finite", "text": text})
            raise InputError(text)

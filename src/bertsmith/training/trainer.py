"""The training loop of every objective.

    resume from the newest checkpoint, or start from the one to branch from
    for step in steps:
        redraw random features every few steps                          (model.redraw_features)
        change the model by a schedule, such as pruning more weights    (before_step)
        read the step's micro-batches and prepare them                  (feed.py, objective.prepare)
        sum the target counts over micro-batches and processes
        for each micro-batch: forward, divide by the count, backward    (objective)
        clip, optimiser step, learning rate
        log            every `log_every` steps; check the run's health  (health.py)
        evaluate       every `evaluate_every` steps and at the end
        checkpoint     every `checkpoint_every` steps, at a best evaluation, at the end, and at a stop signal
        stop early     after `patience` evaluations without improvement
    load the best evaluation's weights or average the last checkpoints, if configured

Every random draw (order of the data, masks, dropout) is a function of the seed and the micro-batch's position in the
data, so neither the number of processes nor an interruption changes it.
"""

from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from bertsmith.errors import InputError
from bertsmith.models.model import Model
from bertsmith.objectives.base import Objective
from bertsmith.settings import Plain
from bertsmith.training.checkpoint import (
    Progress,
    RunConditions,
    find_checkpoint,
    load_average,
    load_checkpoint,
    load_weights,
    save_checkpoint,
)
from bertsmith.training.display import Display
from bertsmith.training.feed import Feed, TrainingData
from bertsmith.training.health import Baseline, HealthMonitor, non_finite_reason
from bertsmith.training.interrupts import StopRequest, describe_checkpoint
from bertsmith.training.log import LOG, LogRow, RunLog
from bertsmith.training.meter import Meter
from bertsmith.training.run_config import Method, peak_flops
from bertsmith.training.sharding import whole_model
from bertsmith.training.step import TrainStep

EvaluateStep = Callable[[TrainStep], LogRow]
"""Evaluates a model and returns a log row with "loss", "metric" and "score" (higher is better)."""
BeforeStep = Callable[[Model, int], None]
"""Changes a model before a step: a function of its weights and the step's number, so that a resumed run is equal."""


class Trainer:
    """Train a model; `run` returns the progress at the end or at a stop signal."""

    def __init__(
        self,
        model: Model,
        objective: Objective[Any, Any],
        data: TrainingData,
        method: Method,
        out: Path,
        *,
        fingerprint: str,
        settings: Plain | None = None,
        evaluator: EvaluateStep | None = None,
        baseline: Baseline | None = None,
        branch: Path | None = None,
        device: str = "auto",
        show: bool = True,
        notices: Sequence[str] = (),
        before_step: BeforeStep | None = None,
    ) -> None:
        self.notices, self.evaluator, self.before_step = notices, evaluator, before_step
        self.data, self.method, self.out = data, method, out
        self.fingerprint, self.settings, self.baseline, self.branch = fingerprint, settings, baseline, branch
        load = method.training_load(
            [phase.flops_per_token for phase in data.phases],
            has_one_shape=data.has_one_shape,
            keeps_shapes=objective.keeps_shapes,
        )
        self.train_step = TrainStep(model, objective, method, out, device=device, load=load)
        self.model, self.processes = self.train_step.model, self.train_step.processes
        for number, phase in enumerate(method.phases):
            phase.check(number, self.processes)
        self.log = RunLog(out / LOG, self.train_step.accelerator)
        self.progress = Progress()
        self.peak = peak_flops(self.train_step.device)
        self.show = show and self.train_step.is_main

    def set_steps(self, steps: int) -> None:
        """Set the number of steps, before the run starts."""
        self.method = self.method.with_steps(steps)

    def run(self, *, resume: bool = False) -> Progress:
        """Train to the last step, or until SIGTERM, SIGINT or SIGHUP; either way save a checkpoint."""
        run = self.method.run
        warnings = self._restore(resume)
        self.log.rewind(self.progress.step)
        if run.track:
            self.train_step.accelerator.init_trackers("bertsmith", config={"steps": run.steps, "seed": run.seed})
        with StopRequest() as stop, Display(run.steps, self.progress.step, visible=self.show) as display:
            for notice in (*self.notices, *warnings):
                display.notify(notice)
            self._loop(self.feed(), stop, display)
            if self.is_finished and run.average_last > 1:
                self._average(display)
            if self.is_finished and run.choose == "best" and self.progress.best_step >= 0:
                load_weights(self.out / "checkpoints", self.progress.best_step, self.model)
        if self.is_finished:
            self.model = self.train_step.objective.finish(whole_model(self.model, self.train_step.device))
        return self.progress

    def close(self, *, is_last: bool = True) -> None:
        """End the trackers and, after the last training of a command, the process group.

        No collective operation may follow then.
        """
        self.train_step.close(is_last=is_last)

    @property
    def is_finished(self) -> bool:
        patience = self.method.run.patience
        is_over = patience is not None and self.progress.since_best >= patience
        return is_over or self.progress.step >= self.method.run.steps

    @property
    def threads(self) -> int | None:
        """CPU threads of this process, which determine the order of sums; None on a GPU."""
        return torch.get_num_threads() if self.train_step.device.type == "cpu" else None

    @property
    def conditions(self) -> RunConditions:
        """Everything that a resumed run must have in common with this one."""
        settings, steps = self.settings, self.method.run.steps
        if settings is not None and "steps" in settings.get("run", {}):  # a time budget sets them after the start
            settings = {**settings, "run": {**settings["run"], "steps": steps}}
        return RunConditions(self.fingerprint, settings, self.threads)

    def feed(self) -> Feed:
        """Return this process's micro-batches from the current position on."""
        train_step, workers = self.train_step, self.method.run.workers
        pin = train_step.device.type == "cuda"
        return Feed(
            self.data,
            self.progress,
            train_step.prepare,
            rank=train_step.rank,
            processes=self.processes,
            workers=workers,
            pin=pin,
        )

    def meter(self) -> Meter:
        """Return an empty meter for the objective's metrics."""
        return Meter(self.train_step.objective.terms, self.train_step.device)

    def _loop(self, feed: Feed, stop: StopRequest, display: Display) -> None:
        run = self.method.run
        health = self._health()
        meter = self.meter()
        meter.restore(self.progress.meter, is_main=self.train_step.is_main)
        while not self.is_finished:
            self._show_notices(display)
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
                is_interrupted = self._is_stop_requested(stop, step)
                if step % run.checkpoint_every == 0 or is_best or self.is_finished or is_interrupted:
                    self._checkpoint(meter)
            if self.is_finished and not is_last:
                display.notify(f"no better evaluation since step {self.progress.best_step}: stopped after step {step}")
            elif is_interrupted and not is_last:
                end = "saved; continue with --resume" if run.keep else "nothing is saved, since run.keep is 0"
                display.notify(f"interrupted after step {step}: {end}")
                return

    def rehearse(self, step: int, feed: Feed, meter: Meter) -> None:
        """Take one optimiser step as if it had this number, to time it; the caller restores the weights."""
        self.progress.step = step
        self._step(feed, meter)

    def _step(self, feed: Feed, meter: Meter) -> None:
        """Take one optimiser step."""
        step, run, train_step = self.progress.step, self.method.run, self.train_step
        self.model.redraw_features(step, run.seed)
        if self.before_step is not None:
            self.before_step(self.model, step)
        phase = self.method.phase(step)
        data = self.data.phases[phase]
        taken = feed.take(phase, self.method.micro_batches(step, self.processes), meter)
        draws = [(data.seed, item.cursor.epoch, item.cursor.window, item.cursor.index) for item in taken]
        train_step.learn([item.prepared for item in taken], draws, self.method.rate(step), meter)
        tokens = sum(item.real_tokens for item in taken)
        flops = tokens * data.flops_per_token
        meter.tokens, meter.flops = meter.tokens + tokens, meter.flops + flops
        progress = self.progress
        progress.step += 1
        progress.tokens += tokens * self.processes
        progress.flops += flops * self.processes
        if not self.is_finished:  # reading the log or evaluating would otherwise leave the device without work
            step = progress.step
            feed.fetch(self.method.phase(step), self.method.micro_batches(step, self.processes), meter)

    def _evaluate(self, display: Display) -> bool:
        """Evaluate on the held-out split; return True if it is the best evaluation so far."""
        row = self.evaluate()
        if row is None:
            return False
        self._write({"kind": "held_out", "step": self.progress.step, **row}, display)
        progress = self.progress
        # equal scores are common on little data; the lower loss breaks ties
        score = row.get("score", -row["loss"]), -row["loss"]
        if progress.best is not None and not score > progress.best:
            progress.since_best += 1
            return False
        progress.best, progress.best_step, progress.since_best = score, progress.step, 0
        return True

    def evaluate(self) -> LogRow | None:
        """Return losses and metrics on the held-out split, with fixed masks; None without such a split.

        With an evaluator, its "score" decides which evaluation is the best, otherwise the loss.
        """
        if self.evaluator is not None:
            return self.evaluator(self.train_step)
        if self.data.held_out_plan is None or self.data.held_out_reader is None:
            return None
        train_step = self.train_step
        meter = Meter(train_step.evaluation.terms, train_step.device)
        plans = list(islice(self.data.held_out_plan.one_epoch(), self.method.run.evaluate_batches))
        for first in range(0, len(plans), self.processes):
            # sharded weights need every process: one without a batch left measures one that does not count
            own = first + train_step.rank
            plan = plans[own] if own < len(plans) else plans[first]
            batch = self.data.held_out_reader[plan].batch.to(train_step.device)
            prepared = train_step.evaluation.prepare(batch, 0)
            sums = train_step.measure(prepared)
            if own < len(plans):
                meter.add(sums, train_step.evaluation.counts(prepared))
        return meter.metrics(train_step.reduce([meter.sums]))

    def save(self) -> None:
        """Write a checkpoint."""
        self.train_step.accelerator.wait_for_everyone()
        if self.train_step.is_main or self.train_step.is_sharded:
            save_checkpoint(
                self.out / "checkpoints",
                self.model,
                self.train_step.optimizer,
                self.progress,
                self.conditions,
                keep=max(self.method.run.keep, self.method.run.average_last),
                writes=self.train_step.is_main,
            )
        self.train_step.accelerator.wait_for_everyone()

    def _checkpoint(self, meter: Meter) -> None:
        """Save the run with the meter's sums; raise InputError if they are not finite, as the weights then are not."""
        self.progress.meter = meter.record(self.train_step.reduce([meter.sums]))
        if self.progress.meter:
            self._check_finite(self._metrics_row(meter))
        if self.method.run.keep:
            self.save()

    def _average(self, display: Display) -> None:
        """Average the weights of the last checkpoints and evaluate the result."""
        count = load_average(self.out / "checkpoints", self.model, self.method.run.average_last)
        row = self.evaluate()
        if row is not None:
            self._write({"kind": "held_out", "step": self.progress.step, "averaged": count, **row}, display)

    def _restore(self, resume: bool) -> list[str]:
        """Restore the newest checkpoint, or the one to branch from; return warnings about damaged ones."""
        folder = self.out / "checkpoints"
        path, warnings = None, list[str]()
        if resume:
            path, warnings = find_checkpoint(folder)
            if path is None and warnings:
                raise InputError(f"{str(folder)!r} has no complete checkpoint: {warnings[0]}")
        path = path or self.branch
        if path is not None:
            self.progress, notices = load_checkpoint(
                path, self.model, self.train_step.optimizer, self.conditions, is_branch=path == self.branch
            )
            warnings += notices
        found = torch.tensor(self.progress.step, device=self.train_step.device)
        if self.train_step.reduce([{"step": found}])["step"] != found * self.processes:
            raise InputError(
                f"the processes found different checkpoints in {str(folder)!r}; all machines must share it"
            )
        return warnings

    def _is_stop_requested(self, stop: StopRequest, step: int) -> bool:
        """Return whether any process got a stop signal; several processes agree at logged steps only, to save time."""
        if self.processes == 1:
            return stop.is_made
        if step % self.method.run.log_every:
            return False
        flag = torch.tensor(float(stop.is_made), device=self.train_step.device)
        return bool(self.train_step.reduce([{"stop": flag}])["stop"] > 0)

    def _health(self) -> HealthMonitor:
        """Build the health monitor and replay the rows that are already in the log."""
        steps = self.method.run.steps
        # only the main process prints notices, so only it needs the unigram level
        baseline = self.baseline if self.train_step.is_main else None
        if baseline is not None and self.train_step.objective.terms[baseline.term].weight == 0:
            baseline = None  # this term has weight 0: its loss need not fall
        health = HealthMonitor(steps, round(self.method.schedule.warmup * steps), baseline)
        for row in self.log.rows:
            health.examine(row)
        return health

    def _metrics_row(self, meter: Meter) -> LogRow:
        """Return the metrics of the meter as the beginning of a log row."""
        metrics = meter.metrics(self.train_step.reduce([meter.sums]))
        row = {"kind": "training", "step": self.progress.step, **metrics}
        row["gradient_norm"] = float(meter.gradient_norm) / max(1, meter.steps)
        row["learning_rate"] = self.method.rate(self.progress.step - 1)
        return row

    def _training_row(self, meter: Meter) -> LogRow:
        row, seconds, progress = self._metrics_row(meter), meter.seconds(), self.progress
        progress.seconds += seconds
        row |= {"tokens": progress.tokens, "flops": progress.flops, "seconds": round(progress.seconds, 3)}
        row["tokens_per_second"] = round(meter.tokens * self.processes / seconds, 1)
        row["data_wait"] = round(meter.waited / seconds, 4)
        if self.peak is not None:
            row["utilisation"] = round(meter.flops / seconds / self.peak, 4)
        return row

    def _write(self, row: LogRow, display: Display) -> None:
        """Log and show a row; raise InputError if its loss or gradient norm is not finite."""
        self._check_finite(row)
        self.log.write(row)
        display.show(row)

    def _notice(self, rows: list[LogRow], display: Display) -> None:
        for row in rows:
            self.log.write(row)
            display.notify(row["text"])

    def _show_notices(self, display: Display) -> None:
        """Show the messages of the training step, such as the choice of its mode."""
        for notice in self.train_step.notices:
            display.notify(notice)
        self.train_step.notices.clear()

    def _check_finite(self, row: LogRow) -> None:
        reason = non_finite_reason(row)
        if reason is not None:
            step = self.progress.step
            text = (
                f"{reason} with a learning rate of {self.method.rate(step - 1):g}; {describe_checkpoint(self.out)}; "
                "start again with a lower optimizer.learning_rate, a longer schedule.warmup or a lower optimizer.clip"
            )
            self.log.write({"kind": "notice", "step": step, "name": "not_finite", "text": text})
            raise InputError(text)

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
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.utils.data import Dataset

from bertsmith.batches.loader import Loaded, load_batches
from bertsmith.batches.plan import Cursor, Stream
from bertsmith.batches.random import key, seed_everything
from bertsmith.errors import InputError
from bertsmith.models.model import Model
from bertsmith.objectives.base import Objective, Sums
from bertsmith.training.checkpoint import (
    Progress,
    find_checkpoint,
    load_average,
    load_checkpoint,
    remove_leftovers,
    save_checkpoint,
)
from bertsmith.training.display import Display
from bertsmith.training.hardware import device_type, peak_flops
from bertsmith.training.log import RunLog
from bertsmith.training.meter import Meter
from bertsmith.training.method import Method, RunConfig
from bertsmith.training.signals import StopRequest


@dataclass(frozen=True)
class TrainingData:
    """The stream to learn from and the part that is held out."""

    plan: Stream[Any]
    reader: Dataset[Loaded]
    held_out_plan: Stream[Any] | None
    held_out_reader: Dataset[Loaded] | None


class _Step(nn.Module):
    """Model and objective as one module, so that one wrapper synchronises the gradients of both."""

    def __init__(self, model: Model, compute: Callable[[Model, Any], dict[str, Sums]]) -> None:
        super().__init__()
        self.model, self.compute = model, compute

    def forward(self, prepared: Any) -> dict[str, Sums]:
        return self.compute(self.model, prepared)


def _check_trackers(run: RunConfig) -> None:
    """Raises a sentence if the machine lacks a tracker that was asked for by name."""
    available = {str(tracker) for tracker in get_available_trackers()}
    for tracker in run.track:
        if tracker not in available:
            raise InputError(f"run.track names {tracker!r}, which is not installed (pip install {tracker})")


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
        run = method.run
        _check_trackers(run)
        # accelerate keeps its precision for the whole process; a second run in it may want another one
        AcceleratorState._reset_state(reset_partial_state=False)
        self.accelerator = Accelerator(
            cpu=device_type(device) == "cpu",
            mixed_precision="bf16" if run.is_half(device) else "no",
            log_with=list(run.track) or None,
            project_dir=out,
            kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
        )
        self.device, self.processes = self.accelerator.device, self.accelerator.num_processes
        micro, whole = data.plan.config.micro_tokens, method.batch.tokens
        if whole % (micro * self.processes):
            raise InputError(
                f"batch.tokens is {whole}, which is not a multiple of sequences.micro_tokens {micro} times the "
                f"{self.processes} processes; change one of them"
            )
        self.model = model.to(self.device)
        self.objective = objective.to(self.device)
        self.evaluation = objective.for_evaluation().to(self.device)
        compute: Callable[[Model, Any], dict[str, Sums]] = self.objective
        self.is_graphed = run.compile == "graphs"
        if self.is_graphed and self.device.type != "cuda":
            raise InputError(f'run.compile is "graphs", which needs a GPU; the device is {self.device.type}')
        if run.compile != "off":
            mode = "reduce-overhead" if self.is_graphed else "default"
            compute = torch.compile(lambda model, prepared: self.objective(model, prepared), mode=mode)
        self.optimizer = method.optimizer.build(self.model)
        if self.is_graphed:
            # gradients must not live in the memory of a graph, which its next replay overwrites
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        self.step_module = self.accelerator.prepare(_Step(self.model, compute))
        self.log = RunLog(out / "log.jsonl", self.accelerator)
        self.progress = Progress()
        peak = peak_flops(self.device)
        self.peak_tokens = None if peak is None else peak * self.processes / flops_per_token
        self.show = show and self.accelerator.is_main_process

    def run(self, *, resume: bool = False) -> Progress:
        """Trains to the last step, or until SIGTERM or SIGINT; either way everything is saved."""
        run = self.method.run
        complaints = self._resume() if resume else []
        self.log.rewind(self.progress.step)
        if run.track:
            self.accelerator.init_trackers("bertsmith", config={"steps": run.steps, "seed": run.seed})
        batches = self._stream()
        with StopRequest() as stop, Display(run.steps, self.progress.step, visible=self.show) as display:
            for complaint in complaints:
                display.say(complaint)
            self._loop(batches, stop, display)
            if self.is_finished and run.average_last > 1:
                self._average(display)
        return self.progress

    def close(self) -> None:
        """Ends trackers and the talk between processes; nothing may follow that waits for the others."""
        # a gloo thread needs the interpreter to let go of the tensor of a sum, and the end of the group waits for its
        # threads. PyTorch's handle of the group gives the interpreter away for that; the wrapper, which holds the group
        # too, does not (torch 2.13), so it must not be the last to go
        del self.step_module
        self.accelerator.free_memory()
        self.accelerator.end_training()

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
        loaded = [next(batches) for _ in range(count)]
        prepared = []
        for item in loaded:
            prepared.append(self.objective.prepare(item.batch.to(self.device), key(run.seed, 5)))
        totals = self._reduce([self.objective.counts(item) for item in prepared])

        rate = self.method.optimizer.learning_rate * self.method.schedule.factor(step, run.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.step_module.train()
        for index, (item, inputs) in enumerate(zip(loaded, prepared, strict=True)):
            seed_everything(run.seed, item.cursor.epoch, item.cursor.window, item.cursor.index)
            is_synchronised = index == count - 1
            if self.is_graphed:
                torch.compiler.cudagraph_mark_step_begin()
            with nullcontext() if is_synchronised else self.accelerator.no_sync(self.step_module):
                sums = self.step_module(inputs)
                # an average over processes is taken in the backward pass; a sum is wanted
                loss = sum(sums[term].loss / totals[term].clamp(min=1) for term in self.objective.terms)
                self.accelerator.backward(loss * self.processes)
            meter.add(sums, self.objective.counts(inputs), item.batch.real_tokens)
        if self.method.optimizer.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.method.optimizer.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not self.is_graphed)
        cursor = loaded[-1].cursor
        self.progress.step += 1
        self.progress.tokens += sum(item.batch.real_tokens for item in loaded) * self.processes
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

    @torch.no_grad()
    def evaluate(self) -> dict[str, float] | None:
        """The losses and accuracies on the held-out part with masks that never change; None without such a part."""
        if self.data.held_out_plan is None or self.data.held_out_reader is None:
            return None
        self.model.eval()
        meter = self._meter()
        rank = self.accelerator.process_index
        for number, plan in enumerate(self.data.held_out_plan.one_epoch()):
            if number == self.method.run.evaluate_batches:
                break
            if number % self.processes != rank:
                continue
            batch = self.data.held_out_reader[plan].batch.to(self.device)
            prepared = self.evaluation.prepare(batch, 0)
            with self.accelerator.autocast():
                meter.add(self.evaluation(self.model, prepared), self.evaluation.counts(prepared), batch.real_tokens)
        return self._figures(meter)

    def save(self) -> None:
        """Writes a checkpoint."""
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            keep = max(2, self.method.run.average_last)
            save_checkpoint(
                self.out / "checkpoints", self.model, self.optimizer, self.progress, self.fingerprint, keep=keep
            )
        self.accelerator.wait_for_everyone()

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
            self.progress = load_checkpoint(path, self.model, self.optimizer, self.fingerprint)
        return complaints

    def _stream(self) -> Iterator[Loaded]:
        """This process's micro-batches from where the run stands."""
        rank = self.accelerator.process_index
        plans = self.data.plan.from_cursor(
            Cursor(*self.progress.cursor), skip=self.progress.skip + rank, every=self.processes
        )
        is_pinned = self.device.type == "cuda"
        return iter(load_batches(self.data.reader, plans, workers=self.method.run.workers, pin=is_pinned))

    def _is_asked_to_stop(self, stop: StopRequest, step: int) -> bool:
        """Whether any process was asked to stop; several agree on it at logged steps only, which costs no waiting."""
        if self.processes == 1:
            return stop.is_made
        if step % self.method.run.log_every:
            return False
        flag = torch.tensor(float(stop.is_made), device=self.device)
        return bool(self.accelerator.reduce(flag, reduction="sum") > 0)

    def _training_row(self, meter: Meter) -> dict[str, Any]:
        figures = self._figures(meter)
        seconds = meter.seconds()
        speed = meter.tokens * self.processes / seconds
        self.progress.seconds += seconds
        row = {"kind": "training", "step": self.progress.step, **figures}
        row |= {"learning_rate": self.optimizer.param_groups[0]["lr"], "tokens": self.progress.tokens}
        row |= {"seconds": round(self.progress.seconds, 3), "tokens_per_second": round(speed, 1)}
        if self.peak_tokens is not None:
            row["utilisation"] = round(speed / self.peak_tokens, 4)
        return row

    def _figures(self, meter: Meter) -> dict[str, float]:
        """Loss in all, and of each term its loss and what else it reports, over all processes."""
        losses, counts = self._reduce([meter.loss]), self._reduce([meter.count])
        # one type on all processes, even where one has nothing to add; hits stay exact
        others = self._reduce([{name: other.double() for name, other in meter.others.items()}])
        figures = {"loss": 0.0}
        for term, names in self.objective.terms.items():
            count = counts[term].clamp(min=1)
            figures[f"{term}_loss"] = float(losses[term] / count)
            figures |= {f"{term}_{name}": float((others[f"{term}_{name}"] / count).float()) for name in names}
            figures["loss"] += figures[f"{term}_loss"]
        return figures

    def _reduce(self, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """The sum of each term over the parts and all processes."""
        totals = {term: torch.stack([part[term] for part in parts]).sum() for term in parts[0]}
        if self.processes == 1:
            return totals
        return {term: self.accelerator.reduce(total, reduction="sum") for term, total in totals.items()}

    def _meter(self) -> Meter:
        return Meter(self.objective.terms, self.device)

"""One training step of a model on its device: forward, backward and optimiser, in one process or several."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bertsmith.data.batch import TokenBatch, TrainingBatch
from bertsmith.data.devices import device_type
from bertsmith.data.nested import map_tensors
from bertsmith.data.random import seed_everything
from bertsmith.errors import InputError
from bertsmith.models.encoder import Encoder
from bertsmith.models.masks import masked_weights
from bertsmith.models.model import Model
from bertsmith.objectives.base import Objective, Sums
from bertsmith.training import sharding
from bertsmith.training.compilation import (
    UNKNOWN_LOAD,
    Circumstances,
    Mode,
    TrainingLoad,
    choose_mode,
    compile_layers,
    describe_choice,
    describe_fall_back,
    is_compilation_error,
    uncompile_layers,
)
from bertsmith.training.determinism import enter_deterministic_mode, explains_nondeterminism
from bertsmith.training.graphs import Graphed, RecordingError
from bertsmith.training.meter import Meter
from bertsmith.training.run_config import Method, RunConfig


class _Step(nn.Module):
    """Model and objective as one module, so that one wrapper synchronises the gradients of both."""

    def __init__(self, model: Model, compute: Callable[[Model, Any], dict[str, Sums]], evaluation: Any) -> None:
        super().__init__()
        self.model, self.compute, self.evaluation = model, compute, evaluation

    def forward(self, prepared: Any, is_evaluation: bool = False) -> dict[str, Sums]:
        return self.evaluation(self.model, prepared) if is_evaluation else self.compute(self.model, prepared)


class TrainStep:
    """Forward, backward and optimiser step of one model, independent of data, logs and files."""

    def __init__(
        self,
        model: Model,
        objective: Objective[Any, Any],
        method: Method,
        out: Path,
        *,
        device: str = "auto",
        load: TrainingLoad = UNKNOWN_LOAD,
    ) -> None:
        run = method.run
        _check_trackers(run)
        # accelerate keeps one precision per process; a second run may need another
        AcceleratorState._reset_state(reset_partial_state=False)
        is_sharded, half = sharding.is_requested(), run.is_half(device)
        with sharding.hidden_from_accelerate():
            self.accelerator = Accelerator(
                cpu=device_type(device) == "cpu",
                mixed_precision="bf16" if half else "no",
                log_with=list(run.track) or None,
                project_dir=out,
                kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
            )
        self.device, self.processes = self.accelerator.device, self.accelerator.num_processes
        self.rank = self.accelerator.process_index
        self._leave_deterministic_mode = enter_deterministic_mode(self.device) if run.deterministic else None
        self.is_main = self.accelerator.is_main_process
        self.model = model.to(self.device)
        self.objective = objective.to(self.device)
        self.evaluation = objective.for_evaluation().to(self.device)
        self.is_sharded = is_sharded and torch.distributed.is_initialized()  # one process has nothing to shard
        self.masked_weights = masked_weights(self.model)
        if self.is_sharded and self.masked_weights:
            raise InputError(
                "the model has masks and accelerate's config requests sharded weights (FSDP); allowed: DDP"
            )
        self.notices: list[str] = []
        """Messages for the user that the trainer has not shown yet."""
        self.is_auto = run.compile == "auto"
        mode = self._choose_mode(run, load)
        compute: Callable[[Model, Any], dict[str, Sums]] = self.objective
        if mode in ("on", "graphs"):
            compile_layers(self.model)
        elif mode == "whole":
            compute = torch.compile(self.objective.__call__)
        step = _Step(self.model, compute, self.evaluation)
        if self.is_sharded:
            self.step_module: Any = sharding.shard(step, self.device, self.processes, half=half)
        else:
            self.step_module = self.accelerator.prepare(step)
        # after sharding, which replaces the parameters
        self.portions = self.objective.portions(self.model)
        self.config = method.optimizer
        self.optimizer = method.optimizer.build(self.portions)
        self.parameters = [parameter for portion in self.portions for parameter in portion.parameters]
        self._recorded_pass: Graphed[[Any, dict[str, Tensor]], dict[str, Sums]] | None = None
        self._recorded_prepare: Graphed[[Any, int], Any] | None = None
        self._set_mode(mode)

    def prepare(self, batch: TrainingBatch, seed: int) -> Any:
        """Return a micro-batch on the device as the objective prepares it."""
        batch = batch.to(self.device)
        if self._recorded_prepare is None or not isinstance(batch, TokenBatch):
            return self.objective.prepare(batch, seed)
        try:
            # a copy: the next micro-batch overwrites what the graph returns
            return map_tensors(torch.clone, self._recorded_prepare(batch.recordable(), seed))
        except RecordingError as error:
            if not self.is_auto:
                raise
            self._fall_back("on", error)
            return self.objective.prepare(batch, seed)

    @explains_nondeterminism
    def learn(self, prepared: Sequence[Any], draws: Sequence[tuple[int, ...]], rate: float, meter: Meter) -> None:
        """Take one optimiser step at a learning rate; `draws` seeds the dropout of each micro-batch."""
        counts = [self.objective.counts(item) for item in prepared]
        totals = self.reduce(counts)
        self.config.set_rate(self.optimizer, rate)
        self.step_module.train()
        for index, (inputs, draw) in enumerate(zip(prepared, draws, strict=True)):
            seed_everything(*draw)
            with self.accelerator.autocast():
                parts = self.objective.parts(inputs)
            for position, part in enumerate(parts, start=1):
                is_first, is_last = index + position == 1, index == len(prepared) - 1 and position == len(parts)
                with self._gradients(is_synchronised=is_last):
                    sums = self._run_pass(part, totals, draw if is_first else None)
                # immediately: the next replay of a CUDA graph overwrites its outputs
                meter.add(sums, counts[index])
        norms = [self._clip(portion.parameters) for portion in self.portions]
        self.optimizer.step()
        for masked in self.masked_weights:  # moments from before the pruning still move a weight
            masked.clear()
        # graphs add to the same gradients in every step
        self.optimizer.zero_grad(set_to_none=self.mode != "graphs")
        meter.add_step(torch.stack(norms).norm())

    def _run_pass(self, part: Any, totals: dict[str, Tensor], draw: tuple[int, ...] | None) -> dict[str, Sums]:
        """Run forward and backward pass; if an automatically chosen mode fails, continue in a safer one.

        `draw` is given for the first pass of a step, before which there are no gradients.
        """
        try:
            run = self._recorded_pass or self._forward_backward
            return run(part, totals)
        except RecordingError as error:  # nothing was computed
            if not self.is_auto:
                raise
            self._fall_back("on", error)
        except RuntimeError as error:
            if not self.is_auto or self.mode == "off" or draw is None or not is_compilation_error(error):
                raise
            self._fall_back("off", error)
            seed_everything(*draw)  # some layers have drawn dropout
        return self._run_pass(part, totals, draw)

    def _forward_backward(self, part: Any, totals: dict[str, Tensor]) -> dict[str, Sums]:
        """Add the gradients of one part of a micro-batch; `totals` are the counts of the whole step."""
        with self.accelerator.autocast():
            sums: dict[str, Sums] = self.step_module(part)
        terms = self.objective.terms.items()
        # the backward pass averages over processes, but the loss is a sum
        factor = self.processes
        loss = factor * sum(term.weight * (sums[name].loss / totals[name].clamp(min=1)) for name, term in terms)
        if self.mode == "graphs":
            self._add_gradients(loss)
        else:
            self.accelerator.backward(loss)
        return sums

    def _add_gradients(self, loss: Tensor) -> None:
        """Add the gradients of a loss to tensors that stay in place, by a few kernels instead of one per parameter."""
        gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        sums, summands = list[Tensor](), list[Tensor]()
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            sums.append(parameter.grad)
            summands.append(gradient)
        torch._foreach_add_(sums, summands)

    @torch.no_grad()
    def measure(self, prepared: Any) -> dict[str, Sums]:
        """Return the losses and metrics of a micro-batch in evaluation mode."""
        self.step_module.eval()
        # a few batches of other shapes are not worth compiling for
        with self.accelerator.autocast(), torch.compiler.set_stance("force_eager"):
            sums = self.step_module(prepared, is_evaluation=True)
        if self.is_sharded:
            # no backward pass follows that would free the root's gathered weights; train() empties the weight caches
            self.step_module.reshard()
            self.step_module.train()
        return sums

    def reduce(self, parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return the sum of each name over the given parts and all processes."""
        totals = {name: torch.stack([part[name] for part in parts]).sum() for name in parts[0]}
        if self.processes == 1:
            return totals
        return {name: self.accelerator.reduce(total, reduction="sum") for name, total in totals.items()}

    def close(self, *, is_last: bool = True) -> None:
        """End the trackers and, after the last training of a command, the process group.

        No collective operation may follow then.
        """
        # gloo threads need the GIL to release the tensors they reduced, and destroying the group waits for its threads.
        # PyTorch's own handle of the group releases the GIL meanwhile; the wrapper, which also holds the group, does
        # not (torch 2.13), so it must not be the last reference
        del self.step_module
        # frees the memory of the graphs, and the gradients that they add to
        self._recorded_pass = self._recorded_prepare = None
        self.optimizer.zero_grad()
        if self._leave_deterministic_mode is not None:
            self._leave_deterministic_mode()
        uncompile_layers(self.model)
        self.accelerator.free_memory()
        if is_last:
            self.accelerator.end_training()
        else:
            for tracker in self.accelerator.trackers:
                tracker.finish()

    def _gradients(self, is_synchronised: bool) -> AbstractContextManager[Any]:
        """Make backward passes reduce gradients over the processes, or only accumulate them locally."""
        if self.is_sharded:
            self.step_module.set_requires_gradient_sync(is_synchronised)
            return nullcontext()
        return nullcontext() if is_synchronised else self.accelerator.no_sync(self.step_module)

    def _choose_mode(self, run: RunConfig, load: TrainingLoad) -> Mode:
        """Return how steps run here; raise InputError for a mode that is not supported."""
        recomputes = any(isinstance(module, Encoder) and module.recomputes for module in self.model.modules())
        if recomputes and self.is_sharded:
            raise InputError(
                "the weights are sharded and the encoder is reversible or an equilibrium; allowed: whole weights on "
                "every process"
            )
        given = Circumstances(self.device.type, self.processes, self.is_sharded, recomputes, load)
        mode, reason = choose_mode(run.compile, given)
        if self.is_auto:
            self.notices.append(describe_choice(mode, reason))
        return mode

    def _set_mode(self, mode: Mode) -> None:
        """Set how passes run; the layers are already compiled."""
        self.mode: Mode = mode
        self._recorded_pass = self._recorded_prepare = None
        if mode == "graphs":
            self._recorded_pass = Graphed(self._forward_backward)
            self._recorded_prepare = Graphed(self.objective.prepare)

    def _fall_back(self, mode: Mode, error: Exception) -> None:
        """Continue in a safer mode and tell the user."""
        self.notices.append(describe_fall_back(self.mode, mode, error))
        if mode == "off":
            uncompile_layers(self.model)
            self.optimizer.zero_grad()
        self._set_mode(mode)

    def _clip(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Clip the gradient of some weights; return its norm before clipping."""
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if self.config.clip:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.config.clip, norm)
        return norm


def _check_trackers(run: RunConfig) -> None:
    """Raise InputError if a tracker in run.track is not installed."""
    available = {str(tracker) for tracker in get_available_trackers()}
    for tracker in run.track:
        if tracker not in available:
            raise InputError(f"run.track names {tracker!r}, which is not installed (pip install {tracker})")

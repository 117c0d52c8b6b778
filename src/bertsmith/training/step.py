"""One training step of a model on its device: forward, backward and optimiser, in one process or several."""

import warnings
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

from bertsmith.data.devices import device_type
from bertsmith.data.random import seed_everything
from bertsmith.errors import InputError
from bertsmith.layers.block import Block
from bertsmith.models.encoder import Encoder
from bertsmith.models.masks import masked_weights
from bertsmith.models.model import Model
from bertsmith.objectives.base import Objective, Sums
from bertsmith.training import sharding
from bertsmith.training.determinism import enter_deterministic_mode, explains_nondeterminism
from bertsmith.training.meter import Meter
from bertsmith.training.run_config import Method, RunConfig

RECOMPILE_LIMIT = 128


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
        self, model: Model, objective: Objective[Any, Any], method: Method, out: Path, *, device: str = "auto"
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
        self.is_graphed = run.compile == "graphs"
        self._check_compile(run)
        step = _Step(self.model, self._compiled(run), self.evaluation)
        if self.is_sharded:
            self.step_module: Any = sharding.shard(step, self.device, self.processes, half=half)
        else:
            self.step_module = self.accelerator.prepare(step)
        # after sharding, which replaces the parameters
        self.portions = self.objective.portions(self.model)
        self.config = method.optimizer
        self.optimizer = method.optimizer.build(self.portions)

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
                if self.is_graphed:
                    torch.compiler.cudagraph_mark_step_begin()
                with self._gradients(is_synchronised=index == len(prepared) - 1 and position == len(parts)):
                    with self.accelerator.autocast():
                        sums = self.step_module(part)
                    terms = self.objective.terms.items()
                    loss = sum(term.weight * (sums[name].loss / totals[name].clamp(min=1)) for name, term in terms)
                    # the backward pass averages over processes, but the loss is a sum
                    self.accelerator.backward(loss * self.processes)
                # immediately: the next replay of a CUDA graph overwrites its outputs
                meter.add(sums, counts[index])
        norms = [self._clip(portion.parameters) for portion in self.portions]
        self.optimizer.step()
        for masked in self.masked_weights:  # moments from before the pruning still move a weight
            masked.clear()
        self.optimizer.zero_grad(set_to_none=not self.is_graphed)
        meter.add_step(torch.stack(norms).norm())

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
        if self._leave_deterministic_mode is not None:
            self._leave_deterministic_mode()
        for module in self.model.modules():
            if isinstance(module, Block):
                module.__dict__.pop("forward", None)  # a copy of the model would call this one's compiled layers
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

    def _check_compile(self, run: RunConfig) -> None:
        """Raise InputError if run.compile is not supported here; allocate gradients for CUDA graphs."""
        if self.is_sharded and run.compile in ("whole", "graphs"):
            raise InputError(f"run.compile is {run.compile!r} and the weights are sharded; allowed: off, on")
        if any(isinstance(module, Encoder) and module.recomputes for module in self.model.modules()):
            walk = "the encoder is reversible or an equilibrium"
            if run.compile != "off":
                raise InputError(f"run.compile is {run.compile!r} and {walk}; allowed: off")
            if self.is_sharded:
                raise InputError(f"the weights are sharded and {walk}; allowed: whole weights on every process")
        if not self.is_graphed:
            return
        if self.device.type != "cuda":
            raise InputError(f'run.compile is "graphs", which needs a GPU; the device is {self.device.type}')
        # gradients must not live in the memory of a graph, which its next replay overwrites
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def _compiled(self, run: RunConfig) -> Callable[[Model, Any], dict[str, Sums]]:
        if run.compile == "off":
            return self.objective
        if run.compile == "on":
            # the compiler inspects .grad of hidden states, about which PyTorch warns
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
            # layers of all shapes, phases and runs of this process count as one function, which by default is compiled
            # eight times; further shapes would run uncompiled, with a warning only
            torch._dynamo.config.recompile_limit = max(RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit)
            for module in self.model.modules():
                if isinstance(module, Block):
                    # layers of one shape share the compiled code; dynamic shapes would make it slower
                    module.forward = torch.compile(module.forward, dynamic=False)  # type: ignore[method-assign]
            return self.objective
        mode = "reduce-overhead" if self.is_graphed else "default"
        return torch.compile(lambda model, prepared: self.objective(model, prepared), mode=mode)

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

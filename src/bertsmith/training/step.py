"""A model on its devices: forward, backward and the optimiser's step, on one process or many."""

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

from bertsmith.data.random import seed_everything
from bertsmith.errors import InputError
from bertsmith.layers.block import Block
from bertsmith.models.model import Model
from bertsmith.objectives.base import Objective, Sums
from bertsmith.training import sharding
from bertsmith.training.meter import Meter
from bertsmith.training.run_config import Method, RunConfig, device_type

_KINDS = 128  # of layers that are compiled in one process


class _Step(nn.Module):
    """Model and objective as one module, so that one wrapper synchronises the gradients of both."""

    def __init__(self, model: Model, compute: Callable[[Model, Any], dict[str, Sums]], evaluation: Any) -> None:
        super().__init__()
        self.model, self.compute, self.evaluation = model, compute, evaluation

    def forward(self, prepared: Any, is_evaluation: bool = False) -> dict[str, Sums]:
        return self.evaluation(self.model, prepared) if is_evaluation else self.compute(self.model, prepared)


class TrainStep:
    """Computes and moves the weights of one model; knows nothing of data, logs or files."""

    def __init__(
        self, model: Model, objective: Objective[Any, Any], method: Method, out: Path, *, device: str = "auto"
    ) -> None:
        run = method.run
        _check_trackers(run)
        # accelerate keeps its precision for the whole process; a second run in it may want another one
        AcceleratorState._reset_state(reset_partial_state=False)
        is_sharded, half = sharding.is_asked_for(), run.is_half(device)
        with sharding.unseen():
            self.accelerator = Accelerator(
                cpu=device_type(device) == "cpu",
                mixed_precision="bf16" if half else "no",
                log_with=list(run.track) or None,
                project_dir=out,
                kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
            )
        self.device, self.processes = self.accelerator.device, self.accelerator.num_processes
        self.rank = self.accelerator.process_index
        self.is_main = self.accelerator.is_main_process
        self.model = model.to(self.device)
        self.objective = objective.to(self.device)
        self.evaluation = objective.for_evaluation().to(self.device)
        self.is_sharded = is_sharded and torch.distributed.is_initialized()  # one process alone has nothing to share
        self.is_graphed = run.compile == "graphs"
        self._check_compile(run)
        step = _Step(self.model, self._compiled(run), self.evaluation)
        if self.is_sharded:
            self.step_module: Any = sharding.shard(step, self.device, self.processes, half=half)
        else:
            self.step_module = self.accelerator.prepare(step)
        # after sharding, which puts other parameters in the place of those there were
        self.portions = self.objective.portions(self.model)
        self.config = method.optimizer
        self.optimizer = method.optimizer.build(self.portions)

    def learn(self, prepared: Sequence[Any], draws: Sequence[tuple[int, ...]], rate: float, meter: Meter) -> None:
        """One optimiser step at a learning rate; `draws` seeds the dropout of each micro-batch."""
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
                    # an average over processes is taken in the backward pass; a sum is wanted
                    self.accelerator.backward(loss * self.processes)
                # at once: what a graph gave lives in memory that its next replay overwrites
                meter.add(sums, counts[index])
        norms = [self._clip(portion.parameters) for portion in self.portions]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not self.is_graphed)
        meter.add_step(torch.stack(norms).norm())

    @torch.no_grad()
    def measure(self, prepared: Any) -> dict[str, Sums]:
        """What a micro-batch gives in evaluation."""
        self.step_module.eval()
        # batches of other shapes, a few times: not worth compiling for
        with self.accelerator.autocast(), torch.compiler.set_stance("force_eager"):
            sums = self.step_module(prepared, is_evaluation=True)
        if self.is_sharded:
            # no backward pass follows that would free the root's weights, and what layers remember of them
            self.step_module.reshard()
            self.step_module.train()
        return sums

    def reduce(self, parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """The sum of each name over the parts and all processes."""
        totals = {name: torch.stack([part[name] for part in parts]).sum() for name in parts[0]}
        if self.processes == 1:
            return totals
        return {name: self.accelerator.reduce(total, reduction="sum") for name, total in totals.items()}

    def close(self, *, is_last: bool = True) -> None:
        """Ends trackers and, after the last training of a command, the talk between processes: nothing may follow then
        that waits for the others."""
        # a gloo thread needs the interpreter to let go of the tensor of a sum, and the end of the group waits for its
        # threads. PyTorch's handle of the group gives the interpreter away for that; the wrapper, which holds the group
        # too, does not (torch 2.13), so it must not be the last to go
        del self.step_module
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
        """Inside, a backward pass adds its gradient up over the processes, or to what this one has so far."""
        if self.is_sharded:
            self.step_module.set_requires_gradient_sync(is_synchronised)
            return nullcontext()
        return nullcontext() if is_synchronised else self.accelerator.no_sync(self.step_module)

    def _check_compile(self, run: RunConfig) -> None:
        """Raises a sentence if a way to compile is asked for where it cannot be; makes room for graphs' gradients."""
        if self.is_sharded and run.compile in ("whole", "graphs"):
            raise InputError(f"run.compile is {run.compile!r} and the weights are sharded; allowed: off, on")
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
            # the compiler looks at all that enters a layer, states among them, and PyTorch has a warning about that
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
            # layers of every shape, in every phase and run of this process, count as one function: from the ninth kind
            # on they would be left uncompiled, with a warning and no more
            torch._dynamo.config.recompile_limit = max(_KINDS, torch._dynamo.config.recompile_limit)
            for module in self.model.modules():
                if isinstance(module, Block):
                    # what one layer was compiled to serves all of its shape; sizes that vary would make slower code
                    module.forward = torch.compile(module.forward, dynamic=False)  # type: ignore[method-assign]
            return self.objective
        mode = "reduce-overhead" if self.is_graphed else "default"
        return torch.compile(lambda model, prepared: self.objective(model, prepared), mode=mode)

    def _clip(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Clips the gradient of some weights; returns the norm it had."""
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if self.config.clip:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.config.clip, norm)
        return norm


def _check_trackers(run: RunConfig) -> None:
    """Raises a sentence if the machine lacks a tracker that was asked for by name."""
    available = {str(tracker) for tracker in get_available_trackers()}
    for tracker in run.track:
        if tracker not in available:
            raise InputError(f"run.track names {tracker!r}, which is not installed (pip install {tracker})")

"""The choice of how training steps run: eagerly, with compiled layers, compiled as a whole, or as CUDA graphs."""

import warnings
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from bertsmith.errors import InputError, first_line
from bertsmith.layers.block import Block

Mode = Literal["off", "on", "whole", "graphs"]
Compile = Literal["auto", "off", "on", "whole", "graphs"]
"""Values of run.compile."""

MIN_PASSES = 500
"""Forward and backward passes of a run that repay compilation: it takes about 20 s and saves some 50 ms per pass."""
LONG_PASS_FLOPS = 1e14
"""FLOPs of a pass from which kernel launches do not limit the speed: a tenth of a second on the fastest GPU."""
RECOMPILE_LIMIT = 128


@dataclass(frozen=True)
class TrainingLoad:
    """The properties of a run's data that the choice depends on."""

    has_one_shape: bool = False
    """Whether all micro-batches of a phase have the same shape."""
    keeps_shapes: bool = True
    """Whether the objective's tensors then have the same shapes, too."""
    passes: int = 0
    """Forward and backward passes of all processes."""
    flops: float = 0.0
    """FLOPs of one pass."""


UNKNOWN_LOAD = TrainingLoad()


@dataclass(frozen=True)
class Circumstances:
    """Everything that the choice depends on."""

    device: str
    """Type of the device."""
    processes: int
    is_sharded: bool
    recomputes: bool
    """Whether the backward pass evaluates layers again (reversible and equilibrium encoders)."""
    load: TrainingLoad


def choose_mode(wanted: Compile, given: Circumstances) -> tuple[Mode, str]:
    """Return the mode of a run and the reason; raise InputError if the wanted mode is not supported."""
    if wanted == "auto":
        return _automatic_mode(given)
    if given.is_sharded and wanted in ("whole", "graphs"):
        raise InputError(f"run.compile is {wanted!r} and the weights are sharded; allowed: auto, off, on")
    if given.recomputes and wanted != "off":
        raise InputError(
            f"run.compile is {wanted!r} and the encoder is reversible or an equilibrium; allowed: auto, off"
        )
    if wanted == "graphs" and given.device != "cuda":
        raise InputError(f'run.compile is "graphs", which needs a GPU; the device is {given.device}')
    if wanted == "graphs" and given.processes > 1:
        raise InputError(
            f'run.compile is "graphs" with {given.processes} processes, which exchange gradients outside of graphs; '
            "allowed: auto, off, on, whole"
        )
    return wanted, "as set"


def _automatic_mode(given: Circumstances) -> tuple[Mode, str]:
    """Return the fastest mode that is safe."""
    load = given.load
    if given.device != "cuda":
        return "off", f"the device is {given.device}"
    if given.recomputes:
        return "off", "the encoder is reversible or an equilibrium"
    if not load.has_one_shape:
        return "off", "the shapes of batches vary"
    passes = load.passes // given.processes
    if passes < MIN_PASSES:
        return "off", f"{passes:,} passes do not repay compilation"
    if given.is_sharded:
        return "on", "the weights are sharded"
    if given.processes > 1:
        return "on", "several processes exchange gradients"
    if not load.keeps_shapes:
        return "on", "the objective computes with as many tokens as are real"
    if load.flops >= LONG_PASS_FLOPS:
        return "on", "the passes are so long that kernel launches do not limit the speed"
    return "graphs", "batches have one shape, and the run is long"


def describe_choice(mode: Mode, reason: str) -> str:
    """Return the notice about an automatic choice."""
    return f'run.compile is "auto": {_DESCRIPTIONS[mode]} ("{mode}"), because {reason}'


def describe_fall_back(failed: Mode, mode: Mode, error: Exception) -> str:
    """Return the notice about an automatic choice that failed."""
    return f'run.compile is "auto": {_DESCRIPTIONS[mode]} ("{mode}"), because "{failed}" failed: {first_line(error)}'


_DESCRIPTIONS: dict[Mode, str] = {
    "off": "steps are not compiled",
    "on": "each layer is compiled",
    "whole": "steps are compiled as a whole",
    "graphs": "each layer is compiled and passes are replayed as CUDA graphs",
}


def compile_layers(model: nn.Module) -> None:
    """Compile every layer of a model by itself; layers of one shape share the compiled code."""
    # the compiler inspects .grad of hidden states, about which PyTorch warns
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    # layers of all shapes, phases and runs of this process count as one function, which by default is compiled
    # eight times; further shapes would run uncompiled, with a warning only
    torch._dynamo.config.recompile_limit = max(RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit)
    for module in model.modules():
        if isinstance(module, Block):
            # dynamic shapes would make it slower
            module.forward = torch.compile(module.forward, dynamic=False)  # type: ignore[method-assign]


def uncompile_layers(model: nn.Module) -> None:
    """Undo `compile_layers`: a copy of the model would call this one's compiled layers."""
    for module in model.modules():
        if isinstance(module, Block):
            module.__dict__.pop("forward", None)


def is_compilation_error(error: RuntimeError) -> bool:
    """Return whether torch.compile raised an error, so that the same code can run without it."""
    return isinstance(error, torch._dynamo.exc.TorchDynamoException)

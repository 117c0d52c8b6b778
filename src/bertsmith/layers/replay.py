"""Replay of random draws: a layer that is computed again must drop the same values as the first time."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from bertsmith.errors import InputError


@dataclass(frozen=True)
class GeneratorStates:
    """States of PyTorch's global generators that layers draw from: the CPU's and the device's."""

    device: torch.device
    cpu: Tensor
    accelerator: Tensor | None
    """State of the device's generator; None on a CPU."""

    @classmethod
    def capture(cls, device: torch.device) -> "GeneratorStates":
        """Return the present states for layers that run on a device."""
        if torch.compiler.is_compiling():
            raise InputError("compiled code cannot replay random draws; use run.compile = 'off'")
        accelerator = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
        return cls(device, torch.get_rng_state(), accelerator)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Draw from these states inside the context; outside it the generators continue as if nothing had happened."""
        is_cpu = self.accelerator is None
        with torch.random.fork_rng([] if is_cpu else [self.device], device_type="cuda" if is_cpu else self.device.type):
            torch.set_rng_state(self.cpu)
            if self.accelerator is not None:
                torch.get_device_module(self.device).set_rng_state(self.accelerator, self.device)
            yield

    def differ(self) -> bool:
        """Return whether the generators have been drawn from since the capture."""
        now = GeneratorStates.capture(self.device)
        pairs = ((self.cpu, now.cpu), (self.accelerator, now.accelerator))
        return any(then is not None and present is not None and not then.equal(present) for then, present in pairs)

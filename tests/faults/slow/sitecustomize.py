"""Imported by Python at start-up if this folder is on the path: slows down every optimiser step."""

import time

from torch.optim import AdamW

_step = AdamW.step


def _slow_step(self: AdamW, *arguments: object, **more: object) -> object:
    time.sleep(0.1)
    return _step(self, *arguments, **more)


AdamW.step = _slow_step  # type: ignore[method-assign]

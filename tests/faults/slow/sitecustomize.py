"""Read by Python at start where a test put this folder on the path: makes each optimiser step wait a little."""

import time

from torch.optim import AdamW

_step = AdamW.step


def _slow_step(self: AdamW, *arguments: object, **more: object) -> object:
    time.sleep(0.1)
    return _step(self, *arguments, **more)


AdamW.step = _slow_step  # type: ignore[method-assign]

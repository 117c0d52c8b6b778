"""What every form of attention is given."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bertsmith.errors import InputError
from bertsmith.ops.attending import AttendingInputs


@dataclass(frozen=True)
class AttentionInputs(AttendingInputs):
    """One call of attention."""

    dropout: float = 0.0
    window: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is not None and not self.has_order:
            raise InputError(
                f"window is {self.window} and the keys have a layout of their own; allowed: the queries' own keys"
            )

    def is_near(self) -> Tensor | None:
        """Which keys stand in a query's window, in padded rows: (longest, longest); None where all do."""
        if self.window is None:
            return None
        place = torch.arange(self.layout.longest, device=self.query.device)
        return (place[:, None] - place).abs() <= self.window

"""What every form of linear attention is given."""

from dataclasses import dataclass

from bertsmith.errors import InputError
from bertsmith.ops.attending import AttendingInputs
from bertsmith.ops.favor.features import RandomFeatures


@dataclass(frozen=True, kw_only=True)
class FavorInputs(AttendingInputs):
    """One call of linear attention."""

    features: RandomFeatures
    chunk: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk < 1:
            raise InputError(f"chunk is {self.chunk}; allowed: 1 or more")

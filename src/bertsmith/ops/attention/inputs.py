"""What every form of attention is given."""

from dataclasses import dataclass

from bertsmith.ops.attending import AttendingInputs


@dataclass(frozen=True)
class AttentionInputs(AttendingInputs):
    """One call of attention."""

    dropout: float = 0.0

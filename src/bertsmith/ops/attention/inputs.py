"""What every form of attention is given."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from bertsmith.batches.layout import SequenceLayout


@dataclass(frozen=True)
class AttentionInputs:
    """One call of attention.

    Shape: query, key, value (batch, length, heads, head_width), or (tokens, heads, head_width) when packed.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    layout: SequenceLayout
    is_causal: bool = False
    dropout: float = 0.0


def through_padding(compute: Callable[[AttentionInputs], Tensor], inputs: AttentionInputs) -> Tensor:
    """What a form that knows only padded rows gives for packed inputs: pad → compute → unpad."""
    rows = [inputs.layout.pad(tensor)[0] for tensor in (inputs.query, inputs.key, inputs.value)]
    _, layout = inputs.layout.pad(inputs.query)
    padded = replace(inputs, query=rows[0], key=rows[1], value=rows[2], layout=layout)
    return inputs.layout.unpad(compute(padded), inputs.query)

"""What every form of attention is given."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from bertsmith.batches.layout import SequenceLayout


@dataclass(frozen=True)
class AttentionInputs:
    """One call of attention.

    Shape: query (batch, length, heads, head_width), or (tokens, heads, head_width) when packed; key and value likewise
    in their own layout. The head widths of value and key may differ.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    layout: SequenceLayout
    key_layout: SequenceLayout
    is_causal: bool = False
    dropout: float = 0.0


def through_padding(compute: Callable[[AttentionInputs], Tensor], inputs: AttentionInputs) -> Tensor:
    """What a form that knows only padded rows gives for packed inputs: pad → compute → unpad."""
    query, layout = inputs.layout.pad(inputs.query)
    key, key_layout = inputs.key_layout.pad(inputs.key)
    value, _ = inputs.key_layout.pad(inputs.value)
    padded = replace(inputs, query=query, key=key, value=value, layout=layout, key_layout=key_layout)
    return inputs.layout.unpad(compute(padded), inputs.query)

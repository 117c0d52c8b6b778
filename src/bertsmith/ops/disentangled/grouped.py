"""Disentangled attention on a CPU for packed sequences of many lengths: those of about one length together, so that few
pads are paid for. Padded to the longest of a batch, short texts are mostly pads.
"""

from dataclasses import replace

import torch
from torch import Tensor

from bertsmith.data.layout import SequenceLayout, gather_rows, scatter_rows
from bertsmith.ops.disentangled import sdpa
from bertsmith.ops.disentangled.reference import DisentangledInputs


def unsupported(inputs: DisentangledInputs) -> str | None:
    if inputs.query.device.type != "cpu":
        return f"the tensors are on {inputs.query.device.type} and this backend is for the CPU"
    if not inputs.layout.is_packed:
        return "the sequences are not packed"
    if inputs.query_positions is not None or inputs.key_layout is not inputs.layout:
        return "the queries have places or keys of their own"
    if torch.compiler.is_compiling():
        return "the lengths decide on the shapes, which compiled code cannot have"
    if inputs.dropout > 0.0:
        return "there is dropout, whose draws would not be those of a padded batch"
    return None


def preferred(inputs: DisentangledInputs) -> bool:
    return len(inputs.layout.groups.sizes) > 1


def disentangled(inputs: DisentangledInputs) -> Tensor:
    """The attention output, in the shape and dtype of the query."""
    groups = inputs.layout.groups
    counts = [sequences * length for sequences, length in groups.sizes]
    tensors = (inputs.query, inputs.key, inputs.value)
    # (tokens, heads, …) -> of each group (sequences · length, heads, …)
    queries, keys, values = (scatter_rows(tensor, groups.positions, groups.rows).split(counts) for tensor in tensors)
    mixed = []
    for part, size, is_token in zip(
        zip(queries, keys, values, strict=True), groups.sizes, groups.is_token, strict=True
    ):
        layout = SequenceLayout.full(*size) if is_token is None else SequenceLayout.padded(is_token)
        query, key, value = (tensor.unflatten(0, size) for tensor in part)
        own = replace(inputs, query=query, key=key, value=value, layout=layout, key_layout=layout)
        mixed.append(sdpa.disentangled(own).flatten(0, 1))
    return gather_rows(torch.cat(mixed), groups.positions)
